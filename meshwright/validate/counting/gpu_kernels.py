"""What a GPU's kernels give out where a CPU's, and so those of fake tensors, differ in width."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_dict


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Give fake tensors the outputs of a GPU's kernels where a CPU's are of another width."""
    # Fake tensors would take batch norm apart, into operators of a CPU.
    names = torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit  # noqa: SLF001
    batch_norm = {each.default: _batch_norm_of_a_gpu for each in names}
    kernels = {torch.ops.aten.native_layer_norm.default: _layer_norm_of_a_gpu, **batch_norm}
    with (
        patch.dict(op_implementations_dict, kernels),
        patch.dict(decomposition_table, batch_norm),
    ):
        yield


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


def _batch_norm_of_a_gpu(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised values and two numbers a channel, which a GPU keeps in fp32."""
    values = next(each for each in arguments if isinstance(each, Tensor))
    mean, deviation = (values.new_empty(values.shape[1], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(values), mean, deviation
