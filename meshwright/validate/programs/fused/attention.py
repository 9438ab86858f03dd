"""FlashAttention as an operator: it keeps its inputs, its output and one number a row."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.validate.device import SavedAttention, attention_backward, attention_forward
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


class Scores(NamedTuple):
    """Mask and softcap of attention scores.

    Args:
        causal: Whether tokens see only those before them.
        window: Of these a token sees itself and ``window - 1`` before it; all where it is 0.  Of
            more keys than queries the last ones are theirs.
        softcap: No score is beyond it; 0 bounds none.
    """

    causal: bool
    window: int = 0
    softcap: float = 0.0


@torch.library.custom_op("meshwright::flash_attention", mutates_args=())
def flash_attention(
    given: list[Tensor], seq_dim: int, *, causal: bool, window: int = 0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the attention output, laid out as the query, and the log-sum-exp of the scores.

    Args:
        given: Query, ``[tokens, batch, heads, width]``, or batch first, of any strides; key and
            value, with as many heads or a divisor of them; and perhaps sinks, for each head a score
            of each row that no value belongs to.
        seq_dim: Dim of tokens, 0 or 1.
        causal: As in `Scores`.
        window: As there.
        softcap: As there.
    """
    query, key, value = (_to_heads_first(each, seq_dim) for each in given[:3])
    out, log_sum_exp = attention_forward(
        query, key, value, causal=causal, window=window, softcap=softcap
    )
    for sinks in given[3:]:
        # A sink is one more score in the softmax's sum, without a value.
        total = torch.logaddexp(log_sum_exp, sinks.float().unsqueeze(-1))
        out = (out * torch.exp(log_sum_exp - total).unsqueeze(-1)).to(out.dtype)
        log_sum_exp = total
    return _from_heads_first(out, seq_dim), log_sum_exp.contiguous()


@flash_attention.register_fake
def _(given: list[Tensor], seq_dim: int, **_: float) -> tuple[Tensor, Tensor]:
    query, value = given[0], given[2]
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
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        gradient: Of the output.
        saved: Query, key, value, output and log-sum-exp of the forward pass.
        seq_dim: As in `flash_attention`.
        causal: As in `flash_attention`.
        window: As there.
        softcap: As there.
    """
    query, key, value, out = (_to_heads_first(each, seq_dim) for each in saved[:4])
    attended = SavedAttention(query, key, value, out, saved[4])
    incoming = _to_heads_first(gradient, seq_dim)
    gradients = attention_backward(
        incoming, attended, causal=causal, window=window, softcap=softcap
    )
    first, second, third = (
        _from_heads_first(each, seq_dim).to(gradient.dtype) for each in gradients
    )
    return first, second, third


@flash_attention_backward.register_fake
def _(
    _gradient: Tensor, saved: list[Tensor], _seq_dim: int, **_: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (each.new_empty(each.shape) for each in saved[:3])
    return query, key, value


@torch.library.custom_op("meshwright::sinks_backward", mutates_args=())
def sinks_backward(
    gradient: Tensor, out: Tensor, log_sum_exp: Tensor, sinks: Tensor, seq_dim: int
) -> Tensor:
    """Return the gradient of sinks, from that of the output."""
    # Softmax backward of a score whose value is 0: -p * sum(gradient * out).
    totals = (gradient.float() * out.float()).sum(-1, keepdim=True)
    shares = torch.exp(sinks.float().unsqueeze(-1) - log_sum_exp)
    of_rows = shares * _to_heads_first(totals, seq_dim).squeeze(-1)
    return -of_rows.sum((0, 2)).to(sinks.dtype)


@sinks_backward.register_fake
def _(
    _gradient: Tensor, _out: Tensor, _log_sum_exp: Tensor, sinks: Tensor, _seq_dim: int
) -> Tensor:
    return torch.empty_like(sinks)


@register_flop_formula(torch.ops.meshwright.flash_attention)
def _flash_flops(
    given: list[tuple[int, ...]], seq_dim: int, *_: object, window: int = 0, **__: object
) -> int:
    """Count two matrix products over the full square, as PyTorch counts attention.

    That is twice what a causal mask leaves, and with a window twice what both leave but for the
    diagonal, as predicted FLOPs have it.
    """
    query, key, value = given[:3]
    return 2 * _num_scores(query, key, seq_dim, window) * (query[3] + value[3])


def _num_scores(query: tuple[int, ...], key: tuple[int, ...], seq_dim: int, window: int) -> int:
    """Return the number of scores of all heads."""
    num_queries, num_keys = query[seq_dim], key[seq_dim]
    start, scores = num_keys - num_queries, num_queries * num_keys
    # Even the first query has a full window of keys.
    if window and 0 < start >= window - 1:
        scores = 2 * num_queries * window
    elif window:
        scores = num_keys**2 - start**2 - max(num_keys - window, 0) ** 2
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
    """Count five products: the scores again, and four gradients; two are as wide as values."""
    query, key, value = saved[:3]
    return 2 * _num_scores(query, key, seq_dim, window) * (3 * query[3] + 2 * value[3])


class FusedAttention(AutogradFunction):
    """Attention that keeps its inputs, its output and the log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Context, seq_dim: int, scores: Scores, *given: Tensor) -> Tensor:
        """Return the output for what `flash_attention` is *given*, laid out as the query."""
        out, log_sum_exp = flash_attention(list(given), seq_dim, **scores._asdict())
        ctx.save_for_backward(*given[:3], out, log_sum_exp, *given[3:])
        ctx.seq_dim, ctx.scores = seq_dim, scores
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all that was given."""
        saved, seq_dim = list(ctx.saved_tensors), ctx.seq_dim
        gradient = gradient.contiguous()
        of_sinks = [sinks_backward(gradient, *saved[3:5], each, seq_dim) for each in saved[5:]]
        gradients = flash_attention_backward(gradient, saved[:5], seq_dim, **ctx.scores._asdict())
        return (None, None, *gradients, *of_sinks)
