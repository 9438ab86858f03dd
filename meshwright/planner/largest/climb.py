"""Bisection for the last of a row of values of which all before it fit."""

from collections.abc import Callable
from math import isqrt

# Factor beyond which bisection halves the ratio of values, not their difference.
FAR_APART = 4


def last_that_fits(first: int, last: int, step: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ``first, first + step, ... last`` that fits, None without one.

    *fits* must hold for all values up to some one and for none behind it. The first value is tried
    first, so that no other is tried if it does not fit.

    >>> last_that_fits(8, 10**8, 8, lambda value: value <= 1003)
    1000
    """
    if first > last or not fits(first):
        return None
    fitting, failing = first, first + ((last - first) // step + 1) * step
    while failing - fitting > step:
        is_far = failing > FAR_APART * fitting
        middle = isqrt(fitting * failing) if is_far else (fitting + failing) // 2
        num_steps = (middle - first) // step
        # Strictly between both, or bisection would not end.
        middle = min(max(first + num_steps * step, fitting + step), failing - step)
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting
