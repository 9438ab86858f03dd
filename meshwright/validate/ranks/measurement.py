"""Measurement of one rank in a real or a fake run: exact counts, bytes, times."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from meshwright.hwprofiles import FileKind, one_line, shown_path
from meshwright.simulator import PlanError
from meshwright.simulator.account import NO_TRAFFIC, HostTraffic

RESULT_FILE = FileKind(title="file of a run", most_bytes=20_000_000, error=PlanError)
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
T = TypeVar("T")

# Of a script: the first makes optimizer states, the second rebuilds DDP's buckets.
SCRIPT_STEPS = 3


class Backend(StrEnum):
    """Backend of the ranks."""

    FAKE = "fake"
    GLOO = "gloo"
    NCCL = "nccl"
    PROBE = "probe"


class ByteKind(StrEnum):
    """Kind of a live tensor, as predictions tell memory apart."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activations and buffers"


class CollectiveCount(NamedTuple):
    """Equal communication calls of one rank in one step.

    Args:
        axis: Whose group: "tp", "dp" (all data-parallel ranks, or a shard group), "replica"
            (ranks that hold the same shard), "pp", "table" (first and last pipeline rank),
            "world", "parts" (ranks that hold different parts of one replica).
        op: A `CollectiveOp` value, or "send" or "recv".
        num_ranks: Members of the group; 2 of a message.
        size_bytes: The larger of the rank's two buffers, input and output.
        num_calls: Number of them.
    """

    axis: str
    op: str
    num_ranks: Count
    size_bytes: Count
    num_calls: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """One rank's training step after those that warm up.

    Args:
        rank: Rank, from 0.
        world_size: Ranks of the run.
        backend: "fake", "gloo" or "nccl".
        flops: FLOPs of matrix products and attention as PyTorch counts them.
        collectives: Communication calls, sorted.
        peak_bytes: Most bytes of live tensors on the device at one time in the step.
        bytes_at_peak: The same by kind.
        host_bytes: Most bytes on the host; 0 where it and the device are one place.
        host_traffic: Bytes that went from the one to the other in the step, without token ids.
        losses: Mean loss of the rank's share of the batch in each step, from the first; empty
            where the rank does not report losses.
        step_times_s: Seconds of each timed step; empty in a fake run.
        allocator_bytes: Peaks of the device's allocator in the last warm-up steps and the timed
            ones: "allocated", "active" and "requested" of tensors, "reserved" of all, and what
            "libraries" hold besides; empty where there is no allocator.
        collective_times_s: Seconds of kernels that communicate in one step, by kind; empty where
            no step was traced.
        staleness: Of an asynchronous server: by how many updates of others between its pull and its
            push a gradient was late, and how many were; empty elsewhere.
        versions: Of software and device, by name.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rank: Count
    world_size: Count
    backend: str
    flops: Count
    collectives: tuple[CollectiveCount, ...]
    peak_bytes: Count
    bytes_at_peak: Mapping[ByteKind, Count]
    host_bytes: Count = 0
    host_traffic: HostTraffic = NO_TRAFFIC
    losses: tuple[Annotated[float, Field(strict=True)], ...] = ()
    step_times_s: tuple[Seconds, ...] = ()
    allocator_bytes: Mapping[str, Count] = field(default_factory=dict)
    collective_times_s: Mapping[str, Seconds] = field(default_factory=dict)
    staleness: tuple[tuple[Count, Count], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def write_measurement(measurement: RankMeasurement, path: Path) -> None:
    """Write *measurement* as JSON."""
    text = json.dumps(asdict(measurement), indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def read_measurement(path: Path) -> RankMeasurement:
    """Return the measurement that `write_measurement` wrote; raises as `read_record`."""
    return read_record(path, RankMeasurement)


def read_record(path: Path, kind: type[T]) -> T:
    """Return the record that a rank wrote as JSON.

    Raises:
        PlanError: If the file is none, or says something that no rank can have seen.
    """
    try:
        record: T = _adapter(kind).validate_python(  # type: ignore[arg-type]  # a class can be hashed
            RESULT_FILE.read_json(path)
        )
    except ValidationError as error:
        raise PlanError(f"{shown_path(path)}: {one_line(error)}") from None
    return record


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - any record
    return TypeAdapter(kind)
