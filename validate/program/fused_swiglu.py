"""The gated activation of an MLP in one kernel."""

import torch
from torch import Tensor

from validate.program.autograd_function import AutogradFunction, Context


@torch.library.custom_op("meshwright::swiglu", mutates_args=())
def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Return ``silu(gate) * value``."""
    return (torch.nn.functional.silu(gate.float()) * value.float()).to(gate.dtype)


@swiglu.register_fake
def _(gate: Tensor, _value: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _swiglu_gradients(gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    wide = gate.float()
    sigmoid = torch.sigmoid(wide)
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    gate_gradient = (gradient.float() * value.float() * slope).to(gate.dtype)
    return gate_gradient, (gradient.float() * wide * sigmoid).to(value.dtype)


@torch.library.custom_op("meshwright::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and value."""
    return _swiglu_gradients(gradient, gate, value)


@swiglu_backward.register_fake
def _(_gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), value.new_empty(value.shape)


@torch.library.custom_op("meshwright::packed_swiglu_backward", mutates_args=())
def packed_swiglu_backward(gradient: Tensor, packed: Tensor) -> Tensor:
    """Return the gradient of gate and value in one tensor, packed as they are."""
    return torch.cat(_swiglu_gradients(gradient, *packed.chunk(2, dim=-1)), dim=-1)


@packed_swiglu_backward.register_fake
def _(_gradient: Tensor, packed: Tensor) -> Tensor:
    return packed.new_empty(packed.shape)


class Swiglu(AutogradFunction):
    """Gated activation of two tensors; keeps both, not the activated gate."""

    @staticmethod
    def forward(ctx: Context, gate: Tensor, value: Tensor) -> Tensor:
        """Return ``silu(gate) * value``."""
        ctx.save_for_backward(gate, value)
        return swiglu(gate, value)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and value."""
        return swiglu_backward(gradient, *ctx.saved_tensors)


class PackedSwiglu(AutogradFunction):
    """Gated activation of the two halves of one tensor; keeps that tensor."""

    @staticmethod
    def forward(ctx: Context, packed: Tensor) -> Tensor:
        """Return ``silu(gate) * value`` of ``[gate, value]``."""
        ctx.save_for_backward(packed)
        return swiglu(*packed.chunk(2, dim=-1))

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:
        """Return the gradient, packed as the input."""
        return packed_swiglu_backward(gradient, *ctx.saved_tensors)
