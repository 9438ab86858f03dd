"""The least time for the memory that is given: what a smaller memory limit would cost."""

from meshwright.planner.search.finalists import Finalists, Progress, Runs
from meshwright.planner.search.result import FrontierPoint

# Each point of the frontier needs this share less memory than the one before it.
STEP_FRACTION = 0.05


def find_frontier(
    finalists: Finalists, fastest: int | None, *, max_passes: int, tell: Progress
) -> tuple[FrontierPoint, ...]:
    """Return the frontier of memory against time, by bytes.

    The fastest layout that needs at most some memory is found as the fastest of all is: by
    bounds; it is proven when no other layout within that memory can be faster.  What was
    simulated besides and is beaten by none is on the frontier, too, but not proven.

    Args:
        finalists: Every feasible layout.
        fastest: The proven fastest layout, where there is one.
        max_passes: Stop when all runs together have made so many passes.
        tell: Is told how many points are known.
    """
    runs = finalists.runs
    proven: set[int] = set()
    index = fastest
    while index is not None and index not in proven:
        proven.add(index)
        tell("finding points of the frontier", len(proven), 0)
        limit_bytes = int(runs.device_bytes[index] * (1 - STEP_FRACTION))
        proof = finalists.within(limit_bytes).fastest(1, max_passes)
        index = proof.indices[0] if proof.is_proven else None
    return tuple(
        FrontierPoint(
            plan=runs.space.plan(index),
            step_ps=runs.step_ps[index],
            device_bytes=int(runs.device_bytes[index]),
            proven=index in proven,
        )
        for index in _unbeaten(finalists, runs)
    )


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
