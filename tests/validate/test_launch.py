"""Runs of real processes end within their limits, with one line that says what went wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from killing.processes import left_running
from meshwright.hwprofiles import Precision, load_cluster, load_stack
from meshwright.planner.reports.documents import json_text
from meshwright.planner.reports.plan_file import SavedPlan, plan_document
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, load_model
from meshwright.validate.launch import (
    FailureKind,
    RunOutcome,
    RunSpec,
    collect_run,
    run_local,
    write_spec,
)

pytest.importorskip("torch")

HERE = Path(__file__).parent
FAKES = list(re.finditer(r"^def (\w+)", (HERE / "launch_fakes.py").read_text(), re.MULTILINE))
LONG_S = 60.0  # a limit that no test should come to
Run = Callable[..., RunOutcome]


def saved_plan(dp: int) -> SavedPlan:
    job = TrainingJob(
        model=load_model("gpt2"), global_batch_size=8, seq_len=64, precision=Precision.FP32
    )
    return SavedPlan(
        job=job,
        plan=ResolvedPlan(dp=dp, stages=(12,)),
        cluster=load_cluster("localhost-cpu"),
        stack=load_stack("ddp"),
    )


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A run whose workers find the stand-ins beside this file."""
    monkeypatch.syspath_prepend(str(HERE))
    names = [each.group(1) for each in FAKES]
    monkeypatch.setenv("MESHWRIGHT_MEASURE", " ".join(f"launch_fakes:{name}" for name in names))
    plan = tmp_path / "tiny.json"
    plan.write_text(json_text(plan_document(saved_plan(2))), encoding="utf-8")
    return RunSpec(
        plans=(plan,),
        backend="gloo",
        results=tmp_path / "results",
        init_timeout_s=LONG_S,
        step_timeout_s=LONG_S,
        threads_per_rank=1,
    )


@pytest.fixture
def run(spec: RunSpec) -> Run:
    """Run a stand-in on two ranks, and check that it ends long before its deadline."""

    def told(what: str, done: int, total: int) -> None:
        assert what == "rank 0"
        assert 0 <= done < total

    def start(measure: str, *, ranks: int = 2, **changes: object) -> RunOutcome:
        changed = replace(spec, measure=f"launch_fakes:{measure}", **changes)
        began = time.monotonic()
        outcome = run_local(changed, ranks, progress=told)
        assert time.monotonic() - began < LONG_S / 2
        return outcome

    return start


def failure_file(spec: RunSpec, rank: int) -> dict:
    return json.loads((spec.results / f"rank-{rank:05d}.failure.json").read_text("utf-8"))


def test_all_ranks_measure_every_plan_and_tell_phases_in_order(run: Run, spec: RunSpec) -> None:
    told: list[tuple[str, int, int]] = []
    plans = replace(spec, measure="launch_fakes:succeed", plans=spec.plans * 2)
    outcome = run_local(plans, 2, progress=lambda *each: told.append(each))
    assert outcome.failure is None
    assert [sorted(plan) for plan in outcome.measurements] == [[0, 1], [0, 1]]
    assert {each.flops for plan in outcome.measurements for each in plan.values()} == {3}
    assert outcome.measurements[0][1].versions == {"threads": "1"}
    assert collect_run(spec.results).measurements == outcome.measurements
    with pytest.raises(PlanError, match="holds an earlier run; name a new folder"):
        run("succeed")
    places = [done for _, done, _ in told]
    assert places == sorted(places)
    assert {total for _, _, total in told} == {2 * len(spec.phases)}
    assert places[-1] == 2 * len(spec.phases) - 1


def test_a_killed_rank_is_named_not_its_survivor(run: Run, spec: RunSpec) -> None:
    failure = run("be_killed").failure
    assert failure is not None
    assert failure.cause == "rank 1 was killed (SIGKILL) in step 1"
    assert (failure.rank, failure.phase) == (1, "step 1")
    (survivor,) = failure.others
    assert survivor.startswith("rank 0, step 1: ")
    assert failure_file(spec, 0)["kind"] == FailureKind.PEER_LOST
    collected = collect_run(spec.results).failure
    assert collected is not None
    assert collected.cause == ("rank 1 was lost: killed, or its machine failed; last phase: step 1")


@pytest.mark.slow
def test_a_hanging_rank_is_named_not_the_one_that_waits(run: Run, spec: RunSpec) -> None:
    """The limit of a step holds for a group that the program made itself."""
    outcome = run("hang", step_timeout_s=2.0)
    assert outcome.failure is not None
    expected = "rank 1 did not answer for 2 s in step 0; last phase: step 0"
    assert outcome.failure.cause == expected
    stopped = failure_file(spec, 1)
    assert (stopped["kind"], stopped["phase"]) == (FailureKind.TERMINATED, "step 0")
    assert "launch_fakes.py" in stopped["traceback"]  # where it hung
    collected = collect_run(spec.results).failure
    assert collected is not None
    assert collected.cause == expected


def test_an_exception_in_one_rank_is_the_cause(run: Run, spec: RunSpec) -> None:
    failure = run("raise_in_one").failure
    assert failure is not None
    assert failure.cause == "rank 1 failed in step 1: ValueError: expected 4 heads, got 3"
    assert failure.kind is FailureKind.EXCEPTION
    assert "raise ValueError" in failure_file(spec, 1)["traceback"]
    assert failure.report().splitlines()[-1] == f"  files of all ranks: {spec.results}"
    assert (spec.results / "rank-00001.err").exists()


def test_a_rank_that_never_comes_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 'import os, time\nif os.environ.get("RANK") == "1":\n    time.sleep(600)\n'
    (tmp_path / "sitecustomize.py").write_text(late, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    failure = run("succeed", init_timeout_s=3.0).failure
    assert failure is not None
    assert failure.cause == "rank 1 never started; the others waited in init"
    (other,) = failure.others
    assert other.endswith("1 of 2 ranks had joined after 3 s")


def test_a_plan_for_another_number_of_ranks_is_refused(run: Run) -> None:
    outcome = run("succeed", ranks=1)
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.MISTAKE
    assert outcome.failure.cause == (
        "rank 0 cannot run in init: tiny.json needs 2 ranks (tp 1 x pp 1 x dp 2); this run has 1"
    )
    assert 0 not in outcome.measurements[0]


def hanging_run(spec: RunSpec, folder: Path) -> "subprocess.Popen[bytes]":
    """Start a launcher whose two ranks do not end of themselves."""
    # A shell that runs the tests in its background has had them ignore Ctrl-C; a user's does not.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from pathlib import Path\n"
        "from meshwright.validate.launch import read_spec, run_local\n"
        "run_local(read_spec(Path(sys.argv[3])), 2)\n"
    )
    write_spec(replace(spec, measure="launch_fakes:hang"), folder / "spec.json")
    words = [sys.executable, "-c", program, str(HERE), os.fspath(HERE.parents[1])]
    return subprocess.Popen([*words, str(folder / "spec.json")], stderr=subprocess.PIPE)


def test_ctrl_c_leaves_no_process(spec: RunSpec, tmp_path: Path) -> None:
    launcher = hanging_run(spec, tmp_path)
    heartbeats = [spec.results / f"rank-{rank:05d}.heartbeat.json" for rank in range(2)]
    until = time.monotonic() + LONG_S
    while not all(path.exists() for path in heartbeats) and time.monotonic() < until:
        time.sleep(0.1)
    processes = [json.loads(path.read_text("utf-8"))["pid"] for path in heartbeats]
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=LONG_S)
    assert b"KeyboardInterrupt" in said
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert failure_file(spec, 0)["message"] == "SIGTERM"


def test_ranks_end_with_a_launcher_that_is_killed_before_they_look(
    spec: RunSpec, tmp_path: Path
) -> None:
    with hanging_run(spec, tmp_path) as launcher:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        until = time.monotonic() + LONG_S
        while len(children.read_text().split()) < 2 and time.monotonic() < until:
            time.sleep(0.005)
        ranks = [int(word) for word in children.read_text().split()]
        launcher.kill()
    assert len(ranks) == 2
    assert left_running(lambda: ranks, LONG_S / 2) == []
