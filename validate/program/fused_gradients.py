"""A weight gradient accumulated inside the product that makes it."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("meshwright::accumulate_weight_gradient", mutates_args={"buffer"})
def accumulate_weight_gradient(buffer: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    """Add ``gradient^T inputs`` to *buffer* in its own precision.

    Args:
        buffer: ``[outputs, inputs]``, changed in place.
        inputs: ``[tokens, inputs]``.
        gradient: ``[tokens, outputs]``.
    """
    buffer += gradient.to(buffer.dtype).t() @ inputs.to(buffer.dtype)


@accumulate_weight_gradient.register_fake
def _(_buffer: Tensor, _inputs: Tensor, _gradient: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.meshwright.accumulate_weight_gradient)
def _accumulate_flops(
    buffer: tuple[int, ...], inputs: tuple[int, ...], *_: object, **__: object
) -> int:
    """One product of the weight's shape over all tokens."""
    return 2 * buffer[0] * buffer[1] * inputs[0]
