"""Weight gradients accumulated inside the GEMM that makes them (gradient accumulation fusion)."""

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.validate.programs.fused.autograd_function import first_that_works

ATEN = torch.ops.aten


class GradientSink(Protocol):
    """Accumulator of weight gradients, to which GEMMs add."""

    def add_product(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        """Add ``gradient^T inputs``, or return it where gradients are not fused."""


@torch.library.custom_op("meshwright::accumulate_weight_gradient", mutates_args={"buffer"})
def accumulate_weight_gradient(buffer: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    """Add ``gradient^T inputs`` to *buffer* in its own precision.

    Args:
        buffer: ``[outputs, inputs]``, changed in place.
        inputs: ``[tokens, inputs]``.
        gradient: ``[tokens, outputs]``.
    """
    # Of one format addmm accumulates by itself.
    if buffer.dtype is inputs.dtype is gradient.dtype:
        buffer.addmm_(gradient.t(), inputs)
    elif buffer.is_cuda:
        _accumulation(buffer.device, inputs.dtype)(buffer, inputs, gradient)
    else:
        add_product(buffer, inputs.to(buffer.dtype), gradient.to(buffer.dtype))


@accumulate_weight_gradient.register_fake
def _(_buffer: Tensor, _inputs: Tensor, _gradient: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.meshwright.accumulate_weight_gradient)
def _accumulate_flops(
    buffer: tuple[int, ...], inputs: tuple[int, ...], *_: object, **__: object
) -> int:
    """Count one matrix product of the weight's shape over all tokens."""
    return 2 * buffer[0] * buffer[1] * inputs[0]


def add_inside(buffer: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    """Let the GEMM of 16-bit tensors add to an fp32 buffer, as Megatron's kernel does."""
    place = buffer.unsqueeze(0)
    ATEN.baddbmm.dtype_out(
        place, gradient.t().unsqueeze(0), inputs.unsqueeze(0), torch.float32, out=place
    )


def add_wide_product(buffer: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    """Add the fp32 product of 16-bit tensors."""
    buffer.add_(ATEN.mm.dtype(gradient.t(), inputs, torch.float32))


def add_product(buffer: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    """Add the product in the precision that it comes in."""
    buffer.add_(gradient.t() @ inputs)


WAYS = (add_inside, add_wide_product, add_product)


@cache
def _accumulation(
    device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return the best of `WAYS` that this PyTorch has on *device*."""

    def is_right(kernel: Callable[[Tensor, Tensor, Tensor], None]) -> bool:
        inputs = torch.linspace(-1, 1, 64 * 16, device=device).view(64, 16).to(dtype)
        gradient = torch.linspace(1, 2, 64 * 32, device=device).view(64, 32).to(dtype)
        buffer = torch.full((32, 16), 100.0, device=device)
        kernel(buffer, inputs, gradient)
        return buffer.allclose(100.0 + gradient.float().t() @ inputs.float(), atol=1e-2, rtol=1e-4)

    return first_that_works(WAYS, is_right)
