"""Rotary position embedding in one kernel."""

from functools import lru_cache

import torch
from torch import Tensor

from meshwright.validate.programs.fused.autograd_function import AutogradFunction, Context


@lru_cache(maxsize=4)
def _angle_functions(
    tokens: int, half: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, kept as a model keeps them."""
    frequency = base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = torch.arange(tokens, device=device, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


@torch.library.custom_op("meshwright::rotate", mutates_args=())
def rotate(values: Tensor, seq_dim: int, base: float, *, inverse: bool) -> Tensor:
    """Return ``[.., .., heads, width]`` turned by angles that grow along dim *seq_dim*."""
    tokens, half = values.shape[seq_dim], values.shape[-1] // 2
    shape = (tokens, 1, 1, half) if seq_dim == 0 else (1, tokens, 1, half)
    cosine, sine = (
        each.view(shape) for each in _angle_functions(tokens, half, base, values.device)
    )
    way = -1 if inverse else 1
    turned = values.new_empty(values.shape)
    first, second = values.chunk(2, dim=-1)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    torch.mul(first, cosine, out=turned_first).addcmul_(second, sine, value=-way)
    torch.mul(second, cosine, out=turned_second).addcmul_(first, sine, value=way)
    return turned


@rotate.register_fake
def _(values: Tensor, _seq_dim: int, _base: float, **_: bool) -> Tensor:
    return values.new_empty(values.shape)


class Rotary(AutogradFunction):
    """Rotary position embedding in one kernel; keeps nothing."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, seq_dim: int, base: float) -> Tensor:
        """Return the turned values."""
        ctx.seq_dim, ctx.base = seq_dim, base
        return rotate(values, seq_dim, base, inverse=False)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, turned back."""
        return rotate(gradient.contiguous(), ctx.seq_dim, ctx.base, inverse=True), None, None
