"""Attention to the keys and values of context-parallel ranks by PyTorch's own ring.

The loops of `torch.distributed.tensor.experimental.context_parallel`, which torchtitan enters,
around the kernel of the programs; its load balancer lays tokens out as `ContextGroup` does.
Tensors are ``[batch, tokens, heads, width]``.
"""

from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from meshwright.hwprofiles import ContextParallel
from meshwright.validate.programs.context import ContextGroup
from meshwright.validate.programs.fused import (
    AutogradFunction,
    Context,
    flash_attention,
    flash_attention_backward,
)

METHODS = {ContextParallel.ALL_GATHER: "allgather", ContextParallel.RING: "alltoall"}
TOKENS = 2  # the dim of them where heads come first, as in PyTorch's loops


class _RingAttention(AutogradFunction):
    """Attention of a rank's queries to all tokens; keeps its inputs and outputs."""

    @staticmethod
    def forward(
        ctx: Context, query: Tensor, key: Tensor, value: Tensor, cp: ContextGroup
    ) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        assert cp.group is not None
        found = ring._templated_ring_attention(  # noqa: SLF001
            cp.group, TOKENS, cast("Any", _attend), q, k, v, is_causal=True
        )
        out, log_sum_exp = found[:2]
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.group = cp.group
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum_exp = ctx.saved_tensors
        output_gradient, q, k, v = (each.transpose(1, 2) for each in (gradient, query, key, value))
        op = cast("Any", _attend_back)
        over = ctx.group, TOKENS, op, output_gradient, "grad_out"
        back = cast("Any", ring._templated_ring_attention_backward)  # noqa: SLF001
        found = back(*over, q, k, v, out, log_sum_exp, is_causal=True)
        return *(each.transpose(1, 2) for each in found[:3]), None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    by_tokens = (each.transpose(1, 2) for each in (query, key, value))
    out, log_sum_exp = flash_attention([*by_tokens], 1, causal=is_causal)
    return out.transpose(1, 2), log_sum_exp


def _attend_back(*, is_causal: bool, **inputs: Tensor) -> tuple[Tensor, ...]:
    names = ("grad_out", "query", "key", "value", "out")
    gradient, *saved = (inputs[name].transpose(1, 2) for name in names)
    gradients = flash_attention_backward(
        gradient, [*saved, inputs["logsumexp"]], 1, causal=is_causal
    )
    return tuple(each.transpose(1, 2) for each in gradients)


class TorchRingAttention(nn.Module):
    """Causal attention of a rank's tokens to those of all ranks."""

    def __init__(self, cp: ContextGroup) -> None:
        super().__init__()
        self.cp = cp
        assert cp.way is not None
        ring.set_rotate_method(METHODS[cp.way])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of the rank's tokens to all."""
        out: Tensor = _RingAttention.apply(query, key, value, self.cp)
        return out
