"""What a GPU's kernels give out where a CPU's, and so those of fake tensors, differ in width."""

from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict


def gpu_kernels() -> AbstractContextManager[object]:
    """Give fake tensors the outputs of a GPU's kernels where a CPU's are of another width."""
    kernels = {torch.ops.aten.native_layer_norm.default: _layer_norm_of_a_gpu}
    return patch.dict(op_implementations_dict, kernels)


def _layer_norm_of_a_gpu(
    _mode: object, _operator: object, values: Tensor, dims: list[int], *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised values and two numbers a token, which a GPU keeps in fp32.

    On a CPU, and so on fake tensors, they are as wide as the values (`layer_norm_cuda` of
    aten/src/ATen/native/cuda/layer_norm_kernel.cu, `acc_type`).
    """
    tokens = values.shape[: -len(dims)]
    mean, deviation = (
        values.new_empty((*tokens, *(1 for _ in dims)), dtype=torch.float32) for _ in range(2)
    )
    return values.new_empty(values.shape), mean, deviation
