"""Ring attention: keys and values go around a ring of context-parallel ranks.

Liu et al. 2023 (arXiv 2310.01889) with the parts of a sequence laid out so that every rank has the
same work in each step; the messages are those of Transformer Engine 2
(pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVP2P).  Tensors are
``[tokens, batch, heads, width]``, keys and values one without dims, one behind the other: they may
differ in width.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.validate.programs.context.group import ContextGroup
from meshwright.validate.programs.fused import (
    AutogradFunction,
    Context,
    flash_attention,
    flash_attention_backward,
)


class _Step(NamedTuple):
    """Step of the ring: half of a rank's queries, or of another rank's keys, or all of both."""

    queries: slice
    keys: slice
    causal: bool

    @classmethod
    def of(cls, cp: ContextGroup, source: int) -> "_Step":
        """Return the step with the tokens of the rank *source*.

        Those of a rank ahead are early, and late ones that none of this rank's queries sees; those
        of a rank behind lie between this rank's early and late ones.
        """
        half = cp.num_tokens // (2 * cp.size)
        everything = slice(None)
        if source == cp.rank:
            return cls(everything, everything, causal=True)
        if source < cp.rank:
            return cls(everything, slice(half), causal=False)
        return cls(slice(half, None), everything, causal=False)


class _RingAttention(AutogradFunction):
    """Attention of a rank's queries to all tokens; saves the keys and values that came last."""

    @staticmethod
    def forward(
        ctx: Context,
        query: Tensor,
        pair: Tensor,
        shapes: Sequence[tuple[int, ...]],
        cp: ContextGroup,
    ) -> Tensor:
        pairs, calls = [pair], []
        for number in range(cp.size):
            works = []
            if number < cp.size - 1:
                pairs.append(torch.empty_like(pair))
                # The next keys and values are sent under the attention of this step.
                works = _exchange(pairs[-2], pairs[-1], 1, cp)
            step = _Step.of(cp, (cp.rank - number) % cp.size)
            own = [each[step.keys] for each in _apart(pairs[number], shapes)]
            given = [query[step.queries], *own]
            calls.append((step.queries, *flash_attention(given, 0, causal=step.causal)))
            _wait(works)
        out, log_sum_exp = put_together(calls)
        ctx.save_for_backward(query, pairs[-1], out, log_sum_exp)
        ctx.cp, ctx.shapes = cp, shapes
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, last, out, log_sum_exp = ctx.saved_tensors
        cp: ContextGroup = ctx.cp
        gradient, query_gradient = gradient.contiguous(), torch.zeros_like(query)
        # Keys and values, and behind them what is summed of their gradients: sent and received.
        buffers = last.new_empty((2, 2, *last.shape)).unbind()
        buffers[0][0].copy_(last)
        for number in range(1, cp.size + 1):
            sending, receiving = buffers[number % 2 - 1], buffers[number % 2]
            # The first message has no gradients yet; the last one needs no keys and values.
            parts = slice(1 if number == cp.size else 0, 1 if number == 1 else 2)
            works = _exchange(sending[parts], receiving[parts], -1, cp)
            step = _Step.of(cp, (cp.rank + number) % cp.size)
            part, pair = step.queries, [each[step.keys] for each in _apart(sending[0], ctx.shapes)]
            saved = [query[part], *pair, out[part], log_sum_exp[..., part].contiguous()]
            gradients = flash_attention_backward(gradient[part], saved, 0, causal=step.causal)
            query_gradient[part] += gradients[0]
            _wait(works)
            # The first message has brought none to add to.
            if number == 1:
                receiving[1].zero_()
            for whole, each in zip(_apart(receiving[1], ctx.shapes), gradients[1:], strict=True):
                whole[step.keys] += each
            del gradients, saved, pair
        return query_gradient, receiving[1].clone(), None, None


def _apart(pair: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return the keys and values that are packed in *pair*."""
    parts = pair.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _exchange(
    sending: Tensor, receiving: Tensor, distance: int, cp: ContextGroup
) -> list[dist.Work | None]:
    """Send a message to the rank *distance* places on; receive one from that as far behind."""
    assert cp.group is not None
    receiver, sender = (
        dist.get_global_rank(cp.group, (cp.rank + way) % cp.size) for way in (distance, -distance)
    )
    return [
        dist.isend(sending, dst=receiver, group=cp.group),
        dist.irecv(receiving, src=sender, group=cp.group),
    ]


def _wait(works: Sequence[dist.Work | None]) -> None:
    for each in works:
        if each is not None:
            each.wait()


def put_together(found: Sequence[tuple[slice, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the attention of all calls, each weighted by its part of the softmax's sum.

    Args:
        found: Rows of each call, its output and the log-sum-exp of its scores; the first has all.
    """
    total = found[0][2].clone()
    for rows, _, log_sum_exp in found[1:]:
        total[..., rows] = torch.logaddexp(total[..., rows], log_sum_exp)
    whole = torch.zeros_like(found[0][1])
    for rows, out, log_sum_exp in found:
        # exp(lse - total): the part of a call in the softmax's denominator.
        weights = (log_sum_exp - total[..., rows]).exp_()
        whole[rows] += (out * weights.permute(2, 0, 1).unsqueeze(-1)).to(whole.dtype)
    return whole, total


class RingAttention(nn.Module):
    """Causal attention of a rank's tokens to those of all ranks."""

    def __init__(self, cp: ContextGroup) -> None:
        super().__init__()
        self.cp = cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the rank's tokens to all."""
        pair = torch.cat((key.flatten(), value.flatten()))
        out: Tensor = _RingAttention.apply(query, pair, (key.shape, value.shape), self.cp)
        return out
