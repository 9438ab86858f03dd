"""Kernels of NVIDIA's Apex, which Megatron-Core takes where they are installed; PyPI lacks them.

Each makes the tensors that the kernel makes.
"""

import sys
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.validate.programs.fused import accumulate_weight_gradient


class FusedLayerNormAffineFunction:
    """apex/normalization/fused_layer_norm.py: keeps the input, and two fp32 numbers a token."""

    @staticmethod
    def forward(ctx: object, *_: object) -> None:
        """Is only asked for its arguments."""

    @staticmethod
    def apply(
        values: Tensor, weight: Tensor, bias: Tensor, shape: torch.Size, eps: float
    ) -> Tensor:
        """Return the normalised values."""
        return functional.layer_norm(values, shape, weight, bias, eps)


def softmax(scores: Tensor, scale: Tensor) -> Tensor:
    """Return the causal softmax: csrc/megatron/scaled_upper_triang_masked_softmax.h."""
    return torch.empty_like(scores)


def softmax_backward(gradient: Tensor, probabilities: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient, written over that of the probabilities."""
    return gradient.mul_(probabilities)


def add_weight_gradient(inputs: Tensor, gradient: Tensor, buffer: Tensor) -> None:
    """Add a weight's gradient in the product: csrc/megatron/fused_weight_gradient_dense.cpp."""
    accumulate_weight_gradient(buffer, inputs, gradient)


def install() -> None:
    """Let Megatron-Core, which is imported after this, find the kernels."""
    modules = {
        "apex": {},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": {
            "FusedLayerNormAffineFunction": FusedLayerNormAffineFunction
        },
        "scaled_upper_triang_masked_softmax_cuda": {
            "forward": softmax,
            "backward": softmax_backward,
        },
        # Megatron-Core asks whether its batch is a multiple of this.
        "scaled_masked_softmax_cuda": {"get_batch_per_block": lambda *_: 4},
        "fused_weight_gradient_mlp_cuda": {
            "wgrad_gemm_accum_fp32": add_weight_gradient,
            "wgrad_gemm_accum_fp16": add_weight_gradient,
        },
    }
    for name, contents in modules.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(contents)
