"""Results of a run that are damaged, forged or of another run are refused in one line."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from killing.processes import left_running
from meshwright.hwprofiles import load_cluster, load_stack
from meshwright.hwprofiles.kinds import Precision
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, load_model
from meshwright.validate.launch import RunSpec, write_spec
from meshwright.validate.launch.records import (
    Heartbeat,
    keep_measurement,
    measurement_path,
    rank_path,
    write_heartbeat,
)
from meshwright.validate.ranks import RankMeasurement
from meshwright.validate.runs import collected

JOB = TrainingJob(
    model=load_model("gpt2"), global_batch_size=8, seq_len=64, precision=Precision.FP32
)
SAVED = SavedPlan(
    job=JOB,
    plan=ResolvedPlan(dp=2, stages=(12,)),
    cluster=load_cluster("localhost-cpu"),
    stack=load_stack("ddp"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run of two ranks leaves that came to its end."""
    spec = RunSpec(plans=(Path("plan.json"),), backend="gloo", results=tmp_path)
    write_spec(spec, tmp_path / "run.json")
    for rank in range(2):
        where = {"rank": rank, "world_size": 2, "host": "h", "pid": 7, "plan": 0, "time_s": 1.0}
        write_heartbeat(Heartbeat(phase="done", **where), tmp_path)
        measured = RankMeasurement(
            rank=rank,
            world_size=2,
            backend="gloo",
            flops=3,
            collectives=(),
            peak_bytes=5,
            bytes_at_peak={},
            step_times_s=(0.5,),
        )
        keep_measurement(measured, tmp_path, 0)
    return tmp_path


def test_whole_results_are_read(folder: Path) -> None:
    outcome = collected(str(folder), SAVED)
    assert outcome.failure is None
    assert sorted(outcome.measurements[0]) == [0, 1]


Edit = Callable[[dict], object]
FILES = {
    "heartbeat": lambda folder: rank_path(folder, 0, "heartbeat.json"),
    "measurement": lambda folder: measurement_path(folder, 0, 0),
    "run": lambda folder: folder / "run.json",
}


@pytest.mark.parametrize(
    ("file", "key", "value", "says"),
    [
        ("heartbeat", "world_size", 10**9, r"world_size: 1000000000 is not allowed"),
        ("heartbeat", "world_size", 3, "is of 3 ranks; the plan has 2"),
        ("heartbeat", "world_size", "2", "world_size: '2' is not allowed"),
        ("heartbeat", "rank", 1, "rank: 1 is another one; allowed: 0"),
        ("heartbeat", "time_s", -1.0, "time_s: -1.0 is not allowed"),
        ("heartbeat", "host", ..., "host: missing key"),
        ("heartbeat", "x", 1, "x: "),
        ("measurement", "rank", 7, "rank: 7 is another one; allowed: 0"),
        ("measurement", "world_size", 7, "world_size: 7 is another one; allowed: 2"),
        ("measurement", "flops", None, "flops: None is not allowed"),
        ("measurement", "flops", 10**40, "too long"),
        ("measurement", "peak_bytes", -1, "peak_bytes: -1 is not allowed"),
        ("measurement", "bytes_at_peak", {"x": 1}, "bytes_at_peak"),
        ("measurement", "collectives", [["tp", "all_reduce", 2]], "collectives"),
        ("measurement", "step_times_s", [-0.5], "step_times_s.0: -0.5 is not allowed"),
        ("measurement", "step_times_s", [float("nan")], "step_times_s: nan is not allowed"),
        ("measurement", "step_times_s", ..., None),
        ("measurement", "backend", ..., "backend: missing key"),
        ("measurement", "x", 1, "x: "),
        ("run", "plans", [], "plans: "),
        ("run", "num_steps", 10**9, "num_steps: 1000000000 is not allowed"),
        ("run", "backend", "mpi", "backend: 'mpi' is not allowed"),
    ],
)
def test_what_no_rank_can_have_seen_is_refused_by_file_and_key(
    folder: Path, file: str, key: str, value: object, says: str | None
) -> None:
    path = FILES[file](folder)
    document = json.loads(path.read_text())
    if value is ...:
        del document[key]
    else:
        document[key] = value
    path.write_text(json.dumps(document))
    if says is None:  # a fake run has no times
        collected(str(folder), SAVED)
        return
    with pytest.raises(PlanError, match=re.escape(says)) as caught:
        collected(str(folder), SAVED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", ["", "{", "[]", "7", '{"rank": 0, "rank": 0}', "[" * 9999])
def test_a_cut_file_is_refused_or_no_word(folder: Path, file: str, content: str) -> None:
    path = FILES[file](folder)
    path.write_text(content)
    if file == "heartbeat" and content in {"", "{"}:  # a kill leaves that
        assert collected(str(folder), SAVED).failure is not None
        return
    with pytest.raises(PlanError, match=path.name):
        collected(str(folder), SAVED)


def test_a_worker_imports_nothing_that_a_folder_names(tmp_path: Path) -> None:
    from meshwright.validate.launch.worker import measure_function

    with pytest.raises(PlanError, match="measure=antigravity:open is unknown; allowed: meshwri"):
        measure_function("antigravity:open")


def test_a_silent_listener_is_named_in_time_and_a_store_of_ours_is_for_this_machine() -> None:
    pytest.importorskip("torch")
    from datetime import timedelta

    from meshwright.validate.launch import process_group
    from meshwright.validate.launch.environment import WorkerEnvironment

    def worker(rank: int, port: int, **more: int) -> WorkerEnvironment:
        facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port, **more}
        words = {name: str(value) for name, value in facts.items()}
        return WorkerEnvironment.of({**words, "MASTER_ADDR": "127.0.0.1"})

    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        process_group.CONNECT_S, usual = 0.5, process_group.CONNECT_S
        try:
            with pytest.raises(process_group.MissingRanksError, match="is no store"):
                process_group._meeting_point(
                    worker(1, silent.getsockname()[1]), timedelta(seconds=0.5)
                )
        finally:
            process_group.CONNECT_S = usual
        assert time.monotonic() - began < 10
    # Its starter has taken the port for it: nobody else can, and it does not bind it again.
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    rank_0 = worker(0, port, MESHWRIGHT_STORE_SOCKET=bound.detach())
    store = process_group._meeting_point(rank_0, timedelta(seconds=5))
    assert store.add("x", 1) == 1
    listening = [
        line.split()[1]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_of_a_calibration_end_with_their_parent_and_import_ours_alone(
    number: signal.Signals, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    for name in ("torch.py", "numpy.py", "validate/__init__.py"):
        trap = tmp_path / name
        trap.parent.mkdir(exist_ok=True)
        trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nraise SystemExit(9)\n")
    words = [sys.executable, "-P", "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ranks = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(1.0)  # they import PyTorch now
        parent.send_signal(number)
        parent.wait(timeout=20)
    assert len(ranks) == 2
    assert left_running(lambda: ranks, 5) == []
    assert not (tmp_path / "sprung").exists()


PARENT = """
import os, sys, time
from meshwright.ending import catch_signals
from meshwright.validate.calibration.collectives import bench, job
from meshwright.validate.calibration.rows import Accelerator, collective_cases
catch_signals()
told = job.CollectiveJob(
    accelerator=Accelerator.CPU, num_ranks=2, threads=1, folder=sys.argv[1], timeout_s=60.0,
    deadline_s=1e9, parent=os.getpid(), cases=collective_cases(2),
)
with bench._processes(told, bench.WORKER) as ranks:
    print(*(each.pid for each in ranks), flush=True)
    time.sleep(60)
"""
