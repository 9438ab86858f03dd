"""Outputs of GPU kernels for fake tensors, where those of CPU kernels differ in width."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_impls import op_implementations_dict


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Give fake tensors the outputs of GPU kernels, where those of a CPU differ in width."""
    # Fake tensors would decompose batch norm into operators of a CPU.
    names = torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit  # noqa: SLF001
    batch_norm = {each.default: _batch_norm_of_a_gpu for each in names}
    kernels = {
        torch.ops.aten.native_layer_norm.default: _layer_norm_of_a_gpu,
        torch.ops.aten._fused_rms_norm.default: _rms_norm_of_a_gpu,  # noqa: SLF001
        **batch_norm,
    }
    with (
        _kernel("_fused_rms_norm", _without_data, "CPU"),
        _kernel("_fused_rms_norm", _without_data, "CUDA"),
        # The key under which C++ code sees a script's GPU (`scripts/gpu`), also by a DTensor.
        _kernel("_fused_rms_norm", _without_data, "Lazy"),
        _kernel("silu_backward", _without_data, "CUDA"),
        _kernel("mish_backward", _without_data, "CUDA"),
        _kernel("dropout", _dropout_of_a_gpu, "AutogradCPU"),
        _kernel("pow.Tensor_Scalar", _power_of_a_gpu, "AutocastCPU"),
        patch.dict(op_implementations_dict, kernels),
        patch.dict(decomposition_table, batch_norm),
    ):
        yield


@contextmanager
def _kernel(name: str, function: Callable[..., object], key: str) -> Iterator[None]:
    """Make an operator one kernel, as on a GPU, where a CPU decomposes it.

    Releases of PyTorch for CPUs alone decompose what tensors without data on a GPU meet, too.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):  # noqa: SLF001
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(name, function, key)
        yield
    finally:
        library._destroy()  # noqa: SLF001 - else it stays for the rest of the process


def _without_data(*_: object) -> None:
    raise NotImplementedError("a kernel of GPUs has run on a tensor with data")


def _dropout_of_a_gpu(values: Tensor, probability: float, train: bool) -> Tensor:  # noqa: FBT001
    """Return dropout's output, and save a mask of bytes; a CPU's is as wide as the values.

    `is_fused_kernel_acceptable` of aten/src/ATen/native/Dropout.cpp asks for a GPU.
    """
    if not train or probability == 0:
        return values
    return torch.native_dropout(values, probability, train)[0]


def _power_of_a_gpu(values: Tensor, exponent: float) -> Tensor:
    """Return a power under autocast: in fp32, by the lists of a GPU (``torch/autocast_mode.h``)."""
    with torch.autocast("cpu", enabled=False):
        return torch.pow(values.float(), exponent)


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


def _rms_norm_of_a_gpu(
    _mode: object, _operator: object, values: Tensor, dims: list[int], *_: object
) -> tuple[Tensor, Tensor]:
    """Return the normalised values and a number a token in fp32.

    One kernel (`_fused_rms_norm_cuda` of layer_norm_kernel.cu, from PyTorch 2.9), many on a CPU.
    """
    tokens = values.shape[: -len(dims)]
    scale = values.new_empty((*tokens, *(1 for _ in dims)), dtype=torch.float32)
    return values.new_empty(values.shape), scale


def _batch_norm_of_a_gpu(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised values and two numbers a channel, which a GPU keeps in fp32."""
    values = next(each for each in arguments if isinstance(each, Tensor))
    mean, deviation = (values.new_empty(values.shape[1], dtype=torch.float32) for _ in range(2))
    return torch.empty_like(values), mean, deviation
