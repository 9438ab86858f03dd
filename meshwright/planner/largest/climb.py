"""The last of a row of values of which all before the last fit, found by bisection."""

from collections.abc import Callable
from math import isqrt

# Farther apart than this, values are halved by their ratio.
FAR_APART = 4


def last_that_fits(first: int, last: int, step: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ``first, first + step, ... last`` that fits, None without one.

    *fits* must hold of all values up to some one and of none behind it.  The first value is asked
    for first, so that what does not fit there needs no look at others.

    >>> last_that_fits(8, 10**8, 8, lambda value: value <= 1003)
    1000
    """
    if first > last or not fits(first):
        return None
    good, bad = first, first + ((last - first) // step + 1) * step
    while bad - good > step:
        is_far = bad > FAR_APART * good
        middle = isqrt(good * bad) if is_far else (good + bad) // 2
        places = (middle - first) // step
        middle = min(max(first + places * step, good + step), bad - step)
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
