"""The least time for the memory that is given: what a smaller memory limit would cost."""

import numpy as np

from meshwright.planner.search.finalists import Finalists, Progress, Runs
from meshwright.planner.search.result import FrontierPoint

# Each point of the frontier needs this share less memory than the one before it.
STEP_FRACTION = 0.05


def find_frontier(
    finalists: Finalists, fastest: int | None, *, max_passes: int, tell: Progress
) -> tuple[FrontierPoint, ...]:
    """Return the frontier of memory against time, by bytes.

    The fastest layout that needs at most some memory is found as the fastest of all is: by
    bounds, level by level down to the least memory of all.  What was simulated besides and is
    beaten by none is on the frontier, too.  A point is proven where no bound of a layout within its
    memory leaves room for a faster one; else the gap is known.

    Args:
        finalists: Every feasible layout.
        fastest: The fastest layout that is known, where there is one.
        max_passes: Stop when all runs together have made so many passes.
        tell: Is told how many points are known.
    """
    runs, index, found = finalists.runs, fastest, 0
    while index is not None:
        found += 1
        tell("finding points of the frontier", found, 0)
        limit_bytes = int(runs.device_bytes[index] * (1 - STEP_FRACTION))
        proof = finalists.within(limit_bytes).fastest(1, max_passes)
        index = proof.indices[0] if proof.indices else None
    return tuple(_point(finalists, index) for index in _unbeaten(finalists, runs))


def _point(finalists: Finalists, index: int) -> FrontierPoint:
    """Return simulated layout *index* as a point, with what bounds say within its memory."""
    runs, step_ps = finalists.runs, finalists.runs.step_ps[index]
    within = finalists.within(int(runs.device_bytes[index])).indices
    left = within[~np.isin(within, [*runs.step_ps])]
    least_ps = int(finalists.bounds.bounds_ps[left].min(initial=step_ps))
    return FrontierPoint(
        plan=runs.space.plan(index),
        step_ps=step_ps,
        device_bytes=int(runs.device_bytes[index]),
        proven=least_ps >= step_ps,
        bound_gap_fraction=1 - least_ps / step_ps,
    )


def num_below(finalists: Finalists, frontier: tuple[FrontierPoint, ...]) -> int:
    """Return how many layouts are below the least level of memory that a *frontier* came to."""
    if not frontier:
        return 0
    limit_bytes = int(frontier[0].device_bytes * (1 - STEP_FRACTION))
    return len(finalists.within(limit_bytes).indices)


def _unbeaten(finalists: Finalists, runs: Runs) -> list[int]:
    """Return the simulated layouts that no other one beats, by bytes."""
    feasible = set(finalists.indices.tolist())
    by_memory = sorted(
        (index for index in runs.step_ps if index in feasible),
        key=lambda index: (int(runs.device_bytes[index]), runs.step_ps[index], index),
    )
    kept: list[int] = []
    for index in by_memory:
        if not kept or runs.step_ps[index] < runs.step_ps[kept[-1]]:
            kept.append(index)
    return kept
