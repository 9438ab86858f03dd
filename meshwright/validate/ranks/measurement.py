"""What one rank of a real or a fake run showed: counts that must agree, bytes, times."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.simulator.account import NO_TRAFFIC, HostTraffic


class Backend(StrEnum):
    """What runs the ranks."""

    FAKE = "fake"
    GLOO = "gloo"
    NCCL = "nccl"
    PROBE = "probe"


class ByteKind(StrEnum):
    """What a live tensor is for; the kinds of memory that a prediction tells apart."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activations and buffers"


class CollectiveCount(NamedTuple):
    """Equal communication calls of one rank in one step.

    Args:
        axis: Whose group: "tp", "dp" (all data-parallel ranks, or a set of shards), "replica"
            (ranks that hold the same shard), "pp", "table" (first and last pipeline rank),
            "world", "parts" (ranks that hold different parts of one replica).
        op: A `CollectiveOp` value, or "send" or "recv".
        num_ranks: Members of the group; 2 of a message.
        size_bytes: The larger of the rank's two buffers, input and output.
        num_calls: How many of them.
    """

    axis: str
    op: str
    num_ranks: int
    size_bytes: int
    num_calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """One rank's training step after those that warm up.

    Args:
        rank: Which one.
        world_size: Ranks of the run.
        backend: "fake", "gloo" or "nccl".
        flops: FLOPs of matrix products and attention as PyTorch counts them.
        collectives: Communication calls, sorted.
        peak_bytes: Most bytes of live tensors on the device at one time in the step.
        bytes_at_peak: Of which kind they were then.
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

    rank: int
    world_size: int
    backend: str
    flops: int
    collectives: tuple[CollectiveCount, ...]
    peak_bytes: int
    bytes_at_peak: Mapping[ByteKind, int]
    host_bytes: int = 0
    host_traffic: HostTraffic = NO_TRAFFIC
    losses: tuple[float, ...] = ()
    step_times_s: tuple[float, ...] = ()
    allocator_bytes: Mapping[str, int] = field(default_factory=dict)
    collective_times_s: Mapping[str, float] = field(default_factory=dict)
    staleness: tuple[tuple[int, int], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def write_measurement(measurement: RankMeasurement, path: Path) -> None:
    """Write *measurement* as JSON."""
    text = json.dumps(asdict(measurement), indent=1, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def read_measurement(path: Path) -> RankMeasurement:
    """Return what `write_measurement` wrote."""
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    kinds = {ByteKind(kind): size for kind, size in fields.pop("bytes_at_peak").items()}
    calls = tuple(CollectiveCount(*call) for call in fields.pop("collectives"))
    for name in ("losses", "step_times_s"):
        fields[name] = tuple(fields[name])
    fields["host_traffic"] = HostTraffic(*fields.get("host_traffic", NO_TRAFFIC))
    fields["staleness"] = tuple((late, count) for late, count in fields.get("staleness", ()))
    return RankMeasurement(bytes_at_peak=kinds, collectives=calls, **fields)
