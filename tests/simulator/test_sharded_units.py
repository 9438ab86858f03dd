"""Passes whose parameters are gathered unit by unit (ZeRO-3, FSDP): closed forms and folding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import SCHEDULES, Mesh, StepWork, simulate_folded, simulate_unfolded
from meshwright.simulator.engine import PassWork, RankWork, SpanKind, UnitWork
from meshwright.simulator.schedules import Phase

TIMES = st.integers(1, 50)


def work_of(
    forward: tuple[UnitWork, ...],
    backward: tuple[UnitWork, ...],
    *,
    num_microbatches: int = 1,
    pp: int = 1,
    prefetches: bool = True,
    reduces_each_pass: bool = True,
) -> StepWork:
    forward_ps, backward_ps = (
        sum(unit.compute_ps for unit in each) for each in (forward, backward)
    )
    virtual_stage = {
        Phase.FORWARD: PassWork(forward_ps, units=forward),
        Phase.BACKWARD: PassWork(
            backward_ps, units=backward, reduces_every_microbatch=reduces_each_pass
        ),
    }
    return StepWork(
        ranks=(RankWork(virtual_stages=(virtual_stage,)),) * pp,
        actions=SCHEDULES["1f1b"].actions(pp, num_microbatches, 1),
        num_microbatches=num_microbatches,
        prefetches=prefetches,
    )


@given(
    units=st.integers(1, 8),
    compute=TIMES,
    gather=TIMES,
    reduce=TIMES,
    microbatches=st.integers(1, 3),
)
def test_without_prefetch_everything_adds_up(
    units: int, compute: int, gather: int, reduce: int, microbatches: int
) -> None:
    forward = (UnitWork(compute, gather),) * units
    backward = (UnitWork(2 * compute, gather, reduce),) * units
    work = work_of(forward, backward, num_microbatches=microbatches, prefetches=False)
    expected = microbatches * units * (3 * compute + 2 * gather + reduce)
    assert simulate_folded(work).step_ps == expected


@given(units=st.integers(1, 8), compute=TIMES, gather=TIMES)
def test_a_gather_one_ahead_costs_what_computation_does_not_hide(
    units: int, compute: int, gather: int
) -> None:
    """First gather exposed, then the longer of gather and unit, the last unit alone."""
    forward = (UnitWork(compute, gather),) * units
    work = work_of(forward, (UnitWork(1),))
    end_ps = simulate_folded(work).ranks[0].ends_ps[0]
    assert end_ps == gather + (units - 1) * max(compute, gather) + compute


@settings(deadline=None)
@given(units=st.integers(1, 8), compute=TIMES, gather=TIMES, unpack=TIMES, pack=TIMES)
def test_copies_from_and_to_buffers_hide_under_nothing(
    units: int, compute: int, gather: int, unpack: int, pack: int
) -> None:
    """The next gather starts when the buffer of the one before is free."""
    forward = (UnitWork(compute, gather, unpack_ps=unpack),) * units
    backward = (UnitWork(compute, reduce_ps=1, pack_ps=pack),) * units
    work = work_of(forward, backward)
    rank = simulate_folded(work).ranks[0]
    end_ps = gather + unpack + (units - 1) * (max(compute, gather) + unpack) + compute
    assert rank.ends_ps == [end_ps, end_ps + units * (compute + pack)]
    assert rank.gather_wait_ps == rank.ends_ps[1] - 2 * units * compute


def test_units_that_are_not_gathered_or_reduced_are_not_copied() -> None:
    stays = UnitWork(5, 3, unpack_ps=2, stays=True)
    last = stays._replace(reduce_ps=1, pack_ps=4)
    rank = simulate_folded(
        work_of((stays,), (last,), num_microbatches=2, reduces_each_pass=False)
    ).ranks[0]
    assert rank.ends_ps == [10, 15, 25, 34]


def test_a_backward_unit_gathers_ahead_of_the_reduction_behind_it() -> None:
    backward = (UnitWork(10, 4, 7), UnitWork(10, 4, 7), UnitWork(10, 4, 7))
    times = simulate_folded(work_of((UnitWork(1),), backward))
    record = [(each.kind, each.start_ps, each.end_ps) for each in times.ranks[0].collectives]
    gather, reduction = SpanKind.PARAMETER_GATHER, SpanKind.GRADIENT_REDUCTION
    assert record == [
        (gather, 1, 5),
        (gather, 5, 9),
        (reduction, 15, 22),
        (gather, 22, 26),
        (reduction, 26, 33),
        (reduction, 36, 43),
    ]


def test_a_reduction_once_a_step_waits_for_the_last_microbatch() -> None:
    units = (UnitWork(10, 0, 7),)
    each = simulate_folded(work_of((UnitWork(5),), units, num_microbatches=4)).ranks[0]
    once = simulate_folded(
        work_of((UnitWork(5),), units, num_microbatches=4, reduces_each_pass=False)
    ).ranks[0]
    assert len(each.collectives) == 4
    assert [item.start_ps for item in once.collectives] == [60]


@given(reduce=TIMES, again=TIMES, microbatches=st.integers(1, 5))
def test_a_reduction_takes_longer_once_there_is_something_to_add_to(
    reduce: int, again: int, microbatches: int
) -> None:
    backward = (UnitWork(1, 0, reduce, again),)
    work = work_of((UnitWork(1),), backward, num_microbatches=microbatches, prefetches=False)
    expected = microbatches * (2 + reduce) + (microbatches - 1) * again
    assert simulate_folded(work).step_ps == expected


@pytest.mark.parametrize("prefetches", [True, False])
@pytest.mark.parametrize("reduces_each_pass", [True, False])
def test_folded_equals_unfolded(*, prefetches: bool, reduces_each_pass: bool) -> None:
    forward = (UnitWork(10, 3), UnitWork(20, 9))
    backward = (UnitWork(41, 9, 17, 3), UnitWork(19, 3, 5, 11))
    work = work_of(
        forward,
        backward,
        num_microbatches=6,
        pp=4,
        prefetches=prefetches,
        reduces_each_pass=reduces_each_pass,
    )
    folded = simulate_folded(work)
    unfolded = simulate_unfolded(work, Mesh(tp=2, dp=3, pp=4, node_size=8))
    assert unfolded.step_ps == folded.step_ps
    assert unfolded.ranks[-1].collectives == folded.ranks[-1].collectives
