"""RMS norm in one kernel."""

from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.validate.programs.fused.autograd_function import (
    AutogradFunction,
    Context,
    first_that_works,
)

ATEN = torch.ops.aten


@torch.library.custom_op("meshwright::rms_norm", mutates_args=())
def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normalised values and the fp32 inverse root mean square of each token."""
    return _kernel(values, weight).forward(values, weight, epsilon)


@rms_norm.register_fake
def _(values: Tensor, _weight: Tensor, _epsilon: float) -> tuple[Tensor, Tensor]:
    inverse = values.new_empty((*values.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(values), inverse


@torch.library.custom_op("meshwright::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of values and weight."""
    return _kernel(values, weight).backward(gradient, values, weight, inverse)


@rms_norm_backward.register_fake
def _(_gradient: Tensor, values: Tensor, weight: Tensor, _inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(weight)


class _Forward(Protocol):
    def __call__(self, values: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]: ...


class _Backward(Protocol):
    def __call__(
        self, gradient: Tensor, values: Tensor, weight: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor]: ...


class NormKernel(NamedTuple):
    """Forward kernel, and the backward kernel that reads what it keeps."""

    forward: _Forward
    backward: _Backward


def _plain_forward(values: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = values.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * weight.float()).to(values.dtype), inverse


def _plain_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    normal = values.float() * inverse
    scaled = gradient.float() * weight.float()
    # Derivative of x / sqrt(mean(x^2)).
    values_gradient = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    weight_gradient = (gradient.float() * normal).flatten(0, -2).sum(0)
    return values_gradient.to(values.dtype), weight_gradient.to(weight.dtype)


def _library_forward(values: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    normal, inverse = ATEN._fused_rms_norm(  # noqa: SLF001 - what `torch.rms_norm` calls
        values, list(weight.shape), weight, epsilon
    )
    return normal, inverse


def _library_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    values_gradient, weight_gradient = ATEN._fused_rms_norm_backward(  # noqa: SLF001
        gradient, values, list(weight.shape), inverse, weight, [True, True]
    )
    return values_gradient, weight_gradient


PLAIN = NormKernel(_plain_forward, _plain_backward)
LIBRARY = NormKernel(_library_forward, _library_backward)


def _kernel(values: Tensor, weight: Tensor) -> NormKernel:
    # PyTorch's kernel is for GPUs, and for one format alone.
    if not (values.is_cuda and values.dtype is weight.dtype):
        return PLAIN
    return _gpu_kernel(values.device, values.dtype)


@cache
def _gpu_kernel(device: torch.device, dtype: torch.dtype) -> NormKernel:
    """Return the best kernel that this PyTorch has on *device*."""
    values = torch.linspace(-1, 2, 3 * 256, device=device).view(3, 1, 256).to(dtype)
    weight = torch.linspace(0.5, 1, 256, device=device).to(dtype)
    gradient = values.flip(-1)

    def passes(kernel: NormKernel) -> list[Tensor]:
        normal, inverse = kernel.forward(values, weight, 1e-5)
        return [normal, inverse, *kernel.backward(gradient, values, weight, inverse)]

    def is_right(kernel: NormKernel) -> bool:
        return all(
            got.shape == wanted.shape
            and got.dtype is wanted.dtype
            and got.allclose(wanted, atol=2e-2, rtol=2e-2)
            for got, wanted in zip(passes(kernel), passes(PLAIN), strict=True)
        )

    return first_that_works((LIBRARY, PLAIN), is_right)


class UnweightedRmsNorm(AutogradFunction):
    """RMS norm without weights; keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Context, values: Tensor, epsilon: float) -> Tensor:
        """Return the normalised values."""
        normal, inverse = rms_norm(values, values.new_ones(values.shape[-1]), epsilon)
        ctx.save_for_backward(values, inverse)
        return normal

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the values."""
        values, inverse = ctx.saved_tensors
        ones = values.new_ones(values.shape[-1])
        return rms_norm_backward(gradient, values, ones, inverse)[0], None


class RmsNorm(AutogradFunction):
    """RMS norm; keeps its input, weight and one number a token."""

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
