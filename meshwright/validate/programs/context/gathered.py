"""Attention to keys and values that are gathered from all ranks, and gathered again for backward.

The calls are those of Transformer Engine 2 (pytorch/attention/dot_product_attention/
context_parallel.py, AttnFuncWithCPAndKVAllGather): gradients are summed where the tokens came from.
Its kernel aligns a mask with the last key; here a rank's early and late queries attend to the
tokens before them, which nothing masks, and to their own.  Tensors are ``[tokens, batch, heads,
width]``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshwright.validate.programs.context.group import ContextGroup, all_gather, reduce_scatter
from meshwright.validate.programs.context.ring import put_together
from meshwright.validate.programs.fused import (
    AutogradFunction,
    Context,
    flash_attention,
    flash_attention_backward,
)


class _GatheredAttention(AutogradFunction):
    """Attention of a rank's queries to all tokens; keeps its own keys and values alone."""

    @staticmethod
    def forward(
        ctx: Context, query: Tensor, key: Tensor, value: Tensor, cp: ContextGroup
    ) -> Tensor:
        key, value = key.contiguous(), value.contiguous()  # else a part of a product keeps it
        keys, values = (_all_tokens(each, cp) for each in (key, value))
        found = []
        for rows in _halves(query, cp):
            own = query[rows]
            calls = [
                (slice(None), *flash_attention(own, keys[seen], values[seen], 0, causal=causal))
                for seen, causal in _seen(rows, cp)
            ]
            found.append(put_together(own, calls))
        outs, numbers = zip(*found, strict=True)
        out, log_sum_exp = torch.cat(outs), torch.cat(numbers, dim=-1)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.cp = cp
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum_exp = ctx.saved_tensors
        cp: ContextGroup = ctx.cp
        gradient, of_query = gradient.contiguous(), torch.zeros_like(query)
        keys, values = (_all_tokens(each, cp) for each in (key, value))
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _halves(query, cp):
            numbers = log_sum_exp[..., rows].contiguous()
            for seen, causal in _seen(rows, cp):
                saved = [query[rows], keys[seen], values[seen], out[rows], numbers]
                slopes = flash_attention_backward(gradient[rows], saved, 0, causal=causal)
                of_query[rows] += slopes[0]
                of_keys[seen] += slopes[1]
                of_values[seen] += slopes[2]
                del saved, slopes  # as large as all tokens, and so are those of the next call
        del keys, values
        return of_query, _summed(of_keys, cp), _summed(of_values, cp), None


def _halves(query: Tensor, cp: ContextGroup) -> Iterator[slice]:
    """Yield the early and the late half of a rank's rows."""
    half = len(query) // len(cp.starts)
    yield from (slice(number * half, (number + 1) * half) for number in range(len(cp.starts)))


def _seen(rows: slice, cp: ContextGroup) -> Iterator[tuple[slice, bool]]:
    """Yield the tokens that some rows attend to, and whether a mask hides later ones."""
    half = rows.stop - rows.start
    first = cp.starts[rows.start // half]
    yield slice(first, first + half), True
    if first:
        yield slice(first), False


def _all_tokens(own: Tensor, cp: ContextGroup) -> Tensor:
    """Gather the tokens of all ranks and put them in order."""
    arrived = own.new_empty((cp.size * len(own), *own.shape[1:]))
    all_gather(arrived, own, cp.group)
    early, late = arrived.unflatten(0, (cp.size, -1)).chunk(2, dim=1)
    return torch.cat([early.flatten(0, 1), late.flip(0).flatten(0, 1)])


def _summed(whole: Tensor, cp: ContextGroup) -> Tensor:
    """Sum gradients of all tokens over the ranks, each its own tokens."""
    early, late = (half.unflatten(0, (cp.size, -1)) for half in whole.chunk(2))
    parts = torch.cat([early, late.flip(0)], dim=1)
    return reduce_scatter(torch.empty_like(parts[0]), parts.flatten(0, 1), cp.group)


class GatheredCore(nn.Module):
    """Causal attention of a rank's tokens to those of all ranks."""

    def __init__(self, cp: ContextGroup) -> None:
        super().__init__()
        self.cp = cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the rank's tokens to all."""
        out: Tensor = _GatheredAttention.apply(query, key, value, self.cp)
        return out
