"""Minimum of a function of a few bounded numbers: the simplex of Nelder and Mead."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Point = NDArray[np.float64]
MAX_STEPS = 250
NUM_STARTS = 3
SPREAD = 0.25  # first simplex, as a share of the limits' distance
TOLERANCE = 1e-5


class Bound(NamedTuple):
    """Start and limits of a number."""

    start: float
    low: float
    high: float


def minimum(function: Callable[[Point], float], bounds: list[Bound]) -> Point:
    """Return the point where *function* is lowest, by the simplex method of Nelder and Mead (1965).

    It needs no derivatives: the cost model has steps, one for each wave of tiles.  The search
    starts again from where it ended, as a simplex may collapse before it is there.

    >>> bowl = lambda point: float((point[0] - 3) ** 2 + (point[1] + 1) ** 2)
    >>> minimum(bowl, [Bound(0, -5, 5), Bound(0, -5, 5)]).round(2).tolist()
    [3.0, -1.0]
    """
    low = np.array([bound.low for bound in bounds], dtype=np.float64)
    width = np.array([bound.high for bound in bounds], dtype=np.float64) - low
    best = (np.array([bound.start for bound in bounds], dtype=np.float64) - low) / width

    def inside(share: Point) -> float:
        return function(low + width * np.clip(share, 0.0, 1.0))

    for turn in range(NUM_STARTS):
        best = np.clip(_simplex(inside, best, SPREAD / 2**turn), 0.0, 1.0)
    return low + width * best


def _simplex(function: Callable[[Point], float], start: Point, spread: float) -> Point:
    corners = [start]
    for index in range(len(start)):
        corner = start.copy()
        corner[index] += spread if corner[index] + spread <= 1 else -spread
        corners.append(corner)
    values = [function(corner) for corner in corners]
    for _ in range(MAX_STEPS):
        order = sorted(range(len(corners)), key=values.__getitem__)
        corners, values = [corners[each] for each in order], [values[each] for each in order]
        if float(np.ptp(np.array(corners), axis=0).max()) < TOLERANCE:
            break
        corner, value = _moved(function, corners, values)
        if value < values[-1]:
            corners[-1], values[-1] = corner, value
            continue
        # Nothing better on the line through the centroid: shrink towards the best corner.
        corners = [corners[0], *((corner + corners[0]) / 2 for corner in corners[1:])]
        values = [values[0], *(function(corner) for corner in corners[1:])]
    return corners[int(np.argmin(values))]


def _moved(
    function: Callable[[Point], float], corners: list[Point], values: list[float]
) -> tuple[Point, float]:
    """Return the worst corner reflected in the others' centroid, expanded, or contracted."""
    centroid = np.mean(corners[:-1], axis=0)
    away = centroid - corners[-1]
    reflected = centroid + away
    value = function(reflected)
    if value < values[0]:
        expanded = centroid + 2 * away
        expanded_value = function(expanded)
        return (expanded, expanded_value) if expanded_value < value else (reflected, value)
    if value < values[-2]:
        return reflected, value
    contracted = centroid + (0.5 if value < values[-1] else -0.5) * away
    return contracted, function(contracted)
