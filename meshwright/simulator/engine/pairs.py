"""Rank process with F/B overlap: forward passes overlapped with other microbatches' backward."""

from collections.abc import Iterator, Sequence

from meshwright.simulator.engine.clock import Process, Wait
from meshwright.simulator.engine.run import (
    AWAITED,
    NOT_SENT,
    Inbox,
    Lane,
    SimulatedRank,
    StepRun,
    lanes_of,
)
from meshwright.simulator.schedules import Action

ActionGroup = list[tuple[Action, Lane]]


def overlapped_stream(run: StepRun, place: SimulatedRank) -> Process:
    """Run the actions of one rank, pairs of them overlapped, then the end of its step.

    A pair starts when both messages have arrived, and sends both messages when it ends.
    """
    now = port_free_ps = 0
    state = run.states[place.index]
    for group in _action_groups(run, place):
        for action, lane in group:
            if lane.inbox is not None:
                now = max(now, (yield from _receive(lane.inbox, action.microbatch)))
        if place.tp_group is not None:
            # Ranks of a tp group run in lockstep.
            now = yield place.tp_group.arrive(now)
        now = yield from _run_passes(run, place, group, now)
        for action, lane in group:
            if lane.outbox is None:
                continue
            state.messages.starts_ps.append(max(now, port_free_ps))
            port_free_ps = state.messages.starts_ps[-1] + lane.occupy_ps
            state.messages.ends_ps.append(port_free_ps)
            if lane.outbox[action.microbatch] == AWAITED:
                run.clock.enqueue((lane.receiver.resume, port_free_ps + lane.delay_ps))
            else:
                lane.outbox[action.microbatch] = port_free_ps + lane.delay_ps
        if run.work.blocking_messages:
            now = max(now, port_free_ps)
    yield from run.finish(place, now)


def _action_groups(run: StepRun, place: SimulatedRank) -> Iterator[ActionGroup]:
    """Yield the actions of a rank, overlapped ones together."""
    lanes, pairs = lanes_of(run, place), run.work.pairs[place.pp_rank]
    actions: Sequence[Action] = run.work.actions[place.pp_rank]
    actions_with_lanes = [(each, lanes[each.phase][each.virtual_stage]) for each in actions]
    position = 0
    while position < len(actions_with_lanes):
        num_actions = 2 if position in pairs else 1
        yield actions_with_lanes[position : position + num_actions]
        position += num_actions


def _receive(inbox: Inbox, microbatch: int) -> Wait:
    """Receive a message; return its arrival time."""
    arrival_ps = inbox[microbatch]
    if arrival_ps < 0:
        inbox[microbatch] = AWAITED
        arrival_ps = yield None
    inbox[microbatch] = NOT_SENT
    return arrival_ps


def _run_passes(run: StepRun, place: SimulatedRank, group: ActionGroup, now: int) -> Wait:
    """Run one pass or an overlapped pair; return the end.

    A pair is recorded as two consecutive passes, each shortened by its part of the overlap.
    """
    state = run.states[place.index]
    for action, lane in group:
        position = len(state.starts_ps)
        state.starts_ps.append(now)
        if action.microbatch in lane.special:
            assert len(group) == 1, "the first forward and the last backward passes run alone"
            now = yield from run.overlapping_pass(place, lane.instruction, action.microbatch, now)
        else:
            now += lane.compute_ps - run.work.pass_saving_ps(place.pp_rank, position)
        state.ends_ps.append(now)
    return now
