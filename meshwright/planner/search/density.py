"""The whole feasible space in small: how many layouts need so much memory and at least so long."""

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import Column

MEMORY_CELLS, TIME_CELLS = 64, 48  # at most: few layouts have larger cells
# Layouts slower than so many times the least bound are counted, not placed.
SLOWEST_RATIO = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Density:
    """Feasible layouts by memory of the fullest device and lower bound of the step's time.

    Args:
        memory_edges_bytes: Edges of cells, ascending; each holds its lower edge.
        time_edges_ps: The same of time.
        counts: Layouts in each cell: a row for each cell of time, in it one for each of memory.
        num_slower: Layouts whose bound lies beyond the last edge.
    """

    memory_edges_bytes: tuple[int, ...]
    time_edges_ps: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    num_slower: int


def layout_density(device_bytes: Column, bounds_ps: Column) -> Density | None:
    """Return the density of layouts with so much memory and such bounds; None of none.

    >>> found = layout_density(np.array([100, 800, 800]), np.array([10, 20, 999]))
    >>> sum(map(sum, found.counts)), found.num_slower
    (2, 1)
    """
    if not len(bounds_ps):
        return None
    least_ps = int(bounds_ps.min())
    is_placed = bounds_ps <= SLOWEST_RATIO * least_ps
    memory_bytes, times_ps = device_bytes[is_placed], bounds_ps[is_placed]
    most = 2 * isqrt(len(times_ps))
    memory_edges = _edges(memory_bytes, min(MEMORY_CELLS, most))
    time_edges = _edges(times_ps, min(TIME_CELLS, most))
    counts, _, _ = np.histogram2d(times_ps, memory_bytes, bins=(time_edges, memory_edges))
    return Density(
        memory_edges_bytes=tuple(memory_edges.tolist()),
        time_edges_ps=tuple(time_edges.tolist()),
        counts=tuple(tuple(map(int, row)) for row in counts),
        num_slower=len(bounds_ps) - len(times_ps),
    )


def _edges(values: Column, num_cells: int) -> NDArray[np.int64]:
    """Return edges in equal ratios around *values*, in whole numbers."""
    edges = np.geomspace(int(values.min()), int(values.max()) + 1, num_cells + 1).round()
    edges = edges.astype(np.int64)
    return np.asarray(edges[np.append(True, edges[1:] > edges[:-1])], np.int64)
