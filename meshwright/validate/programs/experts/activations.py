"""Activations of experts other than SwiGLU.

gpt-oss multiplies a clamped value, to which 1 is added, by ``g sigmoid(1.702 g)`` of a clamped
gate (`_apply_gate` of transformers' modeling_gpt_oss.py, 5.23).
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshwright.validate.programs.fused import AutogradFunction, Context

BOUND = 7.0
SLOPE = 1.702


def ungated(name: str, values: Tensor) -> Tensor:
    """Return the ungated activation of that *name*."""
    return F.gelu(values) if name == "gelu" else torch.relu(values).square()


def clamp_gate(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate of ``[gate, value]``, clamped from above, and the value, on both sides."""
    gate, value = packed.chunk(2, dim=-1)
    return gate.clamp(max=BOUND), value.clamp(-BOUND, BOUND)


def gated_output(gate: Tensor, value: Tensor) -> Tensor:
    """Return ``g sigmoid(1.702 g) (value + 1)`` of a gate ``g``."""
    return F.silu(SLOPE * gate).div_(SLOPE).mul_(value + 1)


def _gate_value_gradients(gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and value."""
    scaled = SLOPE * gate
    # The derivative of silu(a g) / a is silu'(a g): the factor a cancels.
    of_gate = torch.ops.aten.silu_backward(gradient * (value + 1), scaled)
    return of_gate, F.silu(scaled).div_(SLOPE).mul_(gradient)


@torch.library.custom_op("meshwright::clamped_swiglu", mutates_args=())
def clamped_swiglu(packed: Tensor) -> Tensor:
    """Return the clamped SwiGLU of ``[gate, value]``."""
    return gated_output(*clamp_gate(packed))


@clamped_swiglu.register_fake
def _(packed: Tensor) -> Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1] // 2))


@torch.library.custom_op("meshwright::clamped_swiglu_backward", mutates_args=())
def clamped_swiglu_backward(gradient: Tensor, packed: Tensor) -> Tensor:
    """Return the gradient of ``[gate, value]``: none beyond the clamps."""
    gate, value = packed.chunk(2, dim=-1)
    of_gate, of_value = _gate_value_gradients(gradient, *clamp_gate(packed))
    return torch.cat([of_gate * (gate <= BOUND), of_value * (value.abs() <= BOUND)], dim=-1)


@clamped_swiglu_backward.register_fake
def _(_gradient: Tensor, packed: Tensor) -> Tensor:
    return torch.empty_like(packed)


class ClampedSwiglu(AutogradFunction):
    """Clamped SwiGLU of the two halves of one tensor; keeps that tensor."""

    @staticmethod
    def forward(ctx: Context, packed: Tensor) -> Tensor:
        """Return `clamped_swiglu`."""
        ctx.save_for_backward(packed)
        return clamped_swiglu(packed)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:
        """Return the gradient of both halves."""
        return clamped_swiglu_backward(gradient, *ctx.saved_tensors)


@torch.library.custom_op("meshwright::weighed_quick_geglu", mutates_args=())
def weighed_quick_geglu(packed: Tensor, weights: Tensor) -> Tensor:
    """Return the gated activation of ``[gate, value]``, each row times its weight."""
    return gated_output(*packed.chunk(2, dim=-1)).mul_(weights.unsqueeze(-1))


@weighed_quick_geglu.register_fake
def _(packed: Tensor, _weights: Tensor) -> Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1] // 2))


@torch.library.custom_op("meshwright::weighed_quick_geglu_backward", mutates_args=())
def weighed_quick_geglu_backward(
    gradient: Tensor, packed: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``[gate, value]`` and of the weights."""
    halves = packed.chunk(2, dim=-1)
    of_weights = (gradient * gated_output(*halves)).sum(dim=-1)
    return torch.cat(
        _gate_value_gradients(gradient * weights.unsqueeze(-1), *halves), dim=-1
    ), of_weights


@weighed_quick_geglu_backward.register_fake
def _(_gradient: Tensor, packed: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(packed), torch.empty_like(weights)


class WeighedQuickGeglu(AutogradFunction):
    """Gated activation of rows that are clamped already, times their weights; keeps both.

    Megatron-Core clamps in operators, and compiles the rest to a kernel each way
    (`weighted_bias_quick_geglu_impl` of megatron/core/fusions/fused_bias_geglu.py, core 0.16).
    """

    @staticmethod
    def forward(ctx: Context, packed: Tensor, weights: Tensor) -> Tensor:
        """Return `weighed_quick_geglu`."""
        ctx.save_for_backward(packed, weights)
        return weighed_quick_geglu(packed, weights)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        return weighed_quick_geglu_backward(gradient, *ctx.saved_tensors)
