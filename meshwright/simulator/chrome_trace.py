"""A simulated step in the Trace Event Format, for Perfetto and chrome://tracing.

Format: "Trace Event Format" of the Chromium project, JSON Object Format, which
perfetto.dev/docs/getting-started/other-formats names as an input.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from meshwright.simulator.account import ResourceLane, StepResult
from meshwright.simulator.costs import CostModel
from meshwright.simulator.engine import Span, StepTimes
from meshwright.simulator.layout import Axis
from meshwright.simulator.simulation import rank_timeline
from meshwright.simulator.step import BuiltStep, build_step

PS_PER_US = 10**6
STREAMS = ("compute", "messages", "data parallel")


class EventArguments(TypedDict, total=False):
    """What an event says of itself; sizes in bytes."""

    name: str
    sort_index: int
    phase: str
    microbatch: int
    chunk: int
    live_bytes: int
    size_bytes: int


class TraceEvent(TypedDict, total=False):
    """One event; ``ts`` and ``dur`` in microseconds."""

    name: str
    cat: str
    ph: str
    ts: float
    dur: float
    pid: int
    tid: int
    args: EventArguments


class TraceNotes(TypedDict):
    """What was simulated."""

    model: str
    cluster: str
    stack: str
    tp: int
    pp: int
    dp: int
    num_virtual_stages: int
    microbatch_size: int
    global_batch_size: int
    step_time_us: float


class ChromeTrace(TypedDict):
    """A trace in JSON Object Format."""

    displayTimeUnit: str
    otherData: TraceNotes
    traceEvents: list[TraceEvent]


def chrome_trace(result: StepResult) -> ChromeTrace:
    """Return the trace of *result*: a process for each pipeline rank.

    A process has a track for computation, one for the pipeline messages it sends, one for
    collectives over its replicas, and a counter of its live bytes.  Ranks that differ only in
    their tensor- or data-parallel position do the same and share a process.  A step of lanes is
    one process with a track for each.
    """
    if result.times is None:
        tracks = [event for each in enumerate(result.lanes) for event in _lane(*each)]
        return ChromeTrace(displayTimeUnit="ms", otherData=_notes(result), traceEvents=tracks)
    costs = CostModel(result.cluster, result.stack, result.plan.world_size)
    built = build_step(result.job, result.plan, costs)
    events = [event for pp_rank in range(built.setting.plan.pp) for event in _names(built, pp_rank)]
    times = result.times
    timed = [
        event for pp_rank in range(built.setting.plan.pp) for event in _timed(times, built, pp_rank)
    ]
    timed.sort(key=lambda event: (event["ts"], event["pid"], event.get("tid", -1)))
    return ChromeTrace(displayTimeUnit="ms", otherData=_notes(result), traceEvents=events + timed)


def write_chrome_trace(result: StepResult, path: Path) -> None:
    """Write the trace of *result* as JSON; the same result gives the same bytes."""
    text = json.dumps(chrome_trace(result), separators=(",", ":"))
    path.write_text(text + "\n", encoding="ascii")


def _microseconds(time_ps: int) -> float:
    """Return picoseconds as microseconds; below 2**53 ps (2.5 hours) none is lost."""
    return time_ps / PS_PER_US


def _notes(result: StepResult) -> TraceNotes:
    plan = result.plan
    return TraceNotes(
        model=result.job.model.name,
        cluster=result.cluster.name,
        stack=result.stack.name,
        tp=plan.tp,
        pp=plan.pp,
        dp=plan.dp,
        num_virtual_stages=plan.num_virtual_stages,
        microbatch_size=plan.microbatch_size,
        global_batch_size=result.job.global_batch_size,
        step_time_us=_microseconds(result.step_ps),
    )


def _names(built: BuiltStep, pp_rank: int) -> Iterator[TraceEvent]:
    first = built.setting.mesh.rank({Axis.PP: pp_rank})
    last = first + built.setting.mesh.stride(Axis.PP) - 1
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    process = f"pipeline rank {pp_rank} ({ranks})"
    yield _metadata("process_name", pp_rank, 0, EventArguments(name=process))
    yield _metadata("process_sort_index", pp_rank, 0, EventArguments(sort_index=pp_rank))
    for tid, stream in enumerate(STREAMS):
        yield _metadata("thread_name", pp_rank, tid, EventArguments(name=stream))
        yield _metadata("thread_sort_index", pp_rank, tid, EventArguments(sort_index=tid))


def _metadata(name: str, pid: int, tid: int, args: EventArguments) -> TraceEvent:
    return TraceEvent(name=name, ph="M", pid=pid, tid=tid, args=args)


def _timed(times: StepTimes, built: BuiltStep, pp_rank: int) -> Iterator[TraceEvent]:
    streams = times.ranks[pp_rank].streams()
    for tid, spans in enumerate((streams.compute, streams.messages, streams.data_parallel)):
        for span in spans:
            yield _complete(span, pp_rank, tid)
    yield from _memory(times, built, pp_rank)


def _lane(tid: int, lane: ResourceLane) -> Iterator[TraceEvent]:
    """Yield the name of a lane and its spans."""
    yield _metadata("thread_name", 0, tid, EventArguments(name=lane.name))
    yield _metadata("thread_sort_index", 0, tid, EventArguments(sort_index=tid))
    for span in lane.spans:
        yield TraceEvent(
            name=span.name,
            cat=span.kind.value,
            ph="X",
            ts=_microseconds(span.start_ps),
            dur=_microseconds(span.end_ps - span.start_ps),
            pid=0,
            tid=tid,
            args=EventArguments(size_bytes=span.size_bytes) if span.size_bytes else {},
        )


def _complete(span: Span, pid: int, tid: int) -> TraceEvent:
    args = EventArguments(phase=span.kind.value)
    name = span.kind.value
    if span.virtual_stage >= 0:
        args["chunk"] = span.virtual_stage
    if span.microbatch >= 0:
        args["microbatch"] = span.microbatch
        name = f"{name} {span.microbatch}"
    return TraceEvent(
        name=name,
        cat=STREAMS[tid],
        ph="X",
        ts=_microseconds(span.start_ps),
        dur=_microseconds(span.end_ps - span.start_ps),
        pid=pid,
        tid=tid,
        args=args,
    )


def _memory(times: StepTimes, built: BuiltStep, pp_rank: int) -> Iterator[TraceEvent]:
    """Yield the live bytes of a rank wherever they change."""
    static_bytes = built.memory[pp_rank].static_bytes
    # At one instant an end comes before a start, so the last entry is what holds from then on.
    live = {0: static_bytes}
    events = rank_timeline(built, times, pp_rank)
    for event in events:
        live[event.time_ps] = static_bytes + event.moving_bytes
    updated_ps = times.ranks[pp_rank].update_start_ps
    updated_ps += built.work.ranks[pp_rank].optimizer_ps
    live[updated_ps] = static_bytes - events[-1].absent_bytes
    previous_bytes = -1
    for time_ps, live_bytes in live.items():
        if live_bytes != previous_bytes:
            yield TraceEvent(
                name="live memory (bytes)",
                ph="C",
                ts=_microseconds(time_ps),
                pid=pp_rank,
                args=EventArguments(live_bytes=live_bytes),
            )
        previous_bytes = live_bytes
