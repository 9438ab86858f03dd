"""The first of several ways to compute something that this PyTorch has, and that is right."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def first_that_works(ways: Sequence[T], is_right: Callable[[T], bool]) -> T:
    """Return the first of *ways* that gives what it must; the last one is taken untried.

    Kernels for GPUs differ between releases of PyTorch; one that a release lacks, refuses or has
    wrong is passed over.

    Args:
        ways: The best first.
        is_right: Tries one on small numbers.

    >>> first_that_works([lambda: 1 / 0, lambda: 3, lambda: 4], lambda way: way() == 4)()
    4
    """
    for way in ways[:-1]:
        try:
            if is_right(way):
                return way
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
            continue
    return ways[-1]
