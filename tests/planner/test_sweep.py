"""Sweeps: every combination once, kept cell by cell, whatever ends the processes that run them."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from meshwright import PlanError, load_cluster, main, search, sweep
from meshwright.hwprofiles import Attention, load_stack, with_facts
from meshwright.planner.space import SpaceLimits
from meshwright.planner.sweep.outcome import Outcome
from meshwright.planner.sweep.pictures import Measure, _draw_map
from meshwright.planner.sweep.result import RATE
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model, simulate

# Twenty searches of a few layouts each, some of which cannot be: 12 GPUs are no multiple of 8.
BASE = ["--cluster", "dgx-a100", "--pp", "1", "--micro-batch", "1", "--zero", "1"]
BASE += [
    "--recompute",
    "none",
    "--attention",
    "flash",
    "--schedule",
    "1f1b",
    "--memory-limit",
    "3 GiB",
]
GRID = ["--vary", "gpus=8,12,16,24,32", "--vary", "tp=1,4", "--vary", "seq-len=256,1024"]
SWEEP = ["sweep", "gpt2", "--global-batch", "96", *BASE, *GRID]
NUM_CELLS = 20
OPTIONS = {"cluster": "dgx-a100", "pp": 1, "micro_batch": 1, "zero": 1}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sweep that one process ran from end to end."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    assert main([*SWEEP, "--out", str(folder), "--jobs", "1"]) == 0
    return folder


# The command, which sends a signal to itself when so many cells are finished.
STOPPED = """
import os, signal, sys
from contextlib import contextmanager
import meshwright
from meshwright.planner.sweep import command

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it

@contextmanager
def progress_bar(**_):
    yield lambda _what, done, _total: {stop} if done == {done} else None

command.progress_bar = progress_bar
sys.exit(meshwright.main())
"""


def stopped(folder: Path, stop: str) -> tuple[int, int, str]:
    """Return process group, status and errors of the sweep on two processes, stopped half way."""
    code = STOPPED.format(stop=stop, done=NUM_CELLS // 2)
    words = [sys.executable, "-c", code, *SWEEP, "--out", str(folder), "--jobs", "2"]
    done = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with done:
        _, errors = done.communicate(timeout=120)
    assert len([*folder.glob("cells/*.json")]) == NUM_CELLS // 2
    return done.pid, done.returncode, errors


# No script of ours: nothing guards it, and what it calls is defined in it.
SCRIPT = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from meshwright import sweep

print("the script runs")
own = ProcessPoolExecutor(2, get_context("spawn")) if "own" in sys.argv else None
found = sweep({"tp": [1, 2]}, model="gpt2", cluster="dgx-a100", gpus=8, global_batch=16, jobs=2,
              executor=own)
print([row["tp"] for row in found.rows], __spec__, os.path.basename(__file__))
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_without_a_guard_runs_once(tmp_path: Path, *, as_module: bool) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = script_run(tmp_path, *(["-m", "script"] if as_module else ["script.py"]))
    spec = "ModuleSpec(name='script'" if as_module else "None"
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"the script runs\n[1, 2] {spec}")
    assert done.stdout.endswith("script.py\n")


def test_a_script_without_a_guard_is_told_of_it_where_it_brings_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = script_run(tmp_path, "script.py", "own")
    assert done.returncode == 1
    assert "allowed: an executor of fewer, in a script under if __name__" in done.stderr


def script_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, check=False, cwd=folder, capture_output=True, text=True, timeout=60
    )


def ends_with_its_group(group: int) -> bool:
    """Return whether no process of a group is left within some seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_a_sweep_that_is_killed_goes_on_to_the_same_bytes(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    group, status, _ = stopped(folder, "os.kill(os.getpid(), signal.SIGKILL)")
    assert status == -signal.SIGKILL
    assert ends_with_its_group(group)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("cells/*.json")}
    capsys.readouterr()
    assert main([*SWEEP, "--out", str(folder), "--jobs", "2"]) == 0
    assert f"written  {folder}" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing was run again
    assert files_of(folder) == files_of(undisturbed)


def test_an_interrupted_sweep_leaves_no_process_and_says_one_line(tmp_path: Path) -> None:
    # As a terminal does: the signal goes to the processes that run cells, too.
    group, status, errors = stopped(tmp_path / "out", "os.killpg(0, signal.SIGINT)")
    assert (status, errors) == (130, "error: interrupted\n")
    assert ends_with_its_group(group)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_dask_workers_give_the_same_bytes_though_one_is_killed(
    undisturbed: Path, tmp_path: Path
) -> None:
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
    )
    killed: list[int] = []
    with cluster, distributed.Client(cluster, set_as_default=False) as client:

        def kill_one(_what: str, done: int, _total: int) -> None:
            if done == NUM_CELLS // 3 and not killed:
                killed.append(cluster.workers[0].pid)
                os.kill(killed[0], signal.SIGKILL)

        swept(tmp_path / "out", client.get_executor(), kill_one)
    assert len(killed) == 1
    assert files_of(tmp_path / "out") == files_of(undisturbed)


def swept(folder: Path, executor: Executor, progress: object) -> None:
    """Run the sweep of the command from Python."""
    vary = {name: texts.split(",") for name, texts in (each.split("=") for each in GRID[1::2])}
    words = [each.removeprefix("--").replace("-", "_") for each in BASE[::2]]
    options = dict(zip(words, BASE[1::2], strict=True))
    sweep(
        vary,
        model="gpt2",
        global_batch=96,
        executor=executor,
        out=folder,
        progress=progress,
        **options,
    )


def test_rows_are_what_a_search_of_each_cell_finds(undisturbed: Path) -> None:
    with (undisturbed / "sweep.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["cell"]) for row in rows] == list(range(1, NUM_CELLS + 1))
    assert {row["outcome"] for row in rows} == {"fits", "nothing fits"}
    for row in rows:
        assert row["model"] == "gpt2"
        assert row["cluster"] == "dgx-a100"
        assert row["global_batch_size"] == "96"
    for number in (2, 19):
        row = rows[number]
        job = TrainingJob(
            model=load_model("gpt2"), global_batch_size=96, seq_len=int(row["seq_len"])
        )
        limits = SpaceLimits(tp=(int(row["tp"]),), pp=(1,), microbatch_size=(1,), zero_stage=(1,))
        stack = load_stack("megatron-core")
        found = search(job, load_cluster("dgx-a100"), stack, int(row["num_gpus"]), limits=limits)
        assert found.plans[0].plan.recompute == "none"
        assert float(row["step_time_s"]) == found.plans[0].step_time_s
        plan = json.loads((undisturbed / f"plan-{number + 1}.json").read_text())
        assert plan["plan"]["dp"] == found.plans[0].plan.dp


def test_scaling_is_told_against_the_first_number_of_devices() -> None:
    asked = {"model": "gpt2", "global_batch": 32, "tp": 1, "tokens": 86.4e9, "price": 2}
    weak = sweep({"gpus": [8, 32]}, weak=True, **asked, **OPTIONS)
    days = [1e6 / row["tokens_per_s"] for row in weak.rows]  # 86,400 s a day
    assert [row["days"] for row in weak.rows] == pytest.approx(days, rel=1e-12)
    assert weak.rows[0]["cost_usd"] == pytest.approx(days[0] * 24 * 8 * 2, rel=1e-12)
    assert [row["global_batch_size"] for row in weak.rows] == [32, 128]
    few, many = weak.rows
    ratio = many["tokens_per_s"] / few["tokens_per_s"] / 4
    assert many["scaling_efficiency"] == pytest.approx(ratio, rel=1e-12)
    assert list(weak.to_frame()["scaling_efficiency"]) == [1.0, many["scaling_efficiency"]]
    assert weak.to_dict()["cells"][1]["scaling_efficiency"] == many["scaling_efficiency"]
    picture = weak.plot()
    assert picture.get_suptitle() == "Weak scaling: the batch grows with the GPUs"
    left, right = picture.axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("GPUs", "tokens a second, all GPUs")
    assert right.get_ylabel() == "throughput a GPU against the first (%)"
    assert list(right.lines[-1].get_ydata()) == pytest.approx([100, 100 * ratio])
    with pytest.raises(PlanError, match="no picture 'heatmap' of it; allowed: scaling"):
        weak.plot("heatmap")


def test_a_fact_is_varied_as_set_changes_it() -> None:
    values = ["1 TB/s", "2 TB/s"]
    options = {**OPTIONS, "model": "gpt2", "gpus": 8, "global_batch": 16, "tp": 2, "dp": 4}
    found = sweep({"device.memory_bandwidth": values}, simulate=True, **options)
    assert [row["device.memory_bandwidth"] for row in found.rows] == values
    plan = ResolvedPlan(tp=2, dp=4, zero_stage=1, attention=Attention.FLASH, stages=(12,))
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=16, seq_len=1024)
    given = load_cluster("dgx-a100"), load_stack("megatron-core")
    for value, row in zip(values, found.rows, strict=True):
        changed = with_facts(*given, [f"device.memory_bandwidth={value}"])
        assert row["step_time_s"] == simulate(job, plan, *changed).step_time_s
    slow, fast = found.to_frame()["step_time_s"]
    assert slow > fast


def test_the_plan_of_a_cell_simulates_to_what_the_cell_says(undisturbed: Path) -> None:
    found = json.loads((undisturbed / "result.json").read_text(encoding="utf-8"))["cells"]
    fitting = [each for each in found if each["outcome"] == "fits"]
    files = [str(undisturbed / f"plan-{each['cell']}.json") for each in fitting]
    again = sweep({"plan": files}, simulate=True, memory_limit="3 GiB")
    assert [each["step"] for each in again.documents] == [each["step"] for each in fitting]
    smaller = sweep({"memory_limit": ["1 GiB"]}, simulate=True, plan=files[0]).rows[0]
    assert smaller["outcome"] == "does not fit"


def test_a_combination_that_cannot_be_is_a_row_and_a_value_that_cannot_is_a_mistake() -> None:
    options = {**OPTIONS, "model": "gpt2", "global_batch": 96}
    found = sweep({"gpus": [8, 12], "tp": [1, 4], "dp": [3, 8]}, **options)
    assert [row["outcome"] for row in found.rows].count("refused") == 6
    refusals = {row["cell"]: row["reason"] for row in found.rows if row["outcome"] == "refused"}
    assert refusals[4] == "gpus=8 is not tp=4 x dp=8 = 32"
    assert found.num_fitting == 2
    with pytest.raises(PlanError, match=r"--vary gpus=9: gpus=9 is not tp=4 x dp=3"):
        sweep({"gpus": [12, 9]}, tp=4, dp=3, **options)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--vary is missing"),
        (["--vary", "gpu=8"], "--vary 'gpu' is unknown; nearest: gpus"),
        (["--vary", "gpus=8,x"], "--gpus 'x' is not a whole number"),
        (["--vary", "gpus=8,8"], "--vary gpus has '8' twice"),
        (["--vary", "gpus"], "--vary 'gpus' is not NAME=VALUE,VALUE"),
        (["--vary", "device.memory_bandwith=1"], "nearest: memory_bandwidth"),
        (["--vary", "tokens=1e9"], "--vary tokens is not offered"),
        (["--vary", "tp=1,2", "--weak"], "--weak needs --vary gpus"),
        (["--vary", "tp=1", "--vary", "tp=2"], "--vary tp is given more than once"),
        (["--vary", "bucket-size=1 MB"], "--bucket-size is not searched; allowed: with --simulate"),
        (["--vary", "max-tp=1", "--simulate"], "--max-tp has no effect on one layout"),
        (["--vary", "tp=1", "--plan", "x"], "--plan is one layout; allowed: with --simulate"),
        (["--vary", "tp=1", "--jobs", "2", "--dask", "x"], "--jobs and --dask contradict"),
        (["--vary", "tp=1", "--jobs", "0"], "--jobs 0 is out of range; allowed 1 to"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["sweep", "gpt2", "--cluster", "dgx-a100", "--global-batch", "16", "--gpus", "8"]
    assert main([*base, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_folder_of_another_sweep_is_refused(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(undisturbed)
    for words, said in (
        ([*SWEEP[:-1], "seq-len=512"], "vary gpus=8,12,16,24,32 tp=1,4 seq-len=256,1024, not gpus"),
        ([*SWEEP, "--max-dp", "16"], "cell 1 has other options"),
    ):
        assert main([*words, "--out", str(undisturbed)]) == 2
        assert said in capsys.readouterr().err
    assert files_of(undisturbed) == before
    cell = undisturbed / "cells" / "0003.json"
    cell.write_text(cell.read_text(encoding="utf-8").replace('"tp": 4', '"tp": 2'))
    assert main([*SWEEP, "--out", str(undisturbed)]) == 2
    assert f"{cell} is not cell 3 as it was written" in capsys.readouterr().err
    cell.write_bytes(before["cells/0003.json"])
    (tmp_path / "mine.txt").write_text("mine")
    assert main([*SWEEP, "--out", str(tmp_path)]) == 2
    assert "is not empty; allowed: a new folder, or --force" in capsys.readouterr().err


def test_a_map_says_how_a_cell_ended_that_has_no_number() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    row = {"outcome": Outcome.FITS, RATE: 5.0}
    _draw_map(figure, axes, [[row, {"outcome": Outcome.REFUSED}]], Measure(RATE, "throughput"))
    assert [text.get_text() for text in axes.texts] == ["5", "refused"]
