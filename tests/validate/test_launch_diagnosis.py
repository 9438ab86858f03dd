"""Which of many failures came first, told from what each rank left."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.simulator import PlanError
from meshwright.validate.launch import FailureKind, RunSpec, collect_run, worker, write_spec
from meshwright.validate.launch.collect import outcome
from meshwright.validate.launch.diagnosis import RankOutcome, RunFailure, diagnose
from meshwright.validate.launch.environment import WorkerEnvironment
from meshwright.validate.launch.last_words import failures_kept, kind_of
from meshwright.validate.launch.records import (
    SPEC_NAME,
    Heartbeat,
    RankFailure,
    claim_rank,
    measurement_path,
    rank_path,
    read_failure,
    write_failure,
    write_heartbeat,
)
from meshwright.validate.runs import kept_failure, results_folder

SPEC = RunSpec(
    plans=(Path("a.json"),), backend="gloo", results=Path("results"), step_timeout_s=10.0
)


def at(rank: int, phase: str, *, time_s: float = 0.0, world_size: int = 2) -> Heartbeat:
    return Heartbeat(
        rank=rank,
        world_size=world_size,
        host="node1",
        pid=100 + rank,
        phase=phase,
        plan=None if phase == "init" else 0,
        time_s=time_s,
    )


def failed(
    rank: int, kind: FailureKind, message: str, *, time_s: float = 20.0, phase: str = "step 0"
) -> RankFailure:
    return RankFailure(
        rank=rank,
        host="node1",
        pid=100 + rank,
        phase=phase,
        plan=0,
        time_s=time_s,
        kind=kind,
        exception="RuntimeError",
        message=message,
        traceback="",
    )


def state(rank: int, failure: RankFailure | None = None, phase: str = "step 0") -> RankOutcome:
    return RankOutcome(rank=rank, heartbeat=at(rank, phase), failure=failure)


def cause(*states: RankOutcome, stopped_s: float | None = None) -> str:
    failure = diagnose(states, SPEC, stopped_s=stopped_s)
    assert failure is not None
    return failure.cause


def lost(rank: int, *, time_s: float = 20.0) -> RankOutcome:
    message = "[gloo/pair.cc:553] Connection closed by peer [::1]:7. Advice follows"
    return state(rank, failed(rank, FailureKind.PEER_LOST, message, time_s=time_s))


def waited(rank: int) -> RankOutcome:
    message = "[gloo/buffer.cc:78] Timed out waiting 10000ms for recv operation"
    return state(rank, failed(rank, FailureKind.TIMEOUT, message))


def test_a_kill_goes_before_what_survivors_wrote_a_moment_earlier() -> None:
    killed = replace(state(1), exit_code=-9, ended_s=20.1)
    noise = state(0, failed(0, FailureKind.EXCEPTION, "unknown words of a lost connection"))
    assert cause(noise, killed) == "rank 1 was killed (SIGKILL) in step 0"


def test_an_abort_shows_its_last_words() -> None:
    aborted = replace(state(1), exit_code=-6, ended_s=20.1, tail="x\nterminate: 4 bytes, not 8\n\n")
    expected = "rank 1 was killed (SIGABRT) in step 0: terminate: 4 bytes, not 8"
    assert cause(lost(0), aborted) == expected


def test_an_abort_by_a_watchdog_is_a_timeout() -> None:
    tail = "Watchdog caught collective operation timeout\nterminate called\n"
    aborted = replace(state(0), exit_code=-6, ended_s=20.1, tail=tail)
    hanging = replace(state(1, phase="warm-up"), stopped=True, exit_code=-9)
    expected = "rank 1 did not answer for 10 s in step 0; last phase: warm-up"
    assert cause(aborted, hanging) == expected


def test_a_quiet_end_is_a_failure() -> None:
    ended = replace(state(1), exit_code=0, ended_s=20.1)
    assert cause(lost(0), ended) == "rank 1 ended with status 0 in step 0"


def test_the_first_of_two_exceptions_counts() -> None:
    first = state(1, failed(1, FailureKind.EXCEPTION, "first", time_s=19.0))
    second = state(0, failed(0, FailureKind.EXCEPTION, "second"))
    assert cause(second, first) == "rank 1 failed in step 0: RuntimeError: first"


def test_all_waiting_for_each_other_is_said_so() -> None:
    assert cause(waited(0), waited(1)) == (
        "ranks 0-1 waited for 10 s in step 0 while all were there: "
        "Timed out waiting 10000ms for recv operation"
    )


def test_a_rank_that_computes_forever_is_named() -> None:
    stuck = replace(state(0), stopped=True, exit_code=-9)
    done = state(1, phase="done")
    assert cause(stuck, done, stopped_s=25.0) == (
        "rank 0 did not answer for 10 s in step 0; last phase: step 0"
    )


def test_a_run_that_moves_on_too_long_is_stopped() -> None:
    slow = replace(state(0), stopped=True, exit_code=-9)
    assert cause(slow, stopped_s=5.0) == (
        f"rank 0 did not end within {SPEC.deadline_s:g} s; last phase: step 0"
    )


def test_a_cancelled_job_is_not_a_hang() -> None:
    ends = [
        state(rank, failed(rank, FailureKind.TERMINATED, "SIGTERM", time_s=20.0 + rank))
        for rank in range(2)
    ]
    assert cause(*ends) == "rank 0 was terminated (SIGTERM) in step 0"


def test_memory_is_reported_with_its_phase() -> None:
    words = "5 GiB allocated, 6 GiB reserved; CUDA out of memory"
    full = state(1, failed(1, FailureKind.OUT_OF_MEMORY, words, phase="warm-up"))
    assert cause(lost(0), full) == f"rank 1 ran out of memory in warm-up: {words}"


def test_a_rank_that_did_not_reach_the_barrier_is_named() -> None:
    words = failed(0, FailureKind.MISSING, "ranks 1 did not come", phase="build")
    waiting = state(0, replace(words, missing=(1,)), phase="build")
    assert cause(waiting, state(1, phase="init")) == (
        "rank 1 did not come for 300 s in build; last phase: init"
    )


def test_several_plans_are_told_apart() -> None:
    two = replace(SPEC, plans=(Path("a.json"), Path("b.json")))
    killed = RankOutcome(
        rank=0, heartbeat=replace(at(0, "build"), plan=1), failure=None, exit_code=-9, ended_s=1.0
    )
    failure = diagnose([killed], two)
    assert failure is not None
    assert failure.cause == "rank 0 was killed (SIGKILL) in build of b.json"


def test_equal_words_of_many_ranks_are_one_line() -> None:
    killed = replace(state(4), exit_code=-9, ended_s=20.0)
    failure = diagnose([*(lost(rank) for rank in range(4)), killed], SPEC)
    assert failure is not None
    assert failure.others == ("ranks 0-3, step 0: Connection closed by peer [::1]:7",)


def test_a_run_in_which_all_came_to_the_end_has_no_failure() -> None:
    assert diagnose([state(0, phase="done"), state(1, phase="done")], SPEC) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_spec(replace(SPEC, results=tmp_path), tmp_path / SPEC_NAME)
    return tmp_path


def collected(folder: Path) -> RunFailure:
    failure = collect_run(folder).failure
    assert failure is not None
    return failure


def test_a_folder_without_one_rank_names_it(folder: Path) -> None:
    for rank in (0, 2):
        write_heartbeat(at(rank, "done", world_size=3), folder)
    assert collected(folder).cause == "rank 1 of 3 left no file: never started, or not copied"
    assert not collect_run(folder).measurements[0]


def test_a_rank_0_that_never_started_is_named(tmp_path: Path) -> None:
    """It leaves no file; what all were told is there by whoever came first."""
    words = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": "1"}
    worker._claim(
        replace(SPEC, results=tmp_path), WorkerEnvironment.of(words | {"MASTER_ADDR": "127.0.0.1"})
    )
    write_heartbeat(at(2, "init", world_size=3), tmp_path)
    assert collected(tmp_path).cause == "rank 0 of 3 left no file: never started, or not copied"
    for rank in (1, 2):
        waited = failed(rank, FailureKind.MISSING, "2 of 3 ranks had joined", phase="init")
        write_failure(replace(waited, missing=(0,)), tmp_path)
    assert collected(tmp_path).cause == "rank 0 never started; the others waited in init"


def test_a_folder_of_ranks_that_waited_for_one_names_it(folder: Path) -> None:
    write_heartbeat(at(0, "init"), folder)
    words = failed(0, FailureKind.MISSING, "1 of 2 ranks had joined", phase="init")
    write_failure(replace(words, missing=(1,)), folder)
    assert collected(folder).cause == "rank 1 never started; the others waited in init"


def test_a_folder_of_ranks_that_say_nothing(folder: Path) -> None:
    for rank in range(2):
        write_heartbeat(at(rank, f"step {rank}"), folder)
    expected = "ranks 0-1 were silent: killed, or still running; last phase: step 0, step 1"
    assert collected(folder).cause == expected


def test_a_folder_without_a_run_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no rank left a file here"):
        collect_run(folder)
    with pytest.raises(PlanError, match="no such file"):
        collect_run(tmp_path / "nowhere")


def test_half_a_file_is_no_word(folder: Path) -> None:
    write_heartbeat(at(0, "step 0", world_size=1), folder)
    rank_path(folder, 0, "failure.json").write_text('{"rank": 0, "ki', encoding="utf-8")
    assert "silent" in collected(folder).cause


def test_only_the_first_reason_of_a_rank_is_kept(folder: Path) -> None:
    assert write_failure(failed(0, FailureKind.EXCEPTION, "first"), folder)
    assert not write_failure(failed(0, FailureKind.EXCEPTION, "second"), folder)
    kept = read_failure(folder, 0)
    assert kept is not None
    assert kept.message == "first"


def test_a_rank_starts_once_in_a_folder(folder: Path) -> None:
    assert claim_rank(at(0, "init"), folder)
    assert not claim_rank(at(0, "init"), folder)


def test_what_was_measured_is_kept_beside_a_failure(folder: Path) -> None:
    states = [replace(state(0), exit_code=-9, ended_s=1.0)]
    assert not measurement_path(folder, 0, 0).exists()
    assert outcome(replace(SPEC, results=folder), states).measurements == ({},)


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's."""


def test_running_out_of_memory_is_recognised(folder: Path) -> None:
    assert kind_of(MemoryError()) is FailureKind.OUT_OF_MEMORY
    assert kind_of(RuntimeError("can't allocate memory: 8")) is FailureKind.OUT_OF_MEMORY
    claim_rank(at(0, "warm-up"), folder)
    spec = replace(SPEC, results=folder)
    with pytest.raises(OutOfMemoryError), failures_kept(spec, 0):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nmore")
    kept = read_failure(folder, 0)
    assert kept is not None
    assert (kept.kind, kept.phase) == (FailureKind.OUT_OF_MEMORY, "warm-up")
    assert kept.message.endswith("; CUDA out of memory. Tried to allocate 20 GiB")
    assert "resident at its peak" in kept.message or "reserved" in kept.message


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({}, "RANK is not set; start the worker with torchrun or srun"),
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"RANK": "2"}, "RANK=2 is not below 2 ranks"),
        ({"RANK": "0"}, "MASTER_ADDR is not set"),
    ],
)
def test_a_worker_outside_a_run_says_what_it_lacks(
    environment: dict[str, str], complaint: str
) -> None:
    rest = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    with pytest.raises(PlanError, match=complaint):
        WorkerEnvironment.of(rest | environment)


def test_files_of_a_failure_are_kept_and_those_of_a_good_run_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with results_folder(None) as results:
        results.mkdir()
    assert not [*tmp_path.iterdir()]
    with results_folder(None) as results:
        results.mkdir()
        (results / "rank-00000.err").write_text("no room")
        failure = RunFailure(
            rank=0, phase="init", kind=FailureKind.EXCEPTION, cause="", others=(), folder=results
        )
        kept = kept_failure(failure, None).folder
    assert [*tmp_path.iterdir()] == [kept]
    assert (kept / "rank-00000.err").read_text() == "no room"
