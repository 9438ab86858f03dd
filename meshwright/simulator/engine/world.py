"""Who is simulated: one representative a pipeline rank, or every rank of the mesh."""

from collections import deque
from typing import cast

from simpy import Environment, Event
from simpy.events import EventCallbacks

from meshwright.simulator.engine.groups import CollectiveStream, Meeting
from meshwright.simulator.engine.pairs import paired_stream
from meshwright.simulator.engine.record import RankTimes, StepTimes
from meshwright.simulator.engine.run import (
    NO_MICROBATCH,
    RankPlace,
    RankProgress,
    StepRun,
    collective_meeting,
)
from meshwright.simulator.engine.work import StepWork, with_overhead
from meshwright.simulator.errors import DeadlockError
from meshwright.simulator.layout import IN_STEP, REPLICATED, Axis, Mesh

WOKEN = cast("EventCallbacks", None)
"""What `Environment.step` leaves of the callbacks of an event."""


class StandingClock(Environment):
    """Events in the order in which they come, with no time between: ranks keep their own clocks."""

    def __init__(self) -> None:
        super().__init__()
        self._triggered: deque[Event] = deque()

    def schedule(self, event: Event, *_: object) -> None:
        """Take *event* as the last one."""
        self._triggered.append(event)

    def run_dry(self) -> None:
        """Wake who waits for an event, until none is left."""
        while self._triggered:
            event = self._triggered.popleft()
            callbacks, event.callbacks = event.callbacks, WOKEN
            for wake in callbacks:
                wake(event)
            if not event.ok:
                raise cast("Exception", event.value)


def simulate_folded(work: StepWork) -> StepTimes:
    """Run *work* with one representative for the equal ranks of each pipeline rank."""
    # Durations in *work* know the real groups already; here only who waits for whom is left.
    return _simulate(work, Mesh(pp=work.pp, node_size=1))


def simulate_unfolded(work: StepWork, mesh: Mesh) -> StepTimes:
    """Run *work* with every rank of *mesh*, each meeting its real groups.

    Ranks of a tensor- and context-parallel group enter every action together, those that hold the
    same parameters run a collective when all are ready.  On a symmetric cluster the times equal
    those of `simulate_folded` to the picosecond.
    """
    if mesh.degree(Axis.PP) != work.pp:
        raise ValueError(f"mesh has pp={mesh.degree(Axis.PP)}, the work pp={work.pp}")
    return _simulate(work, mesh)


def _simulate(work: StepWork, mesh: Mesh) -> StepTimes:
    env = StandingClock()
    run = StepRun(work, env, mesh.world_size)
    places = _places(env, work, mesh)
    for place in places:
        env.process(paired_stream(run, place) if work.pairs else run.compute_stream(place))
    env.run_dry()
    _check_finished(run)
    ranks = tuple(
        _rank_times(work, state, place) for state, place in zip(run.states, places, strict=True)
    )
    end_ps = max(rank.end_ps for rank in ranks)
    return StepTimes(step_ps=with_overhead(end_ps, work.overhead_per_million), ranks=ranks)


def _places(env: Environment, work: StepWork, mesh: Mesh) -> list[RankPlace]:
    """Return the place of every rank, with the meetings of its groups made once a group."""
    meetings: dict[tuple[Axis, int], Meeting[int, int]] = {}
    streams = {}
    places = []
    ties = work.pp > 1 and work.ranks[0].shared_embedding_ps > 0
    stride = mesh.stride(Axis.PP)
    for rank in range(mesh.world_size):
        pp_rank = rank // stride % work.pp
        together = mesh.group(rank, *IN_STEP)
        tp_first, pp_first = together[0], mesh.group(rank, Axis.PP)[0]
        replicas = mesh.group(rank, *REPLICATED)
        dp_first = replicas[0]
        if len(together) > 1 and (Axis.TP, tp_first) not in meetings:
            meetings[Axis.TP, tp_first] = Meeting(env, len(together), max)
        if dp_first not in streams:
            stream = CollectiveStream()
            meeting = collective_meeting(env, len(replicas), stream, shared_port=work.shared_port)
            streams[dp_first] = stream, meeting
        if ties and (Axis.PP, pp_first) not in meetings:
            # Of a pipeline's ranks only the first and the last hold the tied table.
            meetings[Axis.PP, pp_first] = Meeting(env, 2, max)
        is_end = pp_rank in (0, work.pp - 1)
        places.append(
            RankPlace(
                index=rank,
                pp_rank=pp_rank,
                stride=stride,
                tp_group=meetings.get((Axis.TP, tp_first)),
                dp_group=streams[dp_first][1],
                dp_stream=streams[dp_first][0],
                embedding_group=meetings.get((Axis.PP, pp_first)) if is_end else None,
            )
        )
    return places


def _check_finished(run: StepRun) -> None:
    """Raise DeadlockError when the event queue emptied before every rank was done."""
    stuck = [(index, state) for index, state in enumerate(run.states) if state.end_ps < 0]
    if stuck:
        # A rank that waits for a message says more than one that waits for that rank.
        index, state = min(stuck, key=lambda item: not _awaited(item[1]))
        raise DeadlockError(
            f"{len(stuck)} of {len(run.states)} ranks never finished; rank {index} stopped after "
            f"{len(state.ends_ps)} actions, {_waiting(state)}"
        )


def _awaited(state: RankProgress) -> list[tuple[int, int]]:
    """Return slot and microbatch of the message that a rank waits for, if it does."""
    slots = enumerate(state.inboxes)
    return [(slot, inbox.awaited) for slot, inbox in slots if inbox.awaited != NO_MICROBATCH]


def _waiting(state: RankProgress) -> str:
    awaited = _awaited(state)
    if not awaited:
        return "waiting for other ranks of a group"
    slot, microbatch = awaited[0]
    num_stages = len(state.inboxes) // 2
    phase = "forward" if slot < num_stages else "backward"
    return f"waiting for the {phase} message of microbatch {microbatch}, chunk {slot % num_stages}"


def _rank_times(work: StepWork, state: RankProgress, place: RankPlace) -> RankTimes:
    return RankTimes(
        actions=work.actions[place.pp_rank],
        pairs=work.pairs[place.pp_rank] if work.pairs else range(0),
        starts_ps=state.starts_ps,
        ends_ps=state.ends_ps,
        part_starts_ps=state.part_starts_ps,
        senders=state.senders,
        sent_ps=state.sent_ps,
        collectives=place.dp_stream.record,
        closing=state.closing,
        gather_wait_ps=state.gather_wait_ps,
        passes_end_ps=state.passes_end_ps,
        reduce_end_ps=state.reduce_end_ps,
        reduce_wait_ps=state.reduce_wait_ps,
        update_start_ps=state.update_start_ps,
        end_ps=state.end_ps,
    )
