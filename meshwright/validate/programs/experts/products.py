"""Grouped GEMMs of each expert's rows with its own weight, and the activation between them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.validate.programs.fused import AutogradFunction, Context, GradientSink


@torch.library.custom_op("meshwright::grouped_product", mutates_args=())
def grouped_product(
    rows: Tensor, weights: Sequence[Tensor], sizes: Sequence[int], made_dim: int
) -> Tensor:
    """Return ``x W^T`` of each expert's rows, or ``g W`` of their gradients.

    Args:
        rows: In the order of experts; there may be more behind them, of which zeros come.
        weights: ``[outputs, inputs]`` of each expert.
        sizes: Rows of each.
        made_dim: Of a weight, the dim that counts what is made: 0 outputs, 1 gradients of inputs.
    """
    made = rows.new_zeros((rows.shape[0], weights[0].shape[made_dim]))
    start = 0
    for size, weight in zip(sizes, weights, strict=True):
        own = slice(start, start + size)
        made[own] = rows[own] @ (weight if made_dim else weight.t())
        start += size
    return made


@grouped_product.register_fake
def _(rows: Tensor, weights: Sequence[Tensor], _sizes: Sequence[int], made_dim: int) -> Tensor:
    return rows.new_empty((rows.shape[0], weights[0].shape[made_dim]))


@register_flop_formula(torch.ops.meshwright.grouped_product)
def _grouped_flops(
    _rows: tuple[int, ...],
    weights: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    """Count one matrix product of each row with a weight, whichever expert's."""
    return 2 * sum(sizes) * weights[0][0] * weights[0][1]


@torch.library.custom_op("meshwright::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(rows: Tensor, gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return ``g^T x`` of each expert's rows, ``[experts, outputs, inputs]``."""
    made = rows.new_empty((len(sizes), gradient.shape[1], rows.shape[1]))
    start = 0
    for place, size in zip(made, sizes, strict=True):
        own = slice(start, start + size)
        place.copy_(gradient[own].t() @ rows[own])
        start += size
    return made


@grouped_weight_gradient.register_fake
def _(rows: Tensor, gradient: Tensor, sizes: Sequence[int]) -> Tensor:
    return rows.new_empty((len(sizes), gradient.shape[1], rows.shape[1]))


@register_flop_formula(torch.ops.meshwright.grouped_weight_gradient)
def _grouped_gradient_flops(
    rows: tuple[int, ...],
    gradient: tuple[int, ...],
    sizes: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    """Count one product of each row and its gradient."""
    return 2 * sum(sizes) * rows[1] * gradient[1]


class GroupedWeights(AutogradFunction):
    """Grouped GEMM of the rows of each expert with one tensor of all weights; keeps both."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the outputs of all rows."""
        ctx.save_for_backward(rows, weights)
        ctx.sizes = sizes
        return grouped_product(rows, weights.unbind(), sizes, 0)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of rows and weights."""
        rows, weights = ctx.saved_tensors
        row_gradient = grouped_product(gradient, weights.unbind(), ctx.sizes, 1)
        return row_gradient, grouped_weight_gradient(rows, gradient, ctx.sizes), None


class GroupedProduct(AutogradFunction):
    """Grouped GEMM in one kernel, which adds biases; keeps the rows."""

    @staticmethod
    def forward(
        ctx: Context, rows: Tensor, sizes: Sequence[int], sink: GradientSink, *parameters: Tensor
    ) -> Tensor:
        """Return the outputs of all rows; the experts' weights come before their biases."""
        ctx.save_for_backward(rows)
        weights, biases = parameters[: len(sizes)], parameters[len(sizes) :]
        # Not saved: what recomputation hands back is no longer the parameter that a sink knows.
        ctx.weights, ctx.sizes, ctx.sink, ctx.has_biases = weights, sizes, sink, len(biases) > 0
        made = grouped_product(rows, weights, sizes, 0)
        for own, bias in zip(made.split(sizes), biases, strict=False):
            own.add_(bias)
        return made

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, of weights where these are not fused, and of biases."""
        (rows,) = ctx.saved_tensors
        own = gradient.split(ctx.sizes)
        of_biases = [each.sum(dim=0) for each in own] if ctx.has_biases else []
        row_gradient = grouped_product(gradient, ctx.weights, ctx.sizes, 1)
        parts = zip(ctx.weights, rows.split(ctx.sizes), own, strict=True)
        return (
            row_gradient,
            None,
            None,
            *(ctx.sink.add_product(*each) for each in parts),
            *of_biases,
        )


@torch.library.custom_op("meshwright::weighed_swiglu", mutates_args=())
def weighed_swiglu(packed: Tensor, weights: Tensor) -> Tensor:
    """Return ``silu(gate) * value`` of ``[gate, value]``, each row times its weight."""
    gate, value = packed.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(value).mul_(weights.unsqueeze(-1))


@weighed_swiglu.register_fake
def _(packed: Tensor, _weights: Tensor) -> Tensor:
    return packed.new_empty((packed.shape[0], packed.shape[1] // 2))


@torch.library.custom_op("meshwright::weighed_swiglu_backward", mutates_args=())
def weighed_swiglu_backward(
    gradient: Tensor, packed: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``[gate, value]`` and of the weights."""
    gate, value = packed.chunk(2, dim=-1)
    activated = torch.nn.functional.silu(gate)
    of_weights = (gradient * activated * value).sum(dim=-1)
    own = gradient * weights.unsqueeze(-1)
    of_gate = torch.ops.aten.silu_backward(own * value, gate)
    return torch.cat([of_gate, own * activated], dim=-1), of_weights


@weighed_swiglu_backward.register_fake
def _(_gradient: Tensor, packed: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(packed), torch.empty_like(weights)


class WeighedSwiglu(AutogradFunction):
    """Gated activation of rows times their weights; keeps both.

    Megatron-Core compiles it to a kernel each way (`weighted_bias_swiglu_impl` of
    megatron/core/fusions/fused_bias_swiglu.py, core 0.16).
    """

    @staticmethod
    def forward(ctx: Context, packed: Tensor, weights: Tensor) -> Tensor:
        """Return `weighed_swiglu`."""
        ctx.save_for_backward(packed, weights)
        return weighed_swiglu(packed, weights)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        return weighed_swiglu_backward(gradient, *ctx.saved_tensors)
