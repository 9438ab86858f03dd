"""The fullest moments that pipeline ranks go through."""

from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space.pipelines import Pipeline, Role, block_counts
from meshwright.planner.space.switches import Column, distinct
from meshwright.simulator import Phase, Schedule

# An interleaved order repeats itself every p microbatches once its warm-up is over; warm-up
# takes fewer than (v + 1) p of the v m passes, so 3 p microbatches show every moment.
PERIODS = 3

Order: TypeAlias = tuple[NDArray[np.bool_], Column]
"""Whether each action of a rank is a backward pass, and its virtual stage."""


def representative_microbatches(pipeline: Pipeline, role: Role, num_microbatches: Column) -> Column:
    """Return the fewest microbatches that show the same fullest moments.

    Where they go through stages in groups larger than the pipeline the whole order is walked.
    """
    pp = pipeline.pp
    if len(role.stages) == 1 or pipeline.group_size not in {None, pp}:
        return num_microbatches
    fewest = np.minimum(num_microbatches, PERIODS * pp)
    return np.where(num_microbatches % pp == 0, fewest, num_microbatches)


def fullest_moments(pipeline: Pipeline, role: Role, num_microbatches: Column) -> NDArray[np.int64]:
    """Return the moments among which the role's peak is, whatever the tensors' sizes.

    The first rank of a role has the most passes in flight.  Where its stages are equal only
    the number of passes matters; where they differ the order is walked.

    Returns:
        For each number of microbatches as many rows, some of them repeated: kept passes through
        blocks of each kind, and of the running pass the phase and the place of its stage among
        those of the role that differ.
    """
    numbers, vpp = num_microbatches.tolist(), len(role.stages)
    stages = list(dict.fromkeys(role.stages))
    counts = np.array([block_counts(pipeline.kinds, [stage]) for stage in stages], np.int64)
    if len(stages) > 1:
        places = np.array([stages.index(stage) for stage in role.stages])
        orders = [_order(pipeline.schedule, role.first, pipeline.pp, each, vpp) for each in numbers]
        return _walked(orders, counts, places)
    passes = [pipeline.schedule.in_flight(role.first, pipeline.pp, each, vpp) for each in numbers]
    moments = np.zeros((len(numbers), len(Phase), len(pipeline.kinds) + 2), np.int64)
    moments[:, :, :-2] = (np.array(passes, np.int64)[:, None] * counts[0])[:, None]
    moments[:, :, -2] = range(len(Phase))
    return moments


def _walked(orders: list[Order], counts: NDArray[np.int64], places: Column) -> NDArray[np.int64]:
    """Return the fullest moments of a rank with each of *orders*, as `fullest_moments`."""
    is_backward, virtual_stage = map(np.concatenate, zip(*orders, strict=True))
    number = np.repeat(np.arange(len(orders)), [len(stages) for _, stages in orders])
    stage = places[virtual_stage]
    own = counts[stage]
    # While a pass runs it keeps its own blocks: a forward pass already, a backward pass still.
    # When an order is over nothing is kept, so that the next one's sums begin with none.
    kept = np.where(is_backward[:, None], -own, own).cumsum(axis=0) + own * is_backward[:, None]
    moments = _undominated(kept, np.stack([number, is_backward, stage], axis=1))
    by_order = _by_group(moments[:, -3], moments)
    return np.delete(by_order, -3, axis=2)


@lru_cache(maxsize=1024)
def _order(schedule: Schedule, pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> Order:
    """Return what a rank runs."""
    actions = schedule.rank_actions(pp_rank, pp, num_microbatches, vpp)
    phases, virtual_stages, _ = zip(*actions, strict=True)
    is_backward = np.array([phase is Phase.BACKWARD for phase in phases])
    return is_backward, np.array(virtual_stages, np.int64)


def _undominated(kept: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return moments, what they keep and all else, but those that another one reaches.

    That is alike in all else, and keeps as much of everything.
    """
    # First all but the one with the most passes through the first kind, of those alike in the rest.
    moments = np.concatenate([kept, others], axis=1)[np.argsort(-kept[:, 0], kind="stable")]
    moments = moments[np.sort(distinct([*moments[:, 1:].T])[0])]
    alike = distinct([*moments[:, kept.shape[1] :].T])[1]
    rows = _by_group(alike, np.arange(len(moments))[:, None])[:, :, 0]
    most = moments[rows, : kept.shape[1]]
    is_other = rows[:, :, None] != rows[:, None]
    is_reached = (most[:, :, None] <= most[:, None]).all(axis=3) & is_other
    is_left = np.zeros(len(moments), np.bool_)
    is_left[rows[~is_reached.any(axis=2)]] = True
    return np.asarray(moments[is_left], np.int64)


def _by_group(number: Column, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the *rows* of each group, by its number, some repeated so that all have as many."""
    counts = np.bincount(number)
    starts = counts.cumsum() - counts
    places = np.arange(counts.max()) % counts[:, None] + starts[:, None]
    return np.asarray(rows[np.argsort(number, kind="stable")[places]], np.int64)
