"""The base of operators with a backward pass of their own, typed."""

from typing import Any

import torch

# torch adds to it what backward finds there.
Context = Any


class AutogradFunction(torch.autograd.Function):
    """A function with a hand-written backward pass."""

    @classmethod
    def apply(cls, *args: object) -> Any:  # noqa: ANN401 - what forward returns
        """Run forward, and remember how to run backward."""
        return super().apply(*args)  # type: ignore[no-untyped-call] # untyped in torch
