"""Diagnosis of a run: the one failure that came first, from the files of all ranks."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.validate.launch.records import FailureKind, Heartbeat, RankFailure, kind_of_text
from meshwright.validate.launch.spec import RunPhase, RunSpec

MAX_WORDS = 300
# The launcher sees the end of a process a little after the others felt it.
SIGHTING_DELAY_S = 0.5
OWN_KINDS = {FailureKind.MISTAKE, FailureKind.EXCEPTION, FailureKind.OUT_OF_MEMORY}
HEARSAY_KINDS = {FailureKind.TIMEOUT, FailureKind.PEER_LOST}
_SOURCE_FILE = re.compile(r"^\[[^\]]*\] *")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """State of a rank after a run.

    Args:
        rank: Rank, from 0.
        heartbeat: Its last phase; None if it never started.
        failure: Why it failed in its own words, if it left any.
        exit_code: Of its process, minus the signal that killed it; None where nobody watched.
        ended_s: When it was seen to have ended, in seconds since 1970.
        stopped: Whether its launcher stopped it, after another one had failed.
        tail: The end of what it wrote to standard error.
    """

    rank: int
    heartbeat: Heartbeat | None
    failure: RankFailure | None
    exit_code: int | None = None
    ended_s: float | None = None
    stopped: bool = False
    tail: str = ""

    @property
    def phase(self) -> str:
        """Phase that it ran last."""
        if self.failure is not None:
            return self.failure.phase
        return self.heartbeat.phase if self.heartbeat is not None else RunPhase.INIT

    @property
    def plan(self) -> int | None:
        """Index of the plan that it ran last."""
        return self.heartbeat.plan if self.heartbeat is not None else None

    @property
    def is_done(self) -> bool:
        """Whether it came to the end."""
        return self.heartbeat is not None and self.heartbeat.phase == RunPhase.DONE

    @property
    def kind(self) -> FailureKind | None:
        """Kind of its failure; None if it recorded none and its exit code shows none."""
        if self.is_done:
            return None
        if self.failure is not None:
            return self.failure.kind
        if self.stopped or self.exit_code is None:
            return None
        aborted = self.exit_code == -signal.SIGABRT
        # NCCL's watchdog aborts its process when another rank does not answer.
        kind = kind_of_text(self.tail) if aborted else FailureKind.EXCEPTION
        return FailureKind.TERMINATED if kind is FailureKind.EXCEPTION else kind

    @property
    def words(self) -> str:
        """Its last message, in one line."""
        if self.failure is not None and self.kind in HEARSAY_KINDS:
            # Without the file of the library, and without its advice.
            return one_line(_SOURCE_FILE.sub("", self.failure.message).partition(". ")[0])
        if self.failure is not None:
            return one_line(f"{self.failure.exception}: {self.failure.message}")
        if self.exit_code is not None and not self.stopped:
            return one_line(f"{exit_words(self.exit_code)} {self.last_line}")
        return f"left no word after {self.phase}" if self.heartbeat else "never started"

    @property
    def last_line(self) -> str:
        """The last line that it wrote to standard error."""
        lines = (line.strip() for line in reversed(self.tail.splitlines()))
        return next((line for line in lines if line), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """Failure of a run.

    Args:
        rank: The one that failed first, or the first of several.
        phase: Its phase.
        kind: Kind of the failure.
        cause: One line that names rank, phase and cause.
        others: Messages of the other ranks, a line for each group with the same one.
        folder: Folder of all files of the ranks.
    """

    rank: int
    phase: str
    kind: FailureKind
    cause: str
    others: tuple[str, ...]
    folder: Path

    def report(self) -> str:
        """Return the cause, the messages of the other ranks, and the folder of their files."""
        lines = [self.cause, *(f"  {line}" for line in self.others)]
        return "\n".join([*lines, f"  files of all ranks: {self.folder}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    time_s: float
    rank: int
    kind: FailureKind
    cause: str


def diagnose(
    states: Sequence[RankOutcome], spec: RunSpec, *, stopped_s: float | None = None
) -> RunFailure | None:
    """Return the earliest failure, or None if all ranks came to the end.

    What a rank says of itself goes before what others say of it: survivors only see that a
    connection closed, or that nothing came.

    Args:
        states: One of each rank, in order.
        spec: Spec of the run.
        stopped_s: When the launcher gave up waiting for ranks that did not fail.
    """
    if all(state.is_done for state in states):
        return None
    # A launcher ends all ranks once one has failed: those ends are no causes.
    states = _without_echoes(states)
    events = [event for state in states for event in [_own_event(state, spec)] if event]
    events += [
        _missing_event(states, spec, state.failure)
        for state in states
        if state.failure is not None and state.kind is FailureKind.MISSING
    ]
    hang = _hang_event(states, spec, stopped_s)
    if hang is not None:
        events.append(hang)
    if events:
        first = min(events, key=lambda event: event.time_s)
        absent = [state.rank for state in states if state.heartbeat is None and state.kind is None]
        if absent and _may_wait_for_another(first, states):
            first = _absence(absent, first)
    else:
        first = _silence(states, spec)
    return RunFailure(
        rank=first.rank,
        phase=states[first.rank].phase,
        kind=first.kind,
        cause=one_line(first.cause),
        others=_others(states, first.rank),
        folder=spec.results,
    )


def rank_words(ranks: Sequence[int]) -> str:
    """Return ranks as words.

    >>> rank_words([3]), rank_words([0, 1, 2, 7])
    ('rank 3', 'ranks 0-2, 7')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(str(rank) for rank in span) for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def exit_words(exit_code: int) -> str:
    """Return the end of a process in words.

    >>> exit_words(-9), exit_words(3)
    ('was killed (SIGKILL)', 'ended with status 3')
    """
    if exit_code >= 0:
        return f"ended with status {exit_code}"
    number = -exit_code
    names = {each.value: each.name for each in signal.Signals}
    return f"was killed ({names.get(number, f'signal {number}')})"


def one_line(text: str) -> str:
    """Return *text* in one line of at most `MAX_WORDS` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_WORDS else f"{line[:MAX_WORDS]}..."


def _without_echoes(states: Sequence[RankOutcome]) -> list[RankOutcome]:
    """Mark ranks that were terminated after another one had failed as stopped for that."""
    failures = [state.failure for state in states if state.failure is not None]
    first_s = min((each.time_s for each in failures), default=0.0)
    return [
        replace(state, stopped=True)
        if state.kind is FailureKind.TERMINATED
        and state.failure is not None
        and state.failure.time_s > first_s
        else state
        for state in states
    ]


def _where(phase: str, plan: int | None, spec: RunSpec) -> str:
    if plan is None or len(spec.plans) == 1:
        return phase
    return f"{phase} of {spec.plans[plan].name}"


def _own_event(state: RankOutcome, spec: RunSpec) -> _Event | None:
    """Return the event of a rank's own failure, if it had one."""
    kind, failure = state.kind, state.failure
    where = _where(state.phase, state.plan, spec)
    if failure is not None and kind in OWN_KINDS:
        assert kind is not None
        verb = {
            FailureKind.MISTAKE: "cannot run",
            FailureKind.OUT_OF_MEMORY: "ran out of memory",
        }.get(kind, "failed")
        words = state.words if kind is FailureKind.EXCEPTION else failure.message
        cause = f"rank {state.rank} {verb} in {where}: {words}"
        return _Event(time_s=failure.time_s, rank=state.rank, kind=kind, cause=cause)
    if kind is not FailureKind.TERMINATED or state.stopped:
        return None
    if failure is not None:
        cause = f"rank {state.rank} was terminated ({failure.message}) in {where}"
        return _Event(time_s=failure.time_s, rank=state.rank, kind=kind, cause=cause)
    assert state.exit_code is not None
    assert state.ended_s is not None
    cause = f"rank {state.rank} {exit_words(state.exit_code)} in {where}"
    # Killed from outside: its last line says nothing of the reason.
    if state.last_line and state.exit_code not in (-signal.SIGKILL, -signal.SIGTERM):
        cause += f": {state.last_line}"
    time_s = state.ended_s - SIGHTING_DELAY_S
    return _Event(time_s=time_s, rank=state.rank, kind=kind, cause=cause)


def _missing_event(states: Sequence[RankOutcome], spec: RunSpec, failure: RankFailure) -> _Event:
    waited = f"{spec.limit_s(failure.phase):g} s"
    where = _where(failure.phase, failure.plan, spec)
    last = _last_phases(states, spec, failure.missing)
    cause = f"{rank_words(failure.missing)} did not come for {waited} in {where}{last}"
    rank = failure.missing[0]
    return _Event(time_s=failure.time_s, rank=rank, kind=failure.kind, cause=cause)


def _may_wait_for_another(event: _Event, states: Sequence[RankOutcome]) -> bool:
    """Return True if a rank that never started may be the cause of an event."""
    state = states[event.rank]
    was_killed = event.kind is FailureKind.TERMINATED and state.exit_code is not None
    return event.kind not in OWN_KINDS and not was_killed and state.phase == RunPhase.INIT


def _absence(absent: Sequence[int], event: _Event) -> _Event:
    cause = f"{rank_words(absent)} never started; the others waited in {RunPhase.INIT}"
    kind = FailureKind.MISSING
    return _Event(time_s=event.time_s, rank=absent[0], kind=kind, cause=cause)


def _hang_event(
    states: Sequence[RankOutcome], spec: RunSpec, stopped_s: float | None
) -> _Event | None:
    """Return the event of ranks that let others wait, if a wait ended at its timeout."""
    timeouts = [
        (state.failure.time_s if state.failure else state.ended_s or 0.0, state)
        for state in states
        if state.kind is FailureKind.TIMEOUT
    ]
    silent = [state for state in states if not state.is_done and _is_silent(state)]
    if timeouts:
        time_s, witness = min(timeouts, key=lambda each: each[0])
    elif stopped_s is not None and silent:
        time_s, witness = stopped_s, min(silent, key=_since_s)
        overdue = [each for each in silent if stopped_s - _since_s(each) > spec.limit_s(each.phase)]
        if not overdue:
            return _late_event(states, spec, stopped_s)
        silent = overdue
    else:
        return None
    where = f"{spec.limit_s(witness.phase):g} s in {_where(witness.phase, witness.plan, spec)}"
    ranks = [state.rank for state in silent]
    if ranks:
        cause = f"{rank_words(ranks)} did not answer for {where}{_last_phases(states, spec, ranks)}"
    else:
        ranks = [state.rank for _, state in timeouts]
        cause = f"{rank_words(ranks)} waited for {where} while all were there: {witness.words}"
    return _Event(time_s=time_s, rank=ranks[0], kind=FailureKind.TIMEOUT, cause=cause)


def _late_event(states: Sequence[RankOutcome], spec: RunSpec, stopped_s: float) -> _Event:
    """Return the event of a run that moved on, but took longer than all its limits together."""
    ranks = [state.rank for state in states if not state.is_done]
    cause = f"{rank_words(ranks)} did not end within {spec.deadline_s:g} s"
    cause += _last_phases(states, spec, ranks)
    return _Event(time_s=stopped_s, rank=ranks[0], kind=FailureKind.TIMEOUT, cause=cause)


def _is_silent(state: RankOutcome) -> bool:
    return state.kind is None or (state.kind is FailureKind.TERMINATED and state.stopped)


def _since_s(state: RankOutcome) -> float:
    return state.heartbeat.time_s if state.heartbeat is not None else 0.0


def _last_phases(states: Sequence[RankOutcome], spec: RunSpec, ranks: Sequence[int]) -> str:
    last = sorted({_where(states[rank].phase, states[rank].plan, spec) for rank in ranks})
    return f"; last phase: {', '.join(last)}"


def _silence(states: Sequence[RankOutcome], spec: RunSpec) -> _Event:
    """Return the failure of a run in which no rank recorded one of its own."""
    ranks = [state.rank for state in states if not state.is_done and state.kind is None]
    absent = [rank for rank in ranks if states[rank].heartbeat is None]
    if absent:
        ranks = absent
        cause = f"{rank_words(ranks)} of {len(states)} left no file: never started, or not copied"
    elif ranks:
        lost = any(state.kind is FailureKind.PEER_LOST for state in states)
        why = "lost: killed, or its machine failed" if lost else "silent: killed, or still running"
        verb = "was" if len(ranks) == 1 else "were"
        cause = f"{rank_words(ranks)} {verb} {why}{_last_phases(states, spec, ranks)}"
    else:
        ranks = [state.rank for state in states if not state.is_done]
        cause = f"{rank_words(ranks)} failed in {states[ranks[0]].phase}: {states[ranks[0]].words}"
    kind = states[ranks[0]].kind or FailureKind.TERMINATED
    return _Event(time_s=0.0, rank=ranks[0], kind=kind, cause=cause)


def _others(states: Sequence[RankOutcome], first: int) -> tuple[str, ...]:
    groups: dict[tuple[str, str], list[int]] = {}
    for state in states:
        if state.rank != first and not state.is_done:
            groups.setdefault((state.phase, state.words), []).append(state.rank)
    return tuple(f"{rank_words(ranks)}, {key[0]}: {key[1]}" for key, ranks in groups.items())
