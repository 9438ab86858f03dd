"""Bias, dropout and residual addition in one kernel."""

import torch
from torch import Tensor

from meshwright.validate.programs.fused.autograd_function import AutogradFunction, Context


@torch.library.custom_op("meshwright::bias_dropout_add", mutates_args=())
def bias_dropout_add(
    values: Tensor, bias: Tensor | None, residual: Tensor, probability: float
) -> tuple[Tensor, Tensor]:
    """Return ``residual + dropout(values + bias)`` and the one-byte mask of what stayed."""
    biased = values if bias is None else values + bias
    mask = values.new_empty(0, dtype=torch.bool)
    if probability:
        biased, mask = torch.native_dropout(biased, probability, train=True)
    # An addition in place would overwrite *values*, or round the sum.
    if biased is values or biased.dtype is not residual.dtype:
        return residual + biased, mask
    return biased.add_(residual), mask


@bias_dropout_add.register_fake
def _(
    values: Tensor,
    _bias: Tensor | None,
    residual: Tensor,
    probability: float,
) -> tuple[Tensor, Tensor]:
    shape = values.shape if probability else (0,)
    return torch.empty_like(residual), values.new_empty(shape, dtype=torch.bool)


class BiasDropoutAdd(AutogradFunction):
    """Adds values, a bias and a residual; keeps a one-byte mask, nothing without dropout."""

    @staticmethod
    def forward(
        ctx: Context,
        values: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        probability: float,
    ) -> Tensor:
        """Return the sum, *values* and *bias* dropped out."""
        out, mask = bias_dropout_add(values, bias, residual, probability)
        if probability:
            ctx.save_for_backward(mask)
        ctx.probability, ctx.has_bias = probability, bias is not None
        return out

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of values, bias and residual."""
        branch = gradient
        if ctx.probability:
            scale = 1 / (1 - ctx.probability)
            branch = torch.ops.aten.native_dropout_backward(gradient, *ctx.saved_tensors, scale)
        bias_gradient = branch.flatten(0, 1).sum(0) if ctx.has_bias else None
        return branch, bias_gradient, gradient, None
