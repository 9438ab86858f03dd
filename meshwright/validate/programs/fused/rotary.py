"""Rotary position embedding (RoPE) in one kernel."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from meshwright.validate.programs.fused.autograd_function import AutogradFunction, Context

# YaRN's factor of attention for 32 times as many tokens as before, 1 + 0.1 log 32: gpt-oss.
ANGLE_FACTOR = 1.3465735902799727


def _cos_sin(
    tokens: int, starts: tuple[int, ...], half: int, base: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position, cached as a model caches them."""
    frequency = base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angle = positions(tokens, starts, device).float()[:, None] * frequency
    return angle.cos(), angle.sin()


_cached_cos_sin = lru_cache(maxsize=4)(_cos_sin)


def positions(tokens: int, starts: Sequence[int], device: torch.device) -> Tensor:
    """Return the positions of *tokens* that lie in equal parts, one from each of *starts* on."""
    part = tokens // len(starts)
    parts = [torch.arange(start, start + part, device=device) for start in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def apply_rope_unfused(
    values: Tensor, seq_dim: int, base: float, starts: Sequence[int], width: int
) -> Tensor:
    """Return heads with RoPE times `ANGLE_FACTOR`, by operators as Megatron-Core has them.

    What is not rotated is concatenated, also where that is nothing (core 0.15 to 0.19,
    models/common/embeddings/rope_utils.py).
    """
    tokens = values.shape[seq_dim]
    shape = (tokens, 1, 1, width) if seq_dim == 0 else (1, tokens, 1, width)
    cosine, sine = (
        (torch.cat((each, each), dim=-1) * ANGLE_FACTOR).to(values.dtype).view(shape)
        for each in _cos_sin(tokens, tuple(starts), width // 2, base, values.device)
    )
    part, rest = values[..., :width], values[..., width:]
    part = part * cosine + _rotate_half(part) * sine
    return torch.cat((part, rest), dim=-1)


def _rotate_half(values: Tensor) -> Tensor:
    """Return the second half of each head, negated, with the first behind it (rotate_half)."""
    first, second = values.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@torch.library.custom_op("meshwright::rotate", mutates_args=())
def rotate(
    values: Tensor, seq_dim: int, base: float, starts: Sequence[int], width: int, *, inverse: bool
) -> Tensor:
    """Return ``[.., .., heads, head width]`` rotated by angles that grow along dim *seq_dim*.

    Its tokens are equal parts of a sequence, one from each of *starts* on. Of each head the first
    *width* numbers are rotated.
    """
    tokens, half = values.shape[seq_dim], width // 2
    shape = (tokens, 1, 1, half) if seq_dim == 0 else (1, tokens, 1, half)
    cosine, sine = (
        each.view(shape)
        for each in _cached_cos_sin(tokens, tuple(starts), half, base, values.device)
    )
    return _rotated(values, cosine, sine, width, inverse=inverse)


@torch.library.custom_op("meshwright::rotate_by_table", mutates_args=())
def apply_rope_cached(values: Tensor, table: Tensor, *, inverse: bool) -> Tensor:
    """Return ``[batch, tokens, heads, head width]`` rotated by an `rope_cache`."""
    width = values.shape[-1]
    cosine, sine = (each[:, None, : width // 2] for each in table.chunk(2, dim=-1))
    return _rotated(values, cosine, sine, width, inverse=inverse)


def rope_cache(
    tokens: int, starts: Sequence[int], width: int, base: float, device: torch.device
) -> Tensor:
    """Return the RoPE cos/sin cache, ``[tokens, 2 * width]`` in fp32."""
    functions = _cos_sin(tokens, tuple(starts), width // 2, base, device)
    return torch.cat([each for each in functions for _ in range(2)], dim=-1)


def _rotated(values: Tensor, cosine: Tensor, sine: Tensor, width: int, *, inverse: bool) -> Tensor:
    sign = -1 if inverse else 1
    rotated = values.new_empty(values.shape)
    # Partial RoPE: the rest of a head stays as it is.
    rotated[..., width:] = values[..., width:]
    first, second = values[..., :width].chunk(2, dim=-1)
    rotated_first, rotated_second = rotated[..., :width].chunk(2, dim=-1)
    # Into halves of the output: one kernel, without temporaries.
    torch.mul(first, cosine, out=rotated_first).addcmul_(second, sine, value=-sign)
    torch.mul(second, cosine, out=rotated_second).addcmul_(first, sine, value=sign)
    return rotated


@rotate.register_fake
@apply_rope_cached.register_fake
def _(values: Tensor, *_: object, **__: bool) -> Tensor:
    return values.new_empty(values.shape)


class Rotary(AutogradFunction):
    """RoPE in one kernel; keeps nothing."""

    @staticmethod
    def forward(
        ctx: Context, values: Tensor, seq_dim: int, base: float, starts: Sequence[int], width: int
    ) -> Tensor:
        """Return the rotated values."""
        ctx.where = seq_dim, base, starts, width
        return rotate(values, *ctx.where, inverse=False)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, rotated back."""
        rotated = rotate(gradient.contiguous(), *ctx.where, inverse=True)
        return rotated, None, None, None, None


class CachedRotary(AutogradFunction):
    """RoPE in one kernel; keeps the cos/sin cache that it reads."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, table: Tensor) -> Tensor:
        """Return the rotated values."""
        ctx.save_for_backward(table)
        return apply_rope_cached(values, table, inverse=False)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient, rotated back."""
        return apply_rope_cached(gradient.contiguous(), *ctx.saved_tensors, inverse=True), None
