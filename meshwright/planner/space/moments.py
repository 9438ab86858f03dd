"""The fullest moments that pipeline ranks go through."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space.pipelines import Pipeline, Role, block_counts
from meshwright.planner.space.switches import Column, distinct
from meshwright.simulator import Phase, Schedule

# An interleaved order repeats itself every p microbatches once its warm-up is over; warm-up
# takes fewer than (v + 1) p of the v m passes, so 3 p microbatches show every moment.
PERIODS = 3
BESIDE = len(Phase)  # the number of a moment of two passes, behind those of the phases


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
        those of the role that differ.  Of two passes beside each other the phase is `BESIDE`, the
        place that of the forward pass times the number of such stages and that of the backward
        pass; they keep what was kept before both.
    """
    numbers, vpp = num_microbatches.tolist(), len(role.stages)
    stages = list(dict.fromkeys(role.stages))
    counts = np.array([block_counts(pipeline.kinds, [stage]) for stage in stages], np.int64)
    if len(stages) > 1:
        places = [stages.index(stage) for stage in role.stages]
        sizes = [(role.first, pipeline.pp, each, vpp) for each in numbers]
        walked = [
            _walked(
                _order(pipeline.schedule, *size),
                counts,
                np.array(places),
                pipeline.schedule.pairs(*size),
            )
            for size in sizes
        ]
        longest = max(map(len, walked))
        return np.stack([np.resize(each, (longest, each.shape[1])) for each in walked])
    schedule, first, pp = pipeline.schedule, role.first, pipeline.pp
    beside = np.array([len(schedule.pairs(first, pp, each, vpp)) > 0 for each in numbers], np.int64)
    passes = np.array([schedule.in_flight(first, pp, each, vpp) for each in numbers], np.int64)
    # Beside a forward pass a backward pass runs: what it keeps counts with what both need.
    phases = [*range(len(Phase)), BESIDE] if beside.any() else range(len(Phase))
    moments = np.zeros((len(numbers), len(phases), len(pipeline.kinds) + 2), np.int64)
    moments[:, :, :-2] = ((passes - beside)[:, None] * counts[0])[:, None]
    moments[:, :, -2] = phases
    if beside.any():
        moments[:, -1, -2] *= beside  # a forward pass once more where there are no pairs
    return moments


def _walked(
    order: tuple[NDArray[np.bool_], Column],
    counts: NDArray[np.int64],
    places: Column,
    pairs: range,
) -> NDArray[np.int64]:
    """Return the fullest moments of a rank with such an *order*, as `fullest_moments`."""
    is_backward, virtual_stage = order
    stage = places[virtual_stage]
    own = counts[stage]
    # While a pass runs it keeps its own blocks: a forward pass already, a backward pass still.
    kept = np.where(is_backward[:, None], -own, own).cumsum(axis=0) + own * is_backward[:, None]
    phase = is_backward.astype(np.int64)
    if pairs:
        made = np.array(pairs)
        kept[made] -= own[made]
        phase[made] = BESIDE
        stage[made] = stage[made] * len(counts) + stage[made + 1]
        alone = np.ones(len(phase), np.bool_)
        alone[made + 1] = False
        kept, phase, stage = kept[alone], phase[alone], stage[alone]
    return _undominated(np.column_stack([kept, phase, stage]))


@lru_cache(maxsize=1024)
def _order(
    schedule: Schedule, pp_rank: int, pp: int, num_microbatches: int, vpp: int
) -> tuple[NDArray[np.bool_], Column]:
    """Return whether each action of a rank is a backward pass, and its virtual stage."""
    actions = schedule.rank_actions(pp_rank, pp, num_microbatches, vpp)
    phases = np.array([phase is Phase.BACKWARD for phase, _, _ in actions])
    return phases, np.array([virtual_stage for _, virtual_stage, _ in actions], np.int64)


def _undominated(moments: NDArray[np.int64]) -> NDArray[np.int64]:
    """Drop moments that another one of the same phase and stage reaches in every count."""
    # First all but the one with the most passes through the first kind, of those alike in the rest.
    moments = moments[np.argsort(-moments[:, 0], kind="stable")]
    moments = moments[np.sort(distinct([*moments[:, 1:].T])[0])]
    kept = moments[:, None, :-2] <= moments[None, :, :-2]
    is_reached = kept.all(axis=2) & (moments[:, None, -2:] == moments[None, :, -2:]).all(axis=2)
    np.fill_diagonal(is_reached, val=False)
    return np.asarray(moments[~is_reached.any(axis=1)], np.int64)
