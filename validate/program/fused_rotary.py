"""Rotary position embedding in one kernel."""

import torch
from torch import Tensor

from validate.program.autograd_function import AutogradFunction, Context


@torch.library.custom_op("meshwright::rotate", mutates_args=())
def rotate(values: Tensor, seq_dim: int, base: float, *, inverse: bool) -> Tensor:
    """Return ``[.., .., heads, width]`` turned by angles that grow along dim *seq_dim*."""
    tokens, half = values.shape[seq_dim], values.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=values.device, dtype=torch.float32) / half)
    angle = torch.arange(tokens, device=values.device, dtype=torch.float32)[:, None] * frequency
    shape = (tokens, 1, 1, half) if seq_dim == 0 else (1, tokens, 1, half)
    cosine, sine = angle.cos().view(shape), angle.sin().view(shape)
    first, second = values.float().chunk(2, dim=-1)
    sine = -sine if inverse else sine
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(values.dtype)


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
