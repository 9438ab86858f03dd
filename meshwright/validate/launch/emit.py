"""Launch files: what starts a plan's ranks on a cluster, as text."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from meshwright.planner.reports import SavedPlan, json_text, plan_document
from meshwright.simulator import PlanError
from meshwright.validate.launch.spec import RunSpec, write_spec
from meshwright.validate.ranks import num_processes

PORT = 29500  # torchrun's own
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
    """What starts the ranks."""

    SLURM = "slurm"
    TORCHRUN = "torchrun"


def emit_slurm(saved: SavedPlan, spec: RunSpec, *, spec_file: Path = SPEC_FILE) -> str:
    """Return a script for ``sbatch`` that runs the worker on every device of the plan.

    Args:
        saved: The plan, and the cluster that says how many devices a node has.
        spec: What the ranks are told; sets the time limit and the CPUs.
        spec_file: Where *spec* is, seen from the folder of submission.

    Raises:
        PlanError: If the plan does not fill its nodes.
    """
    num_nodes, per_node = nodes_of(saved)
    gpus = [f"#SBATCH --gpus-per-node={per_node}"] if spec.backend == "nccl" else []
    results = shlex.quote(str(spec_file.parent / spec.results))
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_job_name(saved)}",
        f"#SBATCH --nodes={num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *gpus,
        f"#SBATCH --cpus-per-task={per_node * spec.threads_per_rank}",
        "#SBATCH --exclusive",
        f"#SBATCH --time={_time_limit(spec)}",
        "#SBATCH --output=%x-%j.log",
        "",
        f"# {_summary(saved)}",
        "# Where it may run is yours to say: sbatch --partition=... --account=... THIS-FILE",
        "",
        "set -euo pipefail",
        "",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'results={results}/job-"$SLURM_JOB_ID"',
        'mkdir -p "$results"',
        "",
        *_variables(spec),
        "# From Slurm 22.05 on, srun does not take this from the job.",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
        "",
        *_command(
            "srun --kill-on-bad-exit=1 torchrun",
            [
                f"--nnodes={num_nodes}",
                f"--nproc-per-node={per_node}",
                "--rdzv-backend=c10d",
                f'--rdzv-endpoint="${{hosts[0]}}:{PORT}"',
                '--rdzv-id="$SLURM_JOB_ID"',
            ],
            spec_file,
        ),
    ]
    return "\n".join(lines) + "\n"


def emit_torchrun(saved: SavedPlan, spec: RunSpec, *, spec_file: Path = SPEC_FILE) -> str:
    """Return a script to be started by hand on each node of the plan.

    Args:
        saved: The plan, and the cluster that says how many devices a node has.
        spec: What the ranks are told.
        spec_file: Where *spec* is, seen from the folder the script is started in.

    Raises:
        PlanError: If the plan does not fill its nodes.
    """
    num_nodes, per_node = nodes_of(saved)
    hand = _one_node() if num_nodes == 1 else _several_nodes(num_nodes)
    results = shlex.quote(str(spec_file.parent / spec.results))
    lines = [
        "#!/bin/bash",
        f"# {_summary(saved)}",
        f"# {hand.usage}",
        "",
        "set -euo pipefail",
        "",
        *hand.checks,
        f'results={results}/run-"{hand.run_name}"',
        'mkdir -p "$results"',
        "",
        *_variables(spec),
        "",
        *_command("torchrun", [*hand.meeting, f"--nproc-per-node={per_node}"], spec_file),
    ]
    return "\n".join(lines) + "\n"


def write_launch_folder(
    saved: SavedPlan, spec: RunSpec, folder: Path, *, launcher: Launcher
) -> Path:
    """Write plan, spec and script into *folder*, to be copied to a cluster; return the script.

    Args:
        saved: The plan to run.
        spec: What the ranks are told; plan and results become names in the folder.
        folder: Made if it does not exist.
        launcher: Which script to write.

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
        PlanError: If the last node would be half empty: torchrun may number nodes otherwise than
            the plan does, and its ranks would sit elsewhere.
    """
    world_size = num_processes(saved.plan, saved.stack)
    per_node = saved.cluster.devices_per_node
    if world_size <= per_node:
        return 1, world_size
    if world_size % per_node:
        raise PlanError(
            f"world_size={world_size} does not fill nodes of {per_node} devices; a launch file "
            f"needs a multiple, nearest {world_size - world_size % per_node}"
        )
    return world_size // per_node, per_node


class _ByHand(NamedTuple):
    """What differs between a script for one node and one that is started on several."""

    usage: str
    checks: tuple[str, ...]
    run_name: str
    meeting: tuple[str, ...]


def _one_node() -> _ByHand:
    return _ByHand("Start it with: bash THIS-FILE", (), "$(date +%Y%m%d-%H%M%S)", ("--standalone",))


def _several_nodes(num_nodes: int) -> _ByHand:
    example = "NODE_RANK=0 HEAD_NODE=first-node RUN_NAME=try-1 bash THIS-FILE"
    return _ByHand(
        usage=f"Start it on every node, with its number: {example}",
        checks=(
            f': "${{NODE_RANK:?is not set: 0 on the first node, up to {num_nodes - 1}}}"',
            ': "${HEAD_NODE:?is not set: the name of the first node}"',
            ': "${RUN_NAME:?is not set: a new one for each run, the same on all nodes}"',
            "",
        ),
        run_name="$RUN_NAME",
        meeting=(
            f"--nnodes={num_nodes}",
            '--node-rank="$NODE_RANK"',
            '--master-addr="$HEAD_NODE"',
            f'--master-port="${{MASTER_PORT:-{PORT}}}"',
        ),
    )


def _summary(saved: SavedPlan) -> str:
    num_nodes, per_node = nodes_of(saved)
    plan = saved.plan
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes, {per_node} each"
    layout = f"tp {plan.tp} x pp {plan.pp} x dp {plan.dp}"
    return f"{num_processes(plan, saved.stack)} ranks on {nodes}: {layout}"


def _job_name(saved: SavedPlan) -> str:
    """Return a name of letters that no scheduler misreads; directives know no quotes."""
    return "validate-" + re.sub(r"[^A-Za-z0-9._-]+", "-", saved.job.model.name)[:60]


def _time_limit(spec: RunSpec) -> str:
    minutes = math.ceil((spec.deadline_s + START_S) / 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _variables(spec: RunSpec) -> list[str]:
    recorder = _RECORDER if spec.backend == "nccl" else ()
    return [f"export OMP_NUM_THREADS={spec.threads_per_rank}", *recorder]


def _command(start: str, meeting: Sequence[str], spec_file: Path) -> list[str]:
    """Return the command, a line for each option; console output is that of a node's rank 0."""
    options = [
        *meeting,
        "--local-ranks-filter=0",
        "--tee=3",
        '--log-dir="$results/logs"',
        f'-m meshwright.validate.launch.worker {shlex.quote(str(spec_file))} --results "$results"',
    ]
    return " \\\n  ".join([start, *options]).split("\n")
