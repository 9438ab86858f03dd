"""Files that a rank writes: heartbeat, failure, measurements."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from pydantic import ConfigDict, Field

from meshwright.hwprofiles import shown_path
from meshwright.simulator import PlanError
from meshwright.validate.ranks import (
    RESULT_FILE,
    Count,
    RankMeasurement,
    Seconds,
    read_record,
    write_measurement,
)

SPEC_NAME = "run.json"
MOST_RANKS = 10**6


class FailureKind(StrEnum):
    """Kind of failure of a rank; the last four come from outside of it."""

    MISTAKE = "mistake"
    EXCEPTION = "exception"
    OUT_OF_MEMORY = "out of memory"
    TERMINATED = "terminated"
    MISSING = "missing ranks"
    TIMEOUT = "timeout"
    PEER_LOST = "peer lost"


# Words of gloo, of the key-value store and of NCCL's watchdog, in torch 2.13.
_WAITED = (
    "timed out waiting",
    "timed out after",
    "timed out in",
    "collective operation timeout",
    "wait timeout",
    "socket timeout",
)
_LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "got 0 bytes",
    "recvvalue failed",
    "remote process exited",
    "communicator was aborted",
    "ncclremoteerror",
)


def kind_of_text(text: str) -> FailureKind:
    """Return the kind of failure of another rank that a message tells of, else EXCEPTION.

    >>> kind_of_text("Timed out waiting 5000ms for recv operation to complete").value
    'timeout'
    >>> kind_of_text("list index out of range").value
    'exception'
    """
    words = text.lower()
    if any(sign in words for sign in _WAITED):
        return FailureKind.TIMEOUT
    if any(sign in words for sign in _LOST):
        return FailureKind.PEER_LOST
    return FailureKind.EXCEPTION


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Phase of a rank, and when it began.

    Args:
        rank: Rank, from 0.
        world_size: Ranks of the run.
        host: Machine it runs on.
        pid: Its process there.
        phase: Its phase.
        plan: Index of its plan; None while it joins and leaves.
        time_s: When the phase began, in seconds since 1970 by the clock of its host.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rank: Count
    world_size: Annotated[Count, Field(ge=1, le=MOST_RANKS)]
    host: str
    pid: Count
    phase: str
    plan: Count | None
    time_s: Seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """Failure of a rank, recorded by itself.

    Args:
        rank: Rank, from 0.
        host: Machine it ran on.
        pid: Its process there.
        phase: Its phase.
        plan: Index of its plan, if any.
        time_s: When, in seconds since 1970 by the clock of its host.
        kind: Kind of the failure.
        exception: Type of the exception.
        message: Its text.
        traceback: Its traceback.
        missing: Ranks that it waited for, where it knows.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rank: Count
    host: str
    pid: Count
    phase: str
    plan: Count | None
    time_s: Seconds
    kind: FailureKind
    exception: str
    message: str
    traceback: str
    missing: tuple[Count, ...] = ()


R = TypeVar("R", Heartbeat, RankFailure)


def rank_path(folder: Path, rank: int, ending: str) -> Path:
    """Return the name of a file of *rank*.

    >>> rank_path(Path("results"), 3, "failure.json").as_posix()
    'results/rank-00003.failure.json'
    """
    return folder / f"rank-{rank:05d}.{ending}"


def measurement_path(folder: Path, rank: int, plan: int) -> Path:
    """Return the file of *rank*'s measurement of the plan with that index.

    >>> measurement_path(Path("results"), 3, 0).as_posix()
    'results/plan-00/rank-00003.json'
    """
    return rank_path(folder / f"plan-{plan:02d}", rank, "json")


def write_heartbeat(heartbeat: Heartbeat, folder: Path) -> None:
    """Replace the heartbeat file of a rank, in one piece."""
    path = rank_path(folder, heartbeat.rank, "heartbeat.json")
    # Renaming is atomic: the launcher may read at any time, but never half a file.
    draft = path.with_suffix(".draft")
    draft.write_text(_json(asdict(heartbeat)), encoding="utf-8")
    draft.replace(path)


def claim_rank(heartbeat: Heartbeat, folder: Path) -> bool:
    """Write a rank's first heartbeat; return False, and write nothing, if it has one already."""
    folder.mkdir(parents=True, exist_ok=True)
    return _write_new(rank_path(folder, heartbeat.rank, "heartbeat.json"), asdict(heartbeat))


def read_heartbeat(folder: Path, rank: int) -> Heartbeat | None:
    """Return the heartbeat of *rank*, or None if it never started; raises as `read_record`."""
    return _read(rank_path(folder, rank, "heartbeat.json"), rank, Heartbeat)


def write_failure(failure: RankFailure, folder: Path) -> bool:
    """Write the failure of a rank; only its first one counts. Return whether this was it."""
    return _write_new(rank_path(folder, failure.rank, "failure.json"), asdict(failure))


def read_failure(folder: Path, rank: int) -> RankFailure | None:
    """Return the failure of *rank*, or None if it recorded none; raises as `read_record`."""
    return _read(rank_path(folder, rank, "failure.json"), rank, RankFailure)


def keep_measurement(measurement: RankMeasurement, folder: Path, plan: int) -> None:
    """Write the measurement of a rank and a plan, in one piece."""
    path = measurement_path(folder, measurement.rank, plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    write_measurement(measurement, draft)
    draft.replace(path)


def _json(fields: Mapping[str, object]) -> str:
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"


def _write_new(path: Path, fields: Mapping[str, object]) -> bool:
    try:
        # Exclusive creation: of two writers one wins.
        with path.open("x", encoding="utf-8") as file:
            file.write(_json(fields))
    except FileExistsError:
        return False
    return True


def _read(path: Path, rank: int, kind: type[R]) -> R | None:
    """Return a record; None if it is not there or a kill left half of it.

    Raises:
        PlanError: If it is of another rank, or as `read_record`.
    """
    try:
        text = RESULT_FILE.read_text(path).strip()
    except PlanError:
        if not path.exists():
            return None
        raise
    if not text or (text.startswith("{") and not text.endswith("}")):
        return None
    record = read_record(path, kind)
    if record.rank != rank:
        raise PlanError(f"{shown_path(path)}: rank: {record.rank} is another one; allowed: {rank}")
    return record
