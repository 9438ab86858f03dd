"""All-gather context parallelism: keys and values are gathered, and again for backward.

The calls are those of Transformer Engine 2 (pytorch/attention/dot_product_attention/
context_parallel.py, AttnFuncWithCPAndKVAllGather): gradients are summed where the tokens came from.
Its kernel aligns a mask with the last key; here a rank's early and late queries attend to the
tokens before them, which nothing masks, and to their own, or to a window of both.  Tensors are
``[tokens, batch, heads, width]``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshwright.validate.programs.context.group import ContextGroup, all_gather, reduce_scatter
from meshwright.validate.programs.context.ring import put_together
from meshwright.validate.programs.fused import (
    AutogradFunction,
    Context,
    Scores,
    flash_attention,
    flash_attention_backward,
)


class _GatheredAttention(AutogradFunction):
    """Attention of a rank's queries to all tokens; saves only its own keys and values."""

    @staticmethod
    def forward(
        ctx: Context, query: Tensor, key: Tensor, value: Tensor, cp: ContextGroup, window: int
    ) -> Tensor:
        key, value = key.contiguous(), value.contiguous()  # a view would keep the fused QKV output
        keys, values = _all_tokens((key, value), cp)
        outputs = []
        for rows in _halves(query, cp):
            queries = query[rows]
            calls = []
            for seen, masks in _seen(rows, cp, window):
                given = [queries, keys[seen], values[seen]]
                calls.append((slice(None), *flash_attention(given, 0, **masks._asdict())))
            outputs.append(put_together(calls) if len(calls) > 1 else calls[0][1:])
        outs, numbers = zip(*outputs, strict=True)
        out, log_sum_exp = torch.cat(outs), torch.cat(numbers, dim=-1)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.cp, ctx.window = cp, window
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum_exp = ctx.saved_tensors
        cp: ContextGroup = ctx.cp
        gradient, query_gradient = gradient.contiguous(), torch.zeros_like(query)
        keys, values = _all_tokens((key, value), cp)
        key_gradients, value_gradients = torch.zeros_like(keys), torch.zeros_like(values)
        parts: list[Tensor] = []  # all live until the end, one gradient of each half of the queries
        for rows in _halves(query, cp):
            numbers = log_sum_exp[..., rows].contiguous()
            for seen, masks in _seen(rows, cp, ctx.window):
                saved = [query[rows], keys[seen], values[seen], out[rows], numbers]
                gradients = flash_attention_backward(gradient[rows], saved, 0, **masks._asdict())
                query_gradient[rows] += gradients[0]
                key_gradients[seen] += gradients[1]
                value_gradients[seen] += gradients[2]
                parts += gradients[0 if masks.causal else 1 :]
                del gradients
        key_gradients = _reordered(key_gradients, _by_rank(cp.size))
        value_gradients = _reordered(value_gradients, _by_rank(cp.size))
        return query_gradient, _summed(key_gradients, cp), _summed(value_gradients, cp), None, None


def _halves(query: Tensor, cp: ContextGroup) -> Iterator[slice]:
    """Yield the early and the late half of a rank's tokens."""
    half = len(query) // len(cp.starts)
    yield from (slice(number * half, (number + 1) * half) for number in range(len(cp.starts)))


def _seen(rows: slice, cp: ContextGroup, window: int) -> Iterator[tuple[slice, Scores]]:
    """Yield the tokens that some queries attend to, and the mask of each."""
    half = rows.stop - rows.start
    first = cp.starts[rows.start // half]
    if window:
        yield slice(max(first - window + 1, 0), first + half), Scores(causal=True, window=window)
        return
    yield slice(first, first + half), Scores(causal=True)
    if first:
        yield slice(first), Scores(causal=False)


def _all_tokens(given: tuple[Tensor, Tensor], cp: ContextGroup) -> list[Tensor]:
    """Gather the tokens of all ranks and put them in order."""
    whole_tensors = [
        all_gather(local.new_empty((cp.size * len(local), *local.shape[1:])), local, cp.group)
        for local in given
    ]
    places = _by_rank(cp.size)
    order = sorted(range(len(places)), key=places.__getitem__)
    for number, each in enumerate(whole_tensors):
        whole_tensors[number] = _reordered(each, order)
    return whole_tensors


def _by_rank(size: int) -> list[int]:
    """Return the parts of a sequence by rank, an early and a late one each.

    >>> _by_rank(2)
    [0, 3, 1, 2]
    """
    return [part for rank in range(size) for part in (rank, 2 * size - 1 - rank)]


def _reordered(whole: Tensor, order: list[int]) -> Tensor:
    """Return a copy of *whole* with as many parts as *order* has in that order."""
    parts = whole.unflatten(0, (len(order), -1))
    return parts.index_select(0, torch.tensor(order, device=whole.device)).flatten(0, 1)


def _summed(whole: Tensor, cp: ContextGroup) -> Tensor:
    """Sum gradients of all tokens over the ranks, each its own tokens."""
    local = whole.new_empty((len(whole) // cp.size, *whole.shape[1:]))
    return reduce_scatter(local, whole, cp.group)


class AllGatherAttention(nn.Module):
    """Causal attention of a rank's tokens to those of all ranks, or to a *window*; 0 is none."""

    def __init__(self, cp: ContextGroup, window: int = 0) -> None:
        super().__init__()
        self.cp, self.window = cp, window if window < cp.num_tokens else 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the rank's tokens to all."""
        out: Tensor = _GatheredAttention.apply(query, key, value, self.cp, self.window)
        return out
