"""Root-mean-square norm in one kernel."""

import torch
from torch import Tensor

from validate.program.autograd_function import AutogradFunction, Context


@torch.library.custom_op("meshwright::rms_norm", mutates_args=())
def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normalised values and the fp32 inverse root mean square of each token."""
    wide = values.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * weight.float()).to(values.dtype), inverse


@rms_norm.register_fake
def _(values: Tensor, _weight: Tensor, _epsilon: float) -> tuple[Tensor, Tensor]:
    inverse = values.new_empty((*values.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(values), inverse


@torch.library.custom_op("meshwright::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of values and weight."""
    normal = values.float() * inverse
    scaled = gradient.float() * weight.float()
    values_gradient = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    weight_gradient = (gradient.float() * normal).flatten(0, -2).sum(0)
    return values_gradient.to(values.dtype), weight_gradient.to(weight.dtype)


@rms_norm_backward.register_fake
def _(_gradient: Tensor, values: Tensor, weight: Tensor, _inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(weight)


class RmsNorm(AutogradFunction):
    """Root-mean-square norm that keeps its input and one number a token."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the normalised values."""
        normal, inverse = rms_norm(values, weight, epsilon)
        ctx.save_for_backward(values, weight, inverse)
        return normal

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of values and weight."""
        return *rms_norm_backward(gradient, *ctx.saved_tensors), None
