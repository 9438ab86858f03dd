"""Frontier of memory against time: the least time within each memory limit."""

import numpy as np

from meshwright.planner.search.finalists import Finalists, Progress, Runs
from meshwright.planner.search.result import FrontierPoint

# Each point of the frontier needs this share less memory than the one before it.
STEP_FRACTION = 0.05


def find_frontier(
    finalists: Finalists, fastest: int | None, *, max_passes: int, tell: Progress
) -> tuple[FrontierPoint, ...]:
    """Return the Pareto frontier of memory against time, by bytes.

    The fastest layout within some memory is found as the fastest of all is: by bounds, level by
    level down to the least memory of all. Other simulated layouts that none beats are on the
    frontier, too. A point is proven where no bound of a layout within its memory leaves room for a
    faster one; else the gap is known.

    Args:
        finalists: Every feasible layout.
        fastest: Fastest known layout, if there is one.
        max_passes: Stop when all runs together have made so many passes.
        tell: Called with the number of known points.
    """
    runs, index, num_points = finalists.runs, fastest, 0
    while index is not None:
        num_points += 1
        tell("finding points of the frontier", num_points, 0)
        # Levels in steps: each point costs a search of its own.
        limit_bytes = int(runs.device_bytes[index] * (1 - STEP_FRACTION))
        proof = finalists.within(limit_bytes).fastest(1, max_passes)
        index = proof.indices[0] if proof.indices else None
    return tuple(_point(finalists, index) for index in _pareto_optimal(finalists, runs))


def _point(finalists: Finalists, index: int) -> FrontierPoint:
    """Return simulated layout *index* as a point, with the bounds within its memory."""
    runs, step_ps = finalists.runs, finalists.runs.step_ps[index]
    within = finalists.within(int(runs.device_bytes[index])).indices
    unsimulated = within[~np.isin(within, [*runs.step_ps])]
    least_ps = int(finalists.bounds.bounds_ps[unsimulated].min(initial=step_ps))
    return FrontierPoint(
        plan=runs.space.plan(index),
        step_ps=step_ps,
        device_bytes=int(runs.device_bytes[index]),
        proven=least_ps >= step_ps,
        bound_gap_fraction=1 - least_ps / step_ps,
    )


def num_below(finalists: Finalists, frontier: tuple[FrontierPoint, ...]) -> int:
    """Return the number of layouts below the least level of memory that a *frontier* reached."""
    if not frontier:
        return 0
    limit_bytes = int(frontier[0].device_bytes * (1 - STEP_FRACTION))
    return len(finalists.within(limit_bytes).indices)


def _pareto_optimal(finalists: Finalists, runs: Runs) -> list[int]:
    """Return the Pareto-optimal simulated layouts, by bytes."""
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
