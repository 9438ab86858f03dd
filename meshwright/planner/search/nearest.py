"""When nothing fits: the layout that misses by least, and what would help."""

from dataclasses import replace

import numpy as np

from meshwright.planner.changes import cheapest_changes
from meshwright.planner.search.finalists import Field, Progress
from meshwright.planner.search.result import Nearest
from meshwright.planner.space import Candidates, Column, apply_rules
from meshwright.simulator.layout import Axis

# So many layouts, those that need least by the least that is known, are sized first.
FIRST_SIZED = 1000


def find_nearest(
    candidates: Candidates, field: Field, limit_bytes: int, progress: Progress | None = None
) -> Nearest | None:
    """Return the layout that needs the least memory of those only memory rules out.

    One whose tensor parallelism crosses nodes is named only where all do.

    Returns:
        None where there is no such layout.
    """
    left, _ = apply_rules(replace(candidates, device_bytes=np.zeros_like(candidates.device_bytes)))
    indices = np.flatnonzero(left)
    if not len(indices):
        return None
    is_inside = candidates.space.column(Axis.TP)[indices] <= candidates.cluster.devices_per_node
    indices = indices[is_inside] if is_inside.any() else indices
    indices, needed = _least_needed(field, indices)
    place = int(np.argmin(needed))
    index, limit, runs = int(indices[place]), candidates.memory_limit_bytes, field.runs
    is_too_long = runs.is_too_long(index)
    return Nearest(
        plan=candidates.space.plan(index),
        lacks_bytes=int(needed[place]) - limit_bytes,
        changes=() if is_too_long else cheapest_changes(runs.result(index, limit), limit, progress),
    )


def _least_needed(field: Field, indices: Column) -> tuple[Column, Column]:
    """Return those of *indices* that may need least, and the exact memory of each.

    What is known of others is too much already.
    """
    known = field.runs.device_bytes[indices]
    if field.needed_bytes is None:
        return indices, known
    count = min(FIRST_SIZED, len(indices))
    first = indices[np.argpartition(known, count - 1)[:count]]
    indices = indices[known <= field.needed_bytes(first).min()]
    return indices, field.needed_bytes(indices)
