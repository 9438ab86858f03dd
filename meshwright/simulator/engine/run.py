"""The event engine: ranks as processes that run ahead of each other where they may.

A process keeps its own clock in integer picoseconds and yields only where it must: for a
message that has not been sent yet, or for a group it has to meet.  Each port has one user
whose order is fixed by the action list, so times found this way are those of a run in
global time order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

from simpy import Environment

from meshwright.simulator.engine.clock import GoOn, Process, StandingClock, Wait
from meshwright.simulator.engine.copies import HostCopies
from meshwright.simulator.engine.groups import (
    CollectiveStream,
    Meeting,
    QueuedCollective,
)
from meshwright.simulator.engine.program import Instruction, compile_ranks
from meshwright.simulator.engine.record import Mark, Messages, Span, SpanKind
from meshwright.simulator.engine.work import PassWork, StepWork, UnitWork
from meshwright.simulator.schedules import Phase, refetched

Inbox: TypeAlias = list[int]
"""When each message for one phase of a virtual stage may be taken, by its microbatch.

Numbers below 0 stand where none is there: `AWAITED` if the rank waits for it, else `NOT_SENT`.
"""
NOT_SENT, AWAITED = -1, -2

NO_MICROBATCHES: frozenset[int] = frozenset()
FIRST_MICROBATCH = frozenset({0})


class Submission(NamedTuple):
    """What a rank brings to its data-parallel group: collectives and its own messages."""

    collectives: list[QueuedCollective]
    messages: Messages


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A simulated rank: where it is, and the groups it meets.

    ``stride`` is the distance between neighbours on the pipeline axis.
    """

    index: int
    pp_rank: int
    stride: int
    tp_group: Meeting[int, int] | None
    dp_group: Meeting[Submission, int]
    dp_stream: CollectiveStream
    embedding_group: Meeting[int, int] | None


@dataclass(slots=True)
class RankProgress:
    """What a rank has done so far; filled while it runs, read once at the end."""

    inboxes: list[Inbox]
    go_on: GoOn = field(init=False)
    starts_ps: list[int] = field(default_factory=list)
    ends_ps: list[int] = field(default_factory=list)
    part_starts_ps: list[int] = field(default_factory=list)
    messages: Messages = field(default_factory=lambda: Messages([], []))
    closing: list[Span] = field(default_factory=list)
    queue: list[QueuedCollective] = field(default_factory=list)
    gather_wait_ps: int = 0
    reduce_end_ps: int = 0
    reduce_wait_ps: int = 0
    passes_end_ps: int = 0
    update_start_ps: int = 0
    end_ps: int = -1
    passed: dict[int, Phase] = field(default_factory=dict)
    copies: HostCopies | None = None
    marks: list[Mark] = field(default_factory=list)

    def mark(self, stream: CollectiveStream, position: int) -> None:
        """Note what is done before the pass at *position*."""
        waited, queued = self.gather_wait_ps, len(self.queue)
        issued = len(stream.record) + queued
        self.marks.append(Mark(position, waited, len(self.part_starts_ps), issued, queued))

    def close(self, kind: SpanKind, start_ps: int, time_ps: int) -> int:
        """Note what follows the last pass; return its end."""
        end_ps = start_ps + time_ps
        if time_ps:
            self.closing.append(Span(kind, start_ps, end_ps))
        return end_ps


class Lane(NamedTuple):
    """What a rank does for one phase of one virtual stage: take a message, compute, send one.

    Args:
        inbox: Where the message comes that it waits for, if it does.
        compute_ps: Time of a pass.
        special: Microbatches beside whose passes parameters are gathered or gradients reduced.
        instruction: What happens there.
        outbox: Where its message goes, if it sends one.
        taker: Who takes that.
        occupy_ps: How long the message is on the rank's port.
        delay_ps: And then on its way.
        held_ps: How long it keeps the rank from going on; the port is free then.
    """

    inbox: Inbox | None
    compute_ps: int
    special: frozenset[int]
    instruction: Instruction
    outbox: Inbox | None
    taker: RankProgress
    occupy_ps: int
    delay_ps: int
    held_ps: int


class StepRun:
    """One simulation of a `StepWork` by *num_places* simulated ranks."""

    def __init__(self, work: StepWork, clock: StandingClock, num_places: int) -> None:
        self.work = work
        self.clock = clock
        self.programs = compile_ranks(work)
        self.freed = [
            refetched(actions, work.num_virtual_stages) if work.keeps_units else []
            for actions in work.actions
        ]
        slots, empty = range(2 * work.num_virtual_stages), [NOT_SENT] * work.num_microbatches
        self.states = [RankProgress([empty.copy() for _ in slots]) for _ in range(num_places)]
        self.everyone: Meeting[int, int] = Meeting(clock, num_places, max)
        self.every_microbatch = frozenset(range(work.num_microbatches))
        self.last_microbatch = frozenset({work.num_microbatches - 1})

    def compute_stream(self, place: RankPlace) -> Process:  # noqa: PLR0915 -- calls cost more
        """Run the actions of one rank, then what ends its step."""
        state, tp_group, next_turn = self.states[place.index], place.tp_group, self.clock.next_turn
        started, ended = state.starts_ps.append, state.ends_ps.append
        sent, left = state.messages.starts_ps.append, state.messages.ends_ps.append
        lanes, now, port_free_ps = _plain_lanes(self, place), 0, 0
        for phase, stage, microbatch in self.work.actions[place.pp_rank]:
            inbox, compute_ps, special, instruction, outbox, taker, occupy_ps, delay_ps, held_ps = (
                lanes[phase][stage]
            )
            if inbox is not None:
                if (arrival_ps := inbox[microbatch]) < 0:
                    inbox[microbatch] = AWAITED
                    arrival_ps = yield None
                inbox[microbatch] = NOT_SENT
                if arrival_ps > now:  # noqa: PLR1730 -- a search spends its time here
                    now = arrival_ps
            if tp_group is not None:
                now = yield tp_group.arrive(now)
            started(now)
            if microbatch in special:
                now = yield from self.special_pass(place, instruction, microbatch, now)
            else:
                now += compute_ps
            ended(now)
            if outbox is not None:
                if now > port_free_ps:  # noqa: PLR1730 -- as above
                    port_free_ps = now
                sent(port_free_ps)
                port_free_ps += occupy_ps
                left(port_free_ps)
                if outbox[microbatch] == AWAITED:
                    next_turn((taker.go_on, port_free_ps + delay_ps))
                else:
                    outbox[microbatch] = port_free_ps + delay_ps
                now += held_ps
        yield from self.finish(place, now)

    def special_pass(
        self, place: RankPlace, instruction: Instruction, microbatch: int, now: int
    ) -> Wait:
        """Run a pass beside which parameters are gathered, gradients reduced or others copied."""
        state, work = self.states[place.index], instruction.work
        state.mark(place.dp_stream, len(state.starts_ps) - 1)
        if work.copies:
            state.copies = state.copies or HostCopies()
            state.copies.begin(instruction.phase, work.copies)
        if work.units:
            return self._sharded_pass(place, instruction, microbatch, now)
        if work.gathers and microbatch == 0:
            return self._gathered_forward(place, instruction, now)
        is_last = microbatch in self.last_microbatch
        if work.reductions and (work.reduces_always or is_last):
            return _reduced_backward(self, place, instruction, microbatch, now)
        return _plain_pass(state, work, now)

    def _gathered_forward(self, place: RankPlace, instruction: Instruction, now: int) -> Wait:
        """Run a forward pass whose segments wait for their parameters."""
        state = self.states[place.index]
        gather = SpanKind.PARAMETER_GATHER, instruction.virtual_stage
        for segment in instruction.work.gathers:
            # Ready at 0: what it gathers was updated at the end of the step before.
            state.queue.append(QueuedCollective(0, segment.collective_ps, *gather))
            gathered_ps = yield from self.wait_for(place, _first_gather(state), now)
            now = _computed(state, segment.compute_ps, gathered_ps)
        return now

    def _sharded_pass(
        self, place: RankPlace, instruction: Instruction, microbatch: int, now: int
    ) -> Wait:
        """Run a pass whose parameters are gathered unit by unit, one ahead where it may."""
        state, prefetches = self.states[place.index], self.work.prefetches
        units = _units_now(state, instruction, self.freed[place.pp_rank])
        reduces = instruction.work.reduces_always or microbatch == self.work.num_microbatches - 1
        gathers_after_ps = [*(unit.gather_ps for unit in units[1:]), 0]
        if units[0].gather_ps:
            state.queue.append(QueuedCollective(now, units[0].gather_ps, SpanKind.PARAMETER_GATHER))
        for unit, next_ps in zip(units, gathers_after_ps, strict=True):
            if unit.gather_ps:
                now = yield from self.wait_for(place, _first_gather(state), now)
                now = _copied(state, unit.unpack_ps, now)
            if next_ps and prefetches:
                state.queue.append(QueuedCollective(now, next_ps, SpanKind.PARAMETER_GATHER))
            now = _computed(state, unit.compute_ps, now)
            if reduces and unit.reduce_ps:
                now = _copied(state, unit.pack_ps, now)
                reduce_ps = unit.reduction_ps(microbatch, self.work.num_microbatches)
                state.queue.append(QueuedCollective(now, reduce_ps, SpanKind.GRADIENT_REDUCTION))
                if not prefetches:
                    now = yield from self.wait_for(place, len(state.queue), now)
            if next_ps and not prefetches:
                state.queue.append(QueuedCollective(now, next_ps, SpanKind.PARAMETER_GATHER))
        return now

    def wait_for(self, place: RankPlace, count: int, now: int) -> Wait:
        """Wait for the first *count* collectives of the queue."""
        state, group = self.states[place.index], place.dp_group
        due = Submission(state.queue[:count], state.messages)
        del state.queue[:count]
        end_ps = group.alone(due) if group.is_alone else (yield group.arrive(due))
        state.gather_wait_ps += max(0, end_ps - now)
        return max(now, end_ps)

    def finish(self, place: RankPlace, now: int) -> Process:
        """Reduce and sum what is left, wait for the gradient norm, update the parameters."""
        state, rank = self.states[place.index], self.work.ranks[place.pp_rank]
        state.passes_end_ps = now
        state.mark(place.dp_stream, len(state.starts_ps))
        if self.work.sums_first:
            now = yield from _sum(self, place, now)
        if rank.reduce_ps:
            state.queue.append(QueuedCollective(now, rank.reduce_ps, SpanKind.GRADIENT_REDUCTION))
        if state.queue:
            reduced_ps = yield place.dp_group.arrive(Submission(state.queue, state.messages))
            state.reduce_wait_ps = max(0, reduced_ps - now)
            now = state.close(SpanKind.REDUCTION_WAIT, now, state.reduce_wait_ps)
        if not self.work.sums_first:
            now = yield from _sum(self, place, now)
        if place.embedding_group is not None:
            # The end that comes first is idle until the other one is there.
            now = yield place.embedding_group.arrive(now)
            now = state.close(SpanKind.SHARED_EMBEDDING, now, rank.shared_embedding_ps)
            state.reduce_wait_ps += rank.shared_embedding_ps
        state.reduce_end_ps = now
        now = yield self.everyone.arrive(now)
        now = state.update_start_ps = state.close(SpanKind.GRADIENT_NORM, now, self.work.norm_ps)
        now = state.close(SpanKind.OPTIMIZER, now, rank.optimizer_ps)
        state.end_ps = state.close(SpanKind.PARAMETER_GATHER, now, rank.gather_ps)


def _reduced_backward(
    run: StepRun, place: RankPlace, instruction: Instruction, microbatch: int, now: int
) -> Wait:
    """Run a backward pass whose segments hand their gradients to the reduction."""
    queue, reduction = run.states[place.index].queue, SpanKind.GRADIENT_REDUCTION
    for segment in instruction.work.reductions:
        now = _advanced(run.states[place.index], segment.compute_ps, now)
        issued = now, segment.collective_ps, reduction, instruction.virtual_stage
        queue.append(QueuedCollective(*issued))
    if microbatch != run.work.num_microbatches - 1:
        # `finish` waits for the last one's, with what else is left.
        now = yield from run.wait_for(place, len(queue), now)
    return now


def _plain_pass(state: RankProgress, work: PassWork, now: int) -> Wait:
    """Run a pass beside which activations are copied, and nothing else."""
    yield from ()
    return _advanced(state, work.compute_ps, now)


def _sum(run: StepRun, place: RankPlace, now: int) -> Wait:
    """Sum gradients over tensor-parallel ranks."""
    rank, state = run.work.ranks[place.pp_rank], run.states[place.index]
    if rank.sums_ps and place.tp_group is not None:
        now = yield place.tp_group.arrive(now)
    return state.close(SpanKind.TENSOR_SUM, now, rank.sums_ps)


def lanes_of(run: StepRun, place: RankPlace) -> dict[Phase, list[Lane]]:
    """Return what a rank does for each of its virtual stages, by phase."""
    lanes: dict[Phase, list[Lane]] = {}
    inboxes = run.states[place.index].inboxes
    for instruction in run.programs[place.pp_rank]:
        inbox = None if instruction.inbox < 0 else inboxes[instruction.inbox]
        taker = run.states[place.index + instruction.target_step * place.stride]
        outbox = taker.inboxes[instruction.target_slot] if instruction.target_step else None
        special = _special_microbatches(run, instruction.work)
        passes = instruction.work.compute_ps, special, instruction
        occupy_ps, delay_ps = instruction.message.occupy_ps, instruction.message.delay_ps
        held_ps = occupy_ps if run.work.blocking_messages else 0
        lane = Lane(inbox, *passes, outbox, taker, occupy_ps, delay_ps, held_ps)
        lanes.setdefault(instruction.phase, []).append(lane)
    return lanes


def _plain_lanes(run: StepRun, place: RankPlace) -> dict[Phase, list[Lane]]:
    """Return the lanes as plain tuples: these are unpacked three times as fast as with names."""
    named = lanes_of(run, place)
    return {phase: [cast("Lane", tuple(lane)) for lane in lanes] for phase, lanes in named.items()}


def _special_microbatches(run: StepRun, work: PassWork) -> frozenset[int]:
    """Return in which microbatches a pass gathers parameters or reduces gradients."""
    if work.copies or work.units or (work.reductions and work.reduces_always):
        return run.every_microbatch
    if work.gathers:
        return FIRST_MICROBATCH
    return run.last_microbatch if work.reductions else NO_MICROBATCHES


def _units_now(
    state: RankProgress,
    instruction: Instruction,
    freed: Sequence[bool],
) -> tuple[UnitWork, ...]:
    """Return the units of a pass, without the gathers that an earlier pass has left.

    What that pass left may have been freed for want of room.
    """
    virtual_stage = instruction.virtual_stage
    if freed and freed[len(state.starts_ps) - 1]:  # this action has its start noted already
        state.passed.pop(virtual_stage)
    before = state.passed.get(virtual_stage)
    state.passed[virtual_stage] = instruction.phase
    if before is Phase.FORWARD:
        return instruction.again_units
    if before is Phase.BACKWARD:
        return instruction.kept_units
    return instruction.work.units


def _computed(state: RankProgress, part_ps: int, now: int) -> int:
    """Compute a part of a pass that may have waited for it; return when that is done."""
    state.part_starts_ps.append(now)
    return _advanced(state, part_ps, now)


def _advanced(state: RankProgress, part_ps: int, now: int) -> int:
    """Compute a part of a pass, with the copies beside it; return when that is done."""
    return now + part_ps if state.copies is None else state.copies.compute(part_ps, now)


def _first_gather(state: RankProgress) -> int:
    """Return how many collectives end with the first gather in the queue."""
    count = 1
    while state.queue[count - 1].kind is not SpanKind.PARAMETER_GATHER:
        count += 1
    return count


def _copied(state: RankProgress, copy_ps: int, now: int) -> int:
    """Copy from or to the buffer of a collective; return when that is done."""
    state.gather_wait_ps += copy_ps
    return now + copy_ps


def collective_meeting(
    env: Environment, size: int, stream: CollectiveStream, *, shared_port: bool
) -> Meeting[Submission, int]:
    """Return the meeting of a data-parallel group; its result is the last collective's end.

    On a *shared_port* its collectives give way to its members' messages.
    """

    def resolve(submissions: Sequence[Submission]) -> int:
        messages = [each.messages for each in submissions] if shared_port else ()
        first, *others = (each.collectives for each in submissions)
        end_ps = 0
        for place, entry in enumerate(first):
            ready_ps = entry.ready_ps
            for each in others:
                ready_ps = max(ready_ps, each[place].ready_ps)
            end_ps = stream.run(ready_ps, entry, messages)
        return end_ps

    return Meeting(env, size, resolve)
