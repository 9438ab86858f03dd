"""When nothing fits: the layout that misses by least, and what would help."""

from dataclasses import replace

import numpy as np

from meshwright.planner.changes import cheapest_changes
from meshwright.planner.search.finalists import Progress, Runs
from meshwright.planner.search.result import Nearest
from meshwright.planner.space import Candidates, apply_rules


def find_nearest(
    candidates: Candidates, runs: Runs, limit_bytes: int, progress: Progress | None = None
) -> Nearest | None:
    """Return the layout that needs the least memory of those only memory rules out.

    Returns:
        None where there is no such layout.
    """
    left, _ = apply_rules(replace(candidates, device_bytes=np.zeros_like(candidates.device_bytes)))
    indices = np.flatnonzero(left)
    if not len(indices):
        return None
    index = int(indices[np.argmin(candidates.device_bytes[indices])])
    limit = candidates.memory_limit_bytes
    is_too_long = runs.is_too_long(index)
    return Nearest(
        plan=candidates.space.plan(index),
        lacks_bytes=int(candidates.device_bytes[index]) - limit_bytes,
        changes=() if is_too_long else cheapest_changes(runs.result(index, limit), limit, progress),
    )
