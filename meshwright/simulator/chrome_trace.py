"""A simulated step in the Trace Event Format, for Perfetto and chrome://tracing.

Format: "Trace Event Format" of the Chromium project, JSON Object Format, which
perfetto.dev/docs/getting-started/other-formats names as an input.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, count, repeat
from pathlib import Path
from typing import TypedDict

from meshwright.simulator.account import CLOSING, RankPass, ResourceLane, StepResult, rank_passes
from meshwright.simulator.costs import Category, CostModel
from meshwright.simulator.engine import Span, StepTimes, check_passes
from meshwright.simulator.layout import NO_OFFLOAD, Axis
from meshwright.simulator.model import LAYERS
from meshwright.simulator.schedules import Phase
from meshwright.simulator.simulation import rank_timeline
from meshwright.simulator.step import BuiltStep, build_step, phase_costs
from meshwright.simulator.trace_events import (
    EventArguments,
    TraceEvent,
    Track,
    flow_events,
    metadata,
    microseconds,
    slice_event,
)
from meshwright.simulator.trace_layers import Block, layer_parts, shortened, spent_us

STREAMS = ("compute", "messages", "data parallel", "host copies")
COMPUTE, MESSAGES, DATA_PARALLEL, HOST_COPIES = range(len(STREAMS))
OVERHEAD = "step overhead"
WAIT = "wait for parameters"
COPY_WAIT = "wait for activations"
MOST_INSIDE = 200_000  # slices in layers of a trace: some 40 MB, which viewers still open


class TraceNotes(TypedDict):
    """Metadata of a trace: model, cluster, stack, plan and step time."""

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

    A process has a track for computation, whose passes hold their layers and waits, and layers that
    communicate their collectives, of as many first microbatches as can be read, one for the
    pipeline messages it sends, with a flow to the pass that takes each, one for collectives over
    its replicas, and a counter of its live bytes.  Ranks that differ only in their tensor- or
    data-parallel position do the same and share a process.  A step of lanes is one process with a
    track for each.

    Raises:
        TooManyTasksError: If there are too many passes to list each.
    """
    if result.times is None:
        tracks = list(_lane_events(result))
        return ChromeTrace(displayTimeUnit="ms", otherData=_notes(result), traceEvents=tracks)
    check_passes(result.plan.num_stages, result.num_microbatches, to="trace")
    costs = CostModel(result.cluster, result.stack, result.plan.world_size)
    # A result keeps no costs of blocks: the step is priced again.
    built = build_step(result.job, result.plan, costs)
    events = [event for pp_rank in range(built.setting.plan.pp) for event in _names(built, pp_rank)]
    timed = [
        event
        for pp_rank in range(built.setting.plan.pp)
        for event in _RankEvents(built, result.times, costs, pp_rank).all()
    ]
    timed += _flows(result.times)
    # Of slices that begin together the outer one comes first, and a flow after what it binds to.
    timed.sort(
        key=lambda event: (
            event["ts"],
            event["pid"],
            event.get("tid", -1),
            -event.get("dur", 0.0),
        )
    )
    return ChromeTrace(displayTimeUnit="ms", otherData=_notes(result), traceEvents=events + timed)


def write_chrome_trace(result: StepResult, path: Path) -> None:
    """Write the trace of *result* as JSON; the same result gives the same bytes."""
    text = json.dumps(chrome_trace(result), separators=(",", ":"))
    path.write_text(text + "\n", encoding="ascii")


def _notes(result: StepResult) -> TraceNotes:
    """Return the metadata of the trace of *result*."""
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
        step_time_us=microseconds(result.step_ps),
    )


def _names(built: BuiltStep, pp_rank: int) -> Iterator[TraceEvent]:
    """Yield the names of a pipeline rank's process and of its tracks."""
    first = built.setting.mesh.rank({Axis.PP: pp_rank})
    last = first + built.setting.mesh.stride(Axis.PP) - 1
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    process = f"pipeline rank {pp_rank} ({ranks})"
    track = Track(pp_rank, 0)
    yield metadata("process_name", track, EventArguments(name=process))
    yield metadata("process_sort_index", track, EventArguments(sort_index=pp_rank))
    copies = any(stage.offload.number for stage in built.setting.rank_stages(pp_rank))
    for tid, stream in enumerate(STREAMS if copies else STREAMS[:HOST_COPIES]):
        track = Track(pp_rank, tid)
        yield metadata("thread_name", track, EventArguments(name=stream))
        yield metadata("thread_sort_index", track, EventArguments(sort_index=tid))


class _RankEvents:
    """The slices and the counter of one pipeline rank."""

    def __init__(self, built: BuiltStep, times: StepTimes, costs: CostModel, pp_rank: int) -> None:
        self.built, self.times, self.costs, self.pp_rank = built, times, costs, pp_rank
        self.rank = times.ranks[pp_rank]
        self.compute = Track(pp_rank, COMPUTE)
        self._inside: dict[tuple[Phase, int], list[Block]] = {}

    def all(self) -> Iterator[TraceEvent]:
        """Yield all events of the rank, track by track."""
        passes = rank_passes(self.built.work.ranks[self.pp_rank], self.rank)
        for rank_pass, copied_ps in zip(
            passes, chain(self.rank.copy_waits_ps, repeat(0)), strict=False
        ):
            yield from self._pass(rank_pass, copied_ps)
        for span in self.rank.closing:
            yield self._leaf(span.kind, CLOSING[span.kind], span.start_ps, span.end_ps)
        end_ps = max(rank.end_ps for rank in self.times.ranks)
        # The stack's overhead of a step follows the last rank's update.
        if end_ps < self.times.step_ps:
            yield self._leaf(OVERHEAD, Category.STEP_OVERHEAD, end_ps, self.times.step_ps)
        streams = self.rank.streams()
        for tid, spans in ((MESSAGES, streams.messages), (DATA_PARALLEL, streams.data_parallel)):
            for span in spans:
                yield _complete(span, Track(self.pp_rank, tid))
        for span in self.rank.copies:
            yield _complete(span, Track(self.pp_rank, HOST_COPIES))
        yield from _memory(self.times, self.built, self.pp_rank)

    def _leaf(self, name: str, category: Category, start_ps: int, end_ps: int) -> TraceEvent:
        """Return the slice of work, or of a wait, outside a rank's layers."""
        spent = {category.value: microseconds(end_ps - start_ps)}
        args = EventArguments(phase=name, category_us=spent)
        return slice_event(name, STREAMS[COMPUTE], self.compute, start_ps, end_ps, args)

    def _pass(self, rank_pass: RankPass, copied_ps: int) -> Iterator[TraceEvent]:
        """Yield the slice of a pass, its layers and its waits, *copied_ps* for host copies."""
        phase, virtual_stage, microbatch = rank_pass.action
        span = Span(phase.label, rank_pass.start_ps, rank_pass.end_ps, virtual_stage, microbatch)
        yield _complete(span, self.compute)
        for start_ps, end_ps in rank_pass.waits:
            # Of a wait the host copy comes first: the gather is queued behind it.
            middle_ps = min(end_ps, start_ps + copied_ps)
            copied_ps -= middle_ps - start_ps
            if start_ps < middle_ps:
                yield self._leaf(COPY_WAIT, Category.HOST_COPY, start_ps, middle_ps)
            if middle_ps < end_ps:
                yield self._leaf(WAIT, Category.DP_COMM, middle_ps, end_ps)
        overlaps = self.built.setting.plan.expert_overlap is not None
        blocks = self._blocks(phase, virtual_stage)
        parts = self._part_sizes(phase, virtual_stage, len(rank_pass.parts), len(blocks))
        for part, size in zip(rank_pass.parts, parts, strict=True):
            start_ps, run = part.start_ps, blocks[:size]
            overlapped_ps = sum(block.time_ps for block in run) - (part.end_ps - start_ps)
            for block in shortened(run, overlapped_ps) if overlaps else run:
                end_ps = start_ps + block.time_ps
                is_open = len(block.parts) > 1 and microbatch < self._num_open
                args = EventArguments(phase=span.kind) if is_open else block.args
                yield slice_event(block.name, "layers", self.compute, start_ps, end_ps, args)
                yield from self._inside_of(block, start_ps) if is_open else ()
                start_ps = end_ps
            blocks = blocks[size:]

    def _inside_of(self, block: Block, start_ps: int) -> Iterator[TraceEvent]:
        """Yield the slices of a layer: its collectives, and what runs between them."""
        for name, time_ps, args in block.parts:
            end_ps = start_ps + time_ps
            yield slice_event(name, "in layers", self.compute, start_ps, end_ps, args)
            start_ps = end_ps

    @cached_property
    def _num_open(self) -> int:
        """Number of first microbatches whose layers show their collectives."""
        stages, phases = (
            self.built.setting.rank_stages(self.pp_rank),
            self.built.virtual_stage_costs[self.pp_rank][0],
        )
        num_parts = sum(
            len(block.parts)
            for virtual_stage in range(len(stages))
            for phase in phases
            for block in self._blocks(phase, virtual_stage)
        )
        return max(1, MOST_INSIDE // (len(self.times.ranks) * max(1, num_parts)))

    def _part_sizes(
        self, phase: Phase, virtual_stage: int, num_parts: int, num_blocks: int
    ) -> list[int]:
        """Return the number of blocks of each part of a pass, in execution order."""
        stage = self.built.setting.rank_stages(self.pp_rank)[virtual_stage]
        if num_parts == 1:
            return [num_blocks]
        sizes = [part.stage.num_blocks for part in self.built.setting.parts[stage]]
        # Backward runs the parts of a stage last to first.
        return sizes if phase is Phase.FORWARD else sizes[::-1]

    def _blocks(self, phase: Phase, virtual_stage: int) -> list[Block]:
        """Return the blocks of a pass in execution order."""
        setting = self.built.setting
        key = phase, virtual_stage
        if key not in self._inside:
            index = virtual_stage * setting.plan.pp + self.pp_rank
            layer = sum(stage.num_layers for stage in setting.stages[:index])
            blocks = []
            stage = setting.stages[index]
            # Layers whose tensors leave are called as all others.
            whole = stage._replace(offload=NO_OFFLOAD)
            for kind, number in whole.part(0, stage.num_blocks).passes or whole.passes:
                cost = self.costs.block_cost(setting.shape, kind)
                spent = phase_costs(cost)[phase]
                args = EventArguments(phase=phase.label, category_us=spent_us(spent))
                parts = layer_parts(self.costs, setting.shape, kind, phase)
                for _ in range(number):
                    name = f"{kind} {layer}" if kind in LAYERS else str(kind)
                    layer += kind in LAYERS
                    blocks.append(Block(name, spent.time_ps, args, parts))
            self._inside[key] = blocks if phase is Phase.FORWARD else blocks[::-1]
        return self._inside[key]


def _flows(times: StepTimes) -> Iterator[TraceEvent]:
    """Yield a flow arrow from each p2p message to the pass that receives it."""
    numbers, pp = count(1), len(times.ranks)
    starts_ps = [
        {action: start_ps for action, start_ps, _ in rank.passes()} for rank in times.ranks
    ]
    for pp_rank, rank in enumerate(times.ranks):
        for action, (sent_ps, out_ps) in zip(rank.senders, rank.sent_ps, strict=True):
            if sent_ps < out_ps:
                receiver_rank, receiver_action = action.further(pp_rank, pp, action.phase.direction)
                sender = Track(pp_rank, MESSAGES), sent_ps
                receiver = Track(receiver_rank, COMPUTE), starts_ps[receiver_rank][receiver_action]
                yield from flow_events(next(numbers), sender, receiver)


def _lane_events(result: StepResult) -> Iterator[TraceEvent]:
    """Yield the tracks of a step of lanes, its overhead, and flows between ends of a transfer."""
    numbers = count(1)
    senders: dict[tuple[str, int], Track] = {}
    for tid, lane in enumerate(result.lanes):
        yield from _lane(tid, lane)
        if lane.name.endswith(" out"):
            senders |= {(span.name, span.start_ps): Track(0, tid) for span in lane.spans}
    for tid, lane in enumerate(result.lanes):
        if lane.name.endswith(" in"):
            for span in lane.spans:
                sender = senders.get((span.name, span.start_ps))
                if sender is not None:
                    ends = (sender, span.start_ps), (Track(0, tid), span.start_ps)
                    yield from flow_events(next(numbers), *ends)
    overhead_ps = result.breakdown_ps[Category.STEP_OVERHEAD]
    if overhead_ps and result.asynchronous is None:
        track = Track(0, len(result.lanes))
        yield metadata("thread_name", track, EventArguments(name=OVERHEAD))
        yield metadata("thread_sort_index", track, EventArguments(sort_index=track.tid))
        start_ps = result.step_ps - overhead_ps
        yield slice_event(OVERHEAD, OVERHEAD, track, start_ps, result.step_ps, {})


def _lane(tid: int, lane: ResourceLane) -> Iterator[TraceEvent]:
    """Yield the name of a lane and its spans."""
    track = Track(0, tid)
    yield metadata("thread_name", track, EventArguments(name=lane.name))
    yield metadata("thread_sort_index", track, EventArguments(sort_index=tid))
    for span in lane.spans:
        # Zero bytes mean computation, which carries no size.
        args = EventArguments(size_bytes=span.size_bytes) if span.size_bytes else EventArguments()
        yield slice_event(span.name, span.kind.value, track, span.start_ps, span.end_ps, args)


def _complete(span: Span, track: Track) -> TraceEvent:
    """Return a slice with its virtual stage and microbatch as arguments."""
    args = EventArguments(phase=span.kind)
    name = span.kind
    if span.virtual_stage >= 0:
        args["chunk"] = span.virtual_stage
    if span.microbatch >= 0:
        args["microbatch"] = span.microbatch
        name = f"{name} {span.microbatch}"
    return slice_event(name, STREAMS[track.tid], track, span.start_ps, span.end_ps, args)


def _memory(times: StepTimes, built: BuiltStep, pp_rank: int) -> Iterator[TraceEvent]:
    """Yield the counter of a rank's live bytes at each change."""
    static_bytes = built.memory[pp_rank].static_bytes
    # At one instant an end comes before a start, so the last entry is what holds from then on.
    live = {0: static_bytes}
    events = rank_timeline(built, times, pp_rank)
    for event in events:
        live[event.time_ps] = static_bytes + event.dynamic_bytes
    updated_ps = times.ranks[pp_rank].update_start_ps
    updated_ps += built.work.ranks[pp_rank].optimizer_ps
    live[updated_ps] = static_bytes - events[-1].absent_bytes
    previous_bytes = -1
    for time_ps, live_bytes in live.items():
        # A counter event is drawn as a step: equal neighbours add nothing.
        if live_bytes != previous_bytes:
            yield TraceEvent(
                name="live memory (bytes)",
                ph="C",
                ts=microseconds(time_ps),
                pid=pp_rank,
                args=EventArguments(live_bytes=live_bytes),
            )
        previous_bytes = live_bytes
