"""FlashAttention as an operator: it keeps its inputs, its output and one number a row."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.validate.device import Attended, attention_backward, attention_forward
from meshwright.validate.programs.fused.autograd_function import AutogradFunction, Context


def _to_heads_first(tensor: Tensor, seq_dim: int) -> Tensor:
    """Return ``[batch, heads, tokens, width]`` of a tensor whose tokens are dim 0 or 1."""
    return tensor.permute(1, 2, 0, 3) if seq_dim == 0 else tensor.transpose(1, 2)


def _from_heads_first(tensor: Tensor, seq_dim: int) -> Tensor:
    permuted = tensor.permute(2, 0, 1, 3) if seq_dim == 0 else tensor.transpose(1, 2)
    return permuted.contiguous()


def _log_sum_exp_like(query: Tensor, seq_dim: int) -> Tensor:
    batch, heads, tokens = query.shape[1 - seq_dim], query.shape[2], query.shape[seq_dim]
    return query.new_empty((batch, heads, tokens), dtype=torch.float32)


@torch.library.custom_op("meshwright::flash_attention", mutates_args=())
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, seq_dim: int, *, causal: bool, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the attention output, laid out as *query*, and the log-sum-exp of the scores.

    Args:
        query: ``[tokens, batch, heads, width]``, or batch first; any strides.
        key: As *query*, with as many heads or a divisor of them.
        value: As *key*.
        seq_dim: Which dim counts tokens, 0 or 1.
        causal: Whether tokens see only those before them.
        window: Of these a token sees itself and ``window - 1`` before it; all where it is 0.
    """
    q, k, v = (_to_heads_first(each, seq_dim) for each in (query, key, value))
    out, log_sum_exp = attention_forward(q, k, v, causal=causal, window=window)
    return _from_heads_first(out, seq_dim), log_sum_exp.contiguous()


@flash_attention.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, seq_dim: int, **_: int) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, _log_sum_exp_like(query, seq_dim)


@torch.library.custom_op("meshwright::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    gradient: Tensor,
    saved: list[Tensor],
    seq_dim: int,
    *,
    causal: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        gradient: Of the output.
        saved: Query, key, value, output and log-sum-exp of the forward pass.
        seq_dim: As in `flash_attention`.
        causal: As in `flash_attention`.
        window: As there.
    """
    query, key, value, out = (_to_heads_first(each, seq_dim) for each in saved[:4])
    attended = Attended(query, key, value, out, saved[4])
    incoming = _to_heads_first(gradient, seq_dim)
    gradients = attention_backward(incoming, attended, causal=causal, window=window)
    first, second, third = (
        _from_heads_first(each, seq_dim).to(gradient.dtype) for each in gradients
    )
    return first, second, third


@flash_attention_backward.register_fake
def _(
    _gradient: Tensor, saved: list[Tensor], _seq_dim: int, **_: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (each.new_empty(each.shape) for each in saved[:3])
    return query, key, value


@register_flop_formula(torch.ops.meshwright.flash_attention)
def _flash_flops(
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    seq_dim: int,
    *_: object,
    window: int = 0,
    **__: object,
) -> int:
    """Two products over the full square, as PyTorch counts attention.

    That is twice what a causal mask leaves, and with a window twice what both leave but for the
    diagonal, as predicted FLOPs have it.
    """
    return 2 * _scores(query, key, seq_dim, window) * (query[3] + value[3])


def _scores(query: tuple[int, ...], key: tuple[int, ...], seq_dim: int, window: int) -> int:
    """Return how many there are of all heads."""
    rows, seen = query[seq_dim], key[seq_dim]
    scores = rows * seen
    if 0 < window < seen:
        scores = window * (2 * rows - window)
    return query[1 - seq_dim] * query[2] * scores


@register_flop_formula(torch.ops.meshwright.flash_attention_backward)
def _flash_backward_flops(
    _gradient: tuple[int, ...],
    saved: list[tuple[int, ...]],
    seq_dim: int,
    *_: object,
    window: int = 0,
    **__: object,
) -> int:
    """Five products: the scores again, and four gradients; two are as wide as values."""
    query, key, value = saved[:3]
    return 2 * _scores(query, key, seq_dim, window) * (3 * query[3] + 2 * value[3])


def _attended(
    ctx: Context,
    given: tuple[Tensor, Tensor, Tensor],
    seq_dim: int,
    *,
    causal: bool,
    window: int = 0,
) -> Tensor:
    out, log_sum_exp = flash_attention(*given, seq_dim, causal=causal, window=window)
    ctx.save_for_backward(*given, out, log_sum_exp)
    ctx.seq_dim, ctx.causal, ctx.window = seq_dim, causal, window
    return out


class FusedAttention(AutogradFunction):
    """Attention that keeps its inputs, its output and one number a row of scores."""

    @staticmethod
    def forward(
        ctx: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seq_dim: int,
        causal: bool,  # noqa: FBT001 - autograd passes positions only
    ) -> Tensor:
        """Return the output, laid out as *query*."""
        return _attended(ctx, (query, key, value), seq_dim, causal=causal)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        saved = list(ctx.saved_tensors)
        gradients = flash_attention_backward(
            gradient.contiguous(), saved, ctx.seq_dim, causal=ctx.causal, window=ctx.window
        )
        return (*gradients, None, None)


class WindowedAttention(FusedAttention):
    """Causal attention to a window of tokens; keeps the same."""

    @staticmethod
    def forward(
        ctx: Context, query: Tensor, key: Tensor, value: Tensor, seq_dim: int, window: int
    ) -> Tensor:
        """Return the output, laid out as *query*."""
        return _attended(ctx, (query, key, value), seq_dim, causal=True, window=window)
