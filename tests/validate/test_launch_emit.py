"""Launch files say what the plan and the cluster say, and are shell that can be run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.hwprofiles import Precision, load_cluster, load_stack
from meshwright.planner.reports.plan_file import SavedPlan, read_plan
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, load_model
from meshwright.validate.launch import (
    Launcher,
    RunPhase,
    RunSpec,
    collect_run,
    emit_slurm,
    emit_torchrun,
    read_spec,
    write_launch_folder,
    write_spec,
)

HERE = Path(__file__).parent
SPEC = RunSpec(plans=(Path("plan.json"),), backend="nccl", results=Path("results"))
GLOO = replace(SPEC, backend="gloo", threads_per_rank=2)


def saved(cluster: str = "dgx-a100", **degrees: int) -> SavedPlan:
    pp = degrees.get("pp", 1)
    return SavedPlan(
        job=TrainingJob(
            model=load_model("gpt2"), global_batch_size=8, seq_len=64, precision=Precision.FP32
        ),
        plan=ResolvedPlan(**degrees, stages=(12 // pp,) * pp),
        cluster=load_cluster(cluster),
        stack=load_stack("megatron-core"),
    )


TWO_NODES = saved(tp=4, pp=2, dp=2)
ONE_NODE = saved("localhost-cpu", dp=2)
SCRIPTS = {
    "slurm, two nodes": emit_slurm(TWO_NODES, SPEC),
    "slurm, CPUs": emit_slurm(ONE_NODE, GLOO),
    "torchrun, two nodes": emit_torchrun(TWO_NODES, SPEC),
    "torchrun, one node": emit_torchrun(ONE_NODE, GLOO),
    "odd names": emit_slurm(
        TWO_NODES,
        replace(SPEC, results=Path("it's $(touch x)")),
        spec_file=Path("my folder/a;b.json"),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_shell(name: str) -> None:
    subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, check=True)
    assert SCRIPTS[name].isascii()


def test_a_job_asks_for_what_the_plan_occupies() -> None:
    lines = SCRIPTS["slurm, two nodes"].splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    wanted = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=00:29:00"}
    assert asked >= wanted
    assert "  --nnodes=2 \\" in lines
    assert "  --nproc-per-node=8 \\" in lines
    assert "# 16 ranks on 2 nodes, 8 each: tp 4 x pp 2 x dp 2" in lines


def test_cpus_ask_for_no_gpus_and_no_recorder() -> None:
    script = SCRIPTS["slurm, CPUs"]
    assert "--gpus" not in script
    assert "NCCL" not in script
    assert "--cpus-per-task=4\n" in script
    assert "export OMP_NUM_THREADS=2\n" in script


def test_a_longer_run_asks_for_more_time() -> None:
    assert "--time=02:02:00\n" in emit_slurm(TWO_NODES, replace(SPEC, num_steps=96))


def run_stubbed(script: str, folder: Path, **variables: str) -> list[str]:
    """Run a script with stand-ins for its commands; return the words torchrun was called with."""
    for name, text in {
        "scontrol": "printf 'node-a\\nnode-b\\n'",
        "srun": 'shift; exec "$@"',
        "torchrun": 'printf "%s\\0" "$@" >called',
    }.items():
        stub = folder / name
        stub.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        stub.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], cwd=folder, env={"PATH": path, **variables}, check=True)
    return (folder / "called").read_text("utf-8").split("\0")[:-1]


def test_odd_names_reach_the_worker_unharmed(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_CPUS_PER_TASK": "8"}
    words = run_stubbed(SCRIPTS["odd names"], tmp_path, **job)
    results = "my folder/it's $(touch x)/job-7"
    assert words[-5:] == [
        "-m", "meshwright.validate.launch.worker", "my folder/a;b.json", "--results", results,
    ]  # fmt: skip
    assert "--rdzv-endpoint=node-a:29500" in words
    assert (tmp_path / results).is_dir()
    assert not (tmp_path / "x").exists()


def test_a_script_by_hand_needs_the_number_of_its_node(tmp_path: Path) -> None:
    script = SCRIPTS["torchrun, two nodes"]
    told = {"HEAD_NODE": "node-a", "RUN_NAME": "try-1"}
    words = run_stubbed(script, tmp_path, NODE_RANK="1", **told)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=node-a"} <= set(words)
    ended = subprocess.run(
        ["bash", "-c", script], env=told, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode != 0
    assert "NODE_RANK: is not set: 0 on the first node, up to 1" in ended.stderr


def test_a_half_filled_node_is_refused() -> None:
    with pytest.raises(PlanError, match=r"world_size=12 does not fill nodes of 8 .* nearest 8"):
        emit_slurm(saved(tp=4, dp=3), SPEC)


def test_a_folder_to_copy_stands_alone(tmp_path: Path) -> None:
    script = write_launch_folder(TWO_NODES, SPEC, tmp_path / "job", launcher=Launcher.SLURM)
    assert script.name == "run.sbatch"
    moved = (tmp_path / "job").rename(tmp_path / "moved")
    spec = read_spec(moved / "spec.json")
    assert spec.plans == (moved / "plan.json",)
    assert spec.results == moved / "results"
    assert read_plan(spec.plans[0]) == TWO_NODES


@pytest.mark.slow
def test_torchrun_runs_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    spec = replace(GLOO, measure="launch_fakes:succeed")
    script = write_launch_folder(ONE_NODE, spec, tmp_path, launcher=Launcher.TORCHRUN)
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    subprocess.run(
        ["bash", script.name],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": modules,
            "MESHWRIGHT_MEASURE": spec.measure,
        },
        check=True,
        capture_output=True,
        timeout=120,
    )
    (results,) = (tmp_path / "results").iterdir()
    outcome = collect_run(results)
    assert outcome.failure is None
    assert {rank: each.flops for rank, each in outcome.measurements[0].items()} == {0: 3, 1: 3}


def test_a_spec_file_is_read_as_written(tmp_path: Path) -> None:
    spec = replace(SPEC, plans=(tmp_path / "a.json",), results=tmp_path / "out")
    write_spec(spec, tmp_path / "spec.json")
    assert read_spec(tmp_path / "spec.json") == spec


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("backend", "mpi", "backend: 'mpi' is not allowed"),
        ("num_steps", 0, "num_steps: 0 is not allowed"),
        ("step_timeout_s", -1, "step_timeout_s: -1 is not allowed"),
        ("num_step", 3, "num_step"),
        ("measure", "no function", "measure: 'no function' is not allowed"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(
    tmp_path: Path, key: str, value: object, complaint: str
) -> None:
    path = tmp_path / "spec.json"
    write_spec(SPEC, path)
    fields = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**fields, key: value}), encoding="utf-8")
    with pytest.raises(PlanError, match=f"spec.json: {complaint}"):
        read_spec(path)


def test_limits_depend_on_the_phase() -> None:
    assert [SPEC.limit_s(phase) for phase in (RunPhase.BUILD, RunPhase.step(3))] == [300.0, 60.0]
    assert SPEC.deadline_s == 300 + 3 * 300 + 3 * 60 + 60


def test_the_front_of_the_package_needs_no_torch() -> None:
    modules = "meshwright.validate.launch, meshwright.validate.launch.worker"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    root = HERE.parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
