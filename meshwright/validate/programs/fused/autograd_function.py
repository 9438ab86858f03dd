"""Typed autograd functions, and a choice among kernels."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# torch adds to it what backward finds there.
Context = Any


class AutogradFunction(torch.autograd.Function):
    """A function with a hand-written backward pass."""

    @classmethod
    def apply(cls, *args: object) -> Any:  # noqa: ANN401 - what forward returns
        """Run forward, and remember how to run backward."""
        return super().apply(*args)  # type: ignore[no-untyped-call] # untyped in torch


def first_that_works(candidates: Sequence[T], is_right: Callable[[T], bool]) -> T:
    """Return the first of *candidates* that gives what it must; the last one is taken untried.

    Kernels for GPUs differ between releases of PyTorch; one that a release lacks, refuses or has
    wrong is passed over.

    Args:
        candidates: The best first.
        is_right: Tries one on small numbers.

    >>> first_that_works([lambda: 1 / 0, lambda: 3, lambda: 4], lambda way: way() == 4)()
    4
    """
    for candidate in candidates[:-1]:
        try:
            if is_right(candidate):
                return candidate
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
            continue
    return candidates[-1]
