"""Events of the Trace Event Format: slices, flows, counters and metadata."""

from collections.abc import Mapping
from typing import NamedTuple, TypedDict

PS_PER_US = 10**6


class EventArguments(TypedDict, total=False):
    """Arguments of an event; sizes in bytes.

    ``category_us`` is what the microseconds of a slice without slices in it are spent on, by
    `Category`; over a step these add up to its breakdown.
    """

    name: str
    sort_index: int
    phase: str
    microbatch: int
    chunk: int
    live_bytes: int
    size_bytes: int
    category_us: Mapping[str, float]


class TraceEvent(TypedDict, total=False):
    """One event; ``ts`` and ``dur`` in microseconds, ``id`` and ``bp`` of flows."""

    name: str
    cat: str
    ph: str
    ts: float
    dur: float
    pid: int
    tid: int
    id: int
    bp: str
    args: EventArguments


class Track(NamedTuple):
    """Process and thread of the format on which slices are drawn."""

    pid: int
    tid: int


def microseconds(time_ps: int) -> float:
    """Return picoseconds as microseconds; below 2**53 ps (2.5 hours) none is lost."""
    return time_ps / PS_PER_US


def metadata(name: str, track: Track, args: EventArguments) -> TraceEvent:
    """Return a metadata event: the name or the order of a process or a thread."""
    return TraceEvent(name=name, ph="M", pid=track.pid, tid=track.tid, args=args)


def slice_event(
    name: str, category: str, track: Track, start_ps: int, end_ps: int, args: EventArguments
) -> TraceEvent:
    """Return a complete event ("X") from start to end."""
    return TraceEvent(
        name=name,
        cat=category,
        ph="X",
        ts=microseconds(start_ps),
        dur=microseconds(end_ps - start_ps),
        pid=track.pid,
        tid=track.tid,
        args=args,
    )


def flow_events(
    number: int, sender: tuple[Track, int], receiver: tuple[Track, int]
) -> tuple[TraceEvent, TraceEvent]:
    """Return both ends of a flow arrow between slices, each found by its track and time."""
    (source, start_ps), (target, end_ps) = sender, receiver
    common = TraceEvent(name="message", cat="message", id=number)
    start = TraceEvent(ph="s", ts=microseconds(start_ps), pid=source.pid, tid=source.tid)
    # Bound to the slice around its time: by default it would be the next one to begin.
    end = TraceEvent(ph="f", bp="e", ts=microseconds(end_ps), pid=target.pid, tid=target.tid)
    return {**common, **start}, {**common, **end}
