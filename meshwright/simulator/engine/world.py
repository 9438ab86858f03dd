"""Simulation of a step: one representative per pipeline rank, or every rank of the mesh."""

from collections.abc import Sequence
from functools import partial
from math import prod

from meshwright.simulator.engine.clock import UntimedEnvironment
from meshwright.simulator.engine.copies import HostCopies
from meshwright.simulator.engine.groups import CollectiveStream, GroupBarrier
from meshwright.simulator.engine.pairs import overlapped_stream
from meshwright.simulator.engine.record import Mark, RankTimes, StepTimes
from meshwright.simulator.engine.run import (
    AWAITED,
    RankProgress,
    SimulatedRank,
    StepRun,
    collective_barrier,
)
from meshwright.simulator.engine.steady import run_shorter
from meshwright.simulator.engine.work import StepWork, check_passes, with_overhead
from meshwright.simulator.errors import DeadlockError
from meshwright.simulator.layout import IN_STEP, REPLICATED, Axis, Mesh
from meshwright.simulator.schedules import Periodic, Phase


def simulate_folded(work: StepWork) -> StepTimes:
    """Simulate *work* with one representative for the equal ranks of each pipeline rank.

    For a long step a shorter one is simulated, if its steady phase is periodic.

    Raises:
        TooManyTasksError: If it is not, and the step has too many passes.
    """
    # Durations in *work* are those of the real groups; only dependencies are left to simulate.
    mesh = Mesh(pp=work.pp, node_size=1)
    ranks, num_passes = run_shorter(work, partial(_marked_times, mesh=mesh))
    if ranks is not None:
        return _step_times(work, ranks, num_passes)
    check_passes(work.pp * work.num_virtual_stages, work.num_microbatches, num_tried=num_passes)
    return _simulate(work, mesh, num_passes)


def simulate_unfolded(work: StepWork, mesh: Mesh) -> StepTimes:
    """Simulate *work* with every rank of *mesh* in its real groups.

    Ranks of a tp and cp group run in lockstep; data-parallel ranks run a collective when all are
    ready.  On a symmetric cluster the times equal those of `simulate_folded` to the picosecond.
    """
    if mesh.degree(Axis.PP) != work.pp:
        raise ValueError(f"mesh has pp={mesh.degree(Axis.PP)}, the work pp={work.pp}")
    return _simulate(work, mesh)


def _simulate(work: StepWork, mesh: Mesh, num_passes: int = 0) -> StepTimes:
    """Simulate all of *work*, after *num_passes* were simulated before."""
    orders = work.actions
    lists = [each.repeated(each.copies) if isinstance(each, Periodic) else each for each in orders]
    work = work._replace(actions=lists)
    ranks = [times for times, _ in _marked_times(work, mesh)]
    return _step_times(work, ranks, num_passes + sum(map(len, work.actions)))


def _marked_times(work: StepWork, mesh: Mesh) -> list[tuple[RankTimes, list[Mark]]]:
    """Simulate *work*; return the times and marks of each rank."""
    clock = UntimedEnvironment()
    run = StepRun(work, clock, mesh.world_size)
    places = _simulated_ranks(clock, work, mesh)
    for place in places:
        process = overlapped_stream(run, place) if work.pairs else run.compute_stream(place)
        run.states[place.index].resume = clock.start(process)
    clock.run_until_idle()
    _check_finished(run)
    ran = zip(run.states, places, strict=True)
    return [(_rank_times(run, state, place), state.marks) for state, place in ran]


def _step_times(work: StepWork, ranks: Sequence[RankTimes], num_passes: int) -> StepTimes:
    end_ps = max(rank.end_ps for rank in ranks)
    step_ps = with_overhead(end_ps, work.overhead_per_million)
    return StepTimes(step_ps=step_ps, ranks=tuple(ranks), num_passes=num_passes)


def _simulated_ranks(clock: UntimedEnvironment, work: StepWork, mesh: Mesh) -> list[SimulatedRank]:
    """Return all simulated ranks, with one barrier per group."""
    barriers: dict[tuple[Axis, int], GroupBarrier[int, int]] = {}
    streams = {}
    places = []
    has_tied_embedding = work.pp > 1 and work.ranks[0].shared_embedding_ps > 0
    stride = mesh.stride(Axis.PP)
    sizes = [prod(map(mesh.degree, axes)) for axes in (IN_STEP, REPLICATED)]
    for rank in range(mesh.world_size):
        pp_rank = rank // stride % work.pp
        # A group is identified by its first rank.
        tp_first, dp_first = (
            mesh.group(rank, *axes)[0] if size > 1 else rank
            for axes, size in zip((IN_STEP, REPLICATED), sizes, strict=True)
        )
        if sizes[0] > 1 and (Axis.TP, tp_first) not in barriers:
            barriers[Axis.TP, tp_first] = GroupBarrier(clock, sizes[0], max)
        if dp_first not in streams:
            stream = CollectiveStream()
            barrier = collective_barrier(clock, sizes[1], stream, shared_port=work.shared_port)
            streams[dp_first] = stream, barrier
        is_tied = has_tied_embedding and pp_rank in (0, work.pp - 1)
        # Only the first and the last stage hold the tied embedding.
        ends = (Axis.PP, mesh.group(rank, Axis.PP)[0]) if is_tied else None
        if ends is not None and ends not in barriers:
            barriers[ends] = GroupBarrier(clock, 2, max)
        places.append(
            SimulatedRank(
                index=rank,
                pp_rank=pp_rank,
                stride=stride,
                tp_group=barriers.get((Axis.TP, tp_first)),
                dp_group=streams[dp_first][1],
                dp_stream=streams[dp_first][0],
                embedding_group=None if ends is None else barriers[ends],
            )
        )
    return places


def _check_finished(run: StepRun) -> None:
    """Raise DeadlockError when the event queue emptied before every rank was done."""
    stuck = [(index, state) for index, state in enumerate(run.states) if state.end_ps < 0]
    if stuck:
        # A rank that waits for a message explains more than one that waits for that rank.
        index, state = min(stuck, key=lambda item: not _awaited(item[1]))
        raise DeadlockError(
            f"{len(stuck)} of {len(run.states)} ranks never finished; rank {index} stopped after "
            f"{len(state.ends_ps)} actions, {_waiting(state)}"
        )


def _awaited(state: RankProgress) -> list[tuple[int, int]]:
    """Return slot and microbatch of messages that a rank waits for."""
    slots = enumerate(state.inboxes)
    return [(slot, inbox.index(AWAITED)) for slot, inbox in slots if AWAITED in inbox]


def _waiting(state: RankProgress) -> str:
    awaited = _awaited(state)
    if not awaited:
        return "waiting for other ranks of a group"
    slot, microbatch = awaited[0]
    num_stages = len(state.inboxes) // 2
    phase = "forward" if slot < num_stages else "backward"
    return f"waiting for the {phase} message of microbatch {microbatch}, chunk {slot % num_stages}"


def _rank_times(run: StepRun, state: RankProgress, place: SimulatedRank) -> RankTimes:
    work, program = run.work, run.programs[place.pp_rank]
    copies = state.copies or HostCopies()
    return RankTimes(
        actions=work.actions[place.pp_rank],
        pairs=work.pairs[place.pp_rank] if work.pairs else range(0),
        starts_ps=state.starts_ps,
        ends_ps=state.ends_ps,
        part_starts_ps=state.part_starts_ps,
        silent=tuple(
            [(each.phase, each.virtual_stage) for each in program if not each.target_step]
        ),
        messages=state.messages,
        collectives=place.dp_stream.record,
        closing=state.closing,
        gather_wait_ps=state.gather_wait_ps,
        copy_waits_ps=copies.waits_ps,
        copies=[span for phase in Phase for span in copies.spans.get(phase, ())],
        pending_offloads=copies.most_behind,
        passes_end_ps=state.passes_end_ps,
        reduce_end_ps=state.reduce_end_ps,
        reduce_wait_ps=state.reduce_wait_ps,
        update_start_ps=state.update_start_ps,
        end_ps=state.end_ps,
    )
