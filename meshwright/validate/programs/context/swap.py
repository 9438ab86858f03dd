"""Ulysses: an all-to-all of tokens for heads before attention, and one back.

Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509); tensors are ``[tokens, batch, heads,
width]``.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.validate.programs.context.group import ContextGroup, all_gather
from meshwright.validate.programs.fused import AutogradFunction, Context


class _ToTokens(AutogradFunction):
    """All-to-all to all tokens of some heads, from some tokens of all heads."""

    @staticmethod
    def forward(ctx: Context, own: Tensor, cp: ContextGroup) -> Tensor:
        ctx.cp = cp
        return _all_tokens(own, cp)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_heads(gradient, ctx.cp), None


class _ToHeads(AutogradFunction):
    """All-to-all to some tokens of all heads, from all tokens of some heads."""

    @staticmethod
    def forward(ctx: Context, own: Tensor, cp: ContextGroup) -> Tensor:
        ctx.cp = cp
        return _all_heads(own, cp)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_tokens(gradient, ctx.cp), None


class _OwnHeads(AutogradFunction):
    """The sinks of this rank's heads in fp32, of which each rank has the gradient for all tokens.

    Transformer Engine gathers all heads' so that each rank has all of it, and Megatron-Core takes
    its mean over ranks as if each had the part of its own tokens (`AttnFuncWithCPAndQKVOA2A` of
    2.9): as often as there are ranks it is then counted.  Here it is divided by them.
    """

    @staticmethod
    def forward(ctx: Context, sinks: Tensor, cp: ContextGroup) -> Tensor:
        ctx.cp, ctx.dtype = cp, sinks.dtype
        return sinks.chunk(cp.size)[cp.rank].float()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        cp: ContextGroup = ctx.cp
        of_all = gradient.new_empty(cp.size * len(gradient))
        all_gather(of_all, gradient.contiguous(), cp.group)
        return (of_all / cp.size).to(ctx.dtype), None


def _all_tokens(own: Tensor, cp: ContextGroup) -> Tensor:
    """Exchange heads for tokens: each rank gets its heads of everyone's tokens, in order."""
    parts = own.unflatten(2, (cp.size, -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=cp.group)
    # Early parts lie in the order of ranks, late ones in reverse.
    early, late = received.chunk(2, dim=1)
    return torch.cat([early.flatten(0, 1), late.flip(0).flatten(0, 1)])


def _all_heads(own: Tensor, cp: ContextGroup) -> Tensor:
    """Exchange tokens for heads, the other way round."""
    early, late = (half.unflatten(0, (cp.size, -1)) for half in own.chunk(2))
    parts = torch.cat([early, late.flip(0)], dim=1)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=cp.group)
    return received.movedim(0, 2).flatten(2, 3)


class UlyssesAttention(nn.Module):
    """Attention core between two all-to-alls; holds the sinks of all heads, if it has some."""

    def __init__(
        self, core: nn.Module, cp: ContextGroup, sinks: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.core, self.cp, self.sinks = core, cp, sinks

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the rank's tokens to all."""
        own = [_ToTokens.apply(each, self.cp) for each in (query, key, value)]
        if self.sinks is not None:
            own.append(_OwnHeads.apply(self.sinks, self.cp))
        out: Tensor = _ToHeads.apply(self.core(*own), self.cp)
        return out
