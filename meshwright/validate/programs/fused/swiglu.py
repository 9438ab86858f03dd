"""Activations of an MLP in one kernel: gated ones, and the square of ReLU."""

import torch
from torch import Tensor

from meshwright.validate.programs.fused.autograd_function import AutogradFunction, Context


@torch.library.custom_op("meshwright::swiglu", mutates_args=())
def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """Return ``silu(gate) * value``."""
    return torch.nn.functional.silu(gate).mul_(value)


@swiglu.register_fake
def _(gate: Tensor, _value: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _write_gradients(
    gradient: Tensor, given: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]
) -> None:
    """Fill *gradients* with the gradients of gate and value, with nothing else in memory."""
    (gate, value), (gate_slope, value_slope) = given, gradients
    # The value's slot holds the gradient of silu(gate) until its own is due.
    torch.mul(gradient, value, out=value_slope)
    torch.ops.aten.silu_backward.grad_input(value_slope, gate, grad_input=gate_slope)
    torch.ops.aten.silu.out(gate, out=value_slope)
    value_slope.mul_(gradient)


@torch.library.custom_op("meshwright::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and value."""
    gradients = gate.new_empty(gate.shape), value.new_empty(value.shape)
    _write_gradients(gradient, (gate, value), gradients)
    return gradients


@swiglu_backward.register_fake
def _(_gradient: Tensor, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), value.new_empty(value.shape)


@torch.library.custom_op("meshwright::packed_swiglu_backward", mutates_args=())
def packed_swiglu_backward(gradient: Tensor, packed: Tensor) -> Tensor:
    """Return the gradient of gate and value in one tensor, packed as they are."""
    slope = packed.new_empty(packed.shape)
    gate, value = packed.chunk(2, dim=-1)
    gate_slope, value_slope = slope.chunk(2, dim=-1)
    _write_gradients(gradient, (gate, value), (gate_slope, value_slope))
    return slope


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


@torch.library.custom_op("meshwright::squared_relu", mutates_args=())
def squared_relu(values: Tensor) -> Tensor:
    """Return the square of ReLU."""
    return torch.relu(values).square_()


@torch.library.custom_op("meshwright::squared_relu_backward", mutates_args=())
def squared_relu_backward(gradient: Tensor, values: Tensor) -> Tensor:
    """Return the gradient of the values."""
    return torch.relu(values).mul_(gradient).mul_(2)


@squared_relu.register_fake
@squared_relu_backward.register_fake
def _(values: Tensor, *_: Tensor) -> Tensor:
    return values.new_empty(values.shape)


class FusedSquaredRelu(AutogradFunction):
    """Square of ReLU; keeps its input."""

    @staticmethod
    def forward(ctx: Context, values: Tensor) -> Tensor:
        """Return the activated values."""
        ctx.save_for_backward(values)
        return squared_relu(values)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:
        """Return the gradient of the values."""
        return squared_relu_backward(gradient.contiguous(), *ctx.saved_tensors)
