"""Launch scripts for clusters, as text."""

import math
import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from meshwright.planner.reports import SavedPlan, json_text, plan_document
from meshwright.planner.tables import Launch, hand_script, job_name, slurm_script
from meshwright.planner.tables import nodes_of as nodes_of_ranks
from meshwright.validate.launch.spec import RunSpec, write_spec
from meshwright.validate.ranks import num_processes

START_S = 300.0  # for nodes to boot and file systems to wake
SPEC_FILE = Path("spec.json")
# PyTorch's documentation of ProcessGroupNCCL's environment variables, 2.13: the last so many
# calls of each rank are kept, and written when one of them times out.
_RECORDER = (
    "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
    "export TORCH_NCCL_DUMP_ON_TIMEOUT=1",
    'export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$results/nccl-trace-"',
)


class Launcher(StrEnum):
    """Launcher of the ranks."""

    SLURM = "slurm"
    TORCHRUN = "torchrun"


def emit_slurm(saved: SavedPlan, spec: RunSpec, *, spec_file: Path = SPEC_FILE) -> str:
    """Return a script for ``sbatch`` that runs the worker on every device of the plan.

    Args:
        saved: The plan, and the cluster that says how many devices a node has.
        spec: Spec of the run; sets the time limit and the CPUs.
        spec_file: Path of *spec* from the folder of submission.

    Raises:
        PlanError: If the plan does not fill its nodes.
    """
    return slurm_script(_launch(saved, spec, spec_file))


def emit_torchrun(saved: SavedPlan, spec: RunSpec, *, spec_file: Path = SPEC_FILE) -> str:
    """Return a script to be started by hand on each node of the plan.

    Args:
        saved: The plan, and the cluster that says how many devices a node has.
        spec: Spec of the run.
        spec_file: Path of *spec* from the folder that the script is started in.

    Raises:
        PlanError: If the plan does not fill its nodes.
    """
    return hand_script(_launch(saved, spec, spec_file))


def _launch(saved: SavedPlan, spec: RunSpec, spec_file: Path) -> Launch:
    num_nodes, per_node = nodes_of(saved)
    return Launch(
        name=job_name(f"validate-{saved.job.model.name}"),
        remarks=(_summary(saved),),
        num_nodes=num_nodes,
        per_node=per_node,
        command=_command(spec_file),
        before=tuple(_variables(spec)),
        results=_shell_path(spec_file.parent / spec.results),
        gpus=spec.backend == "nccl",
        cpus_per_rank=spec.threads_per_rank,
        time_limit=_time_limit(spec),
    )


def write_launch_folder(
    saved: SavedPlan, spec: RunSpec, folder: Path, *, launcher: Launcher
) -> Path:
    """Write plan, spec and script into *folder*, to be copied to a cluster; return the script.

    Args:
        saved: The plan to run.
        spec: Spec of the run; plan and results become names in the folder.
        folder: Made if it does not exist.
        launcher: Launcher of the script to write.

    Raises:
        PlanError: If the plan does not fill its nodes.
    """
    spec = replace(spec, plans=(Path("plan.json"),), results=Path("results"))
    if launcher is Launcher.SLURM:
        script, text = folder / "run.sbatch", emit_slurm(saved, spec)
    else:
        script, text = folder / "run.sh", emit_torchrun(saved, spec)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json_text(plan_document(saved)), encoding="utf-8")
    write_spec(spec, folder / SPEC_FILE)
    script.write_text(text, encoding="utf-8")
    return script


def nodes_of(saved: SavedPlan) -> tuple[int, int]:
    """Return the nodes that a plan occupies and its ranks on each.

    Raises:
        PlanError: If the last node would be half empty.
    """
    return nodes_of_ranks(num_processes(saved.plan, saved.stack), saved.cluster.devices_per_node)


def _summary(saved: SavedPlan) -> str:
    num_nodes, per_node = nodes_of(saved)
    plan = saved.plan
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes, {per_node} each"
    layout = " x ".join(f"{axis} {degree}" for axis, degree in plan.degrees.items())
    return f"{num_processes(plan, saved.stack)} ranks on {nodes}: {layout}"


def _time_limit(spec: RunSpec) -> str:
    minutes = math.ceil((spec.deadline_s + START_S) / 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _variables(spec: RunSpec) -> list[str]:
    recorder = _RECORDER if spec.backend == "nccl" else ()
    return [f"export OMP_NUM_THREADS={spec.threads_per_rank}", *recorder]


def _command(spec_file: Path) -> tuple[str, ...]:
    """Return torchrun's arguments of the worker; the console shows rank 0 of a node."""
    words = f'{_shell_path(spec_file)} --results "$results"'
    return (
        "--local-ranks-filter=0",
        # 3: standard output and standard error.
        "--tee=3",
        '--log-dir="$results/logs"',
        f"-m meshwright.validate.launch.worker {words}",
    )


def _shell_path(path: Path) -> str:
    """Return *path* as a word of a shell that no command takes for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
