"""A rank that runs forward passes of microbatches beside backward passes of others."""

from collections.abc import Iterator, Sequence

from meshwright.simulator.engine.clock import Process, Wait
from meshwright.simulator.engine.run import (
    AWAITED,
    NOT_SENT,
    Inbox,
    Lane,
    RankPlace,
    StepRun,
    lanes_of,
)
from meshwright.simulator.schedules import Action

Turn = list[tuple[Action, Lane]]


def paired_stream(run: StepRun, place: RankPlace) -> Process:
    """Run the actions of one rank, pairs of them beside each other, then what ends its step.

    A pair starts when both have what they wait for, and hands on what both made when it ends.
    """
    now = port_free_ps = 0
    state = run.states[place.index]
    for turn in _turns(run, place):
        for action, lane in turn:
            if lane.inbox is not None:
                now = max(now, (yield from _arrival(lane.inbox, action.microbatch)))
        if place.tp_group is not None:
            now = yield place.tp_group.arrive(now)
        now = yield from _passed(run, place, turn, now)
        for action, lane in turn:
            if lane.outbox is None:
                continue
            state.messages.starts_ps.append(max(now, port_free_ps))
            port_free_ps = state.messages.starts_ps[-1] + lane.occupy_ps
            state.messages.ends_ps.append(port_free_ps)
            if lane.outbox[action.microbatch] == AWAITED:
                run.clock.next_turn((lane.taker.go_on, port_free_ps + lane.delay_ps))
            else:
                lane.outbox[action.microbatch] = port_free_ps + lane.delay_ps
        if run.work.blocking_messages:
            now = max(now, port_free_ps)
    yield from run.finish(place, now)


def _turns(run: StepRun, place: RankPlace) -> Iterator[Turn]:
    """Yield the actions of a rank, those beside each other together."""
    lanes, pairs = lanes_of(run, place), run.work.pairs[place.pp_rank]
    actions: Sequence[Action] = run.work.actions[place.pp_rank]
    mine = [(each, lanes[each.phase][each.virtual_stage]) for each in actions]
    position = 0
    while position < len(mine):
        size = 2 if position in pairs else 1
        yield mine[position : position + size]
        position += size


def _arrival(inbox: Inbox, microbatch: int) -> Wait:
    """Take a message; return when it is there."""
    arrival_ps = inbox[microbatch]
    if arrival_ps < 0:
        inbox[microbatch] = AWAITED
        arrival_ps = yield None
    inbox[microbatch] = NOT_SENT
    return arrival_ps


def _passed(run: StepRun, place: RankPlace, turn: Turn, now: int) -> Wait:
    """Run the passes of a turn; return when they are done.

    In the record a pair's passes follow each other, each as long as it takes beside the other.
    """
    state = run.states[place.index]
    for action, lane in turn:
        position = len(state.starts_ps)
        state.starts_ps.append(now)
        if action.microbatch in lane.special:
            assert len(turn) == 1, "the first forward and the last backward passes run alone"
            now = yield from run.special_pass(place, lane.instruction, action.microbatch, now)
        else:
            now += lane.compute_ps - run.work.hidden_of(place.pp_rank, position)
        state.ends_ps.append(now)
    return now
