"""Attention of some heads to all tokens, for which ranks swap tokens for heads and back.

Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509); tensors are ``[tokens, batch, heads,
width]``.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.validate.programs.context.group import ContextGroup
from meshwright.validate.programs.fused import AutogradFunction, Context


class _ToTokens(AutogradFunction):
    """All tokens of some heads, from some tokens of all heads."""

    @staticmethod
    def forward(ctx: Context, own: Tensor, cp: ContextGroup) -> Tensor:
        ctx.cp = cp
        return _all_tokens(own, cp)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_heads(gradient, ctx.cp), None


class _ToHeads(AutogradFunction):
    """Some tokens of all heads, from all tokens of some heads."""

    @staticmethod
    def forward(ctx: Context, own: Tensor, cp: ContextGroup) -> Tensor:
        ctx.cp = cp
        return _all_heads(own, cp)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_tokens(gradient, ctx.cp), None


def _all_tokens(own: Tensor, cp: ContextGroup) -> Tensor:
    """Swap heads for tokens: each rank gets its heads of everyone's tokens, put in order."""
    parts = own.unflatten(2, (cp.size, -1)).movedim(2, 0).contiguous()
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=cp.group)
    early, late = arrived.chunk(2, dim=1)
    return torch.cat([early.flatten(0, 1), late.flip(0).flatten(0, 1)])


def _all_heads(own: Tensor, cp: ContextGroup) -> Tensor:
    """Swap tokens for heads, the other way round."""
    early, late = (half.unflatten(0, (cp.size, -1)) for half in own.chunk(2))
    parts = torch.cat([early, late.flip(0)], dim=1)
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=cp.group)
    return arrived.movedim(0, 2).flatten(2, 3)


class SwappedCore(nn.Module):
    """An attention core between two swaps."""

    def __init__(self, core: nn.Module, cp: ContextGroup) -> None:
        super().__init__()
        self.core, self.cp = core, cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the rank's tokens to all."""
        own = [_ToTokens.apply(each, self.cp) for each in (query, key, value)]
        out: Tensor = _ToHeads.apply(self.core(*own), self.cp)
        return out
