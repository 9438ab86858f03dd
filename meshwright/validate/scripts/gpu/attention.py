"""Attention as a GPU computes it: in one kernel that keeps no scores, where PyTorch has one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional

from meshwright.validate.scripts.gpu.memories import GPU, ScriptMemories

MOST_WIDE = 256  # of a head in the flash kernel (sdp_utils.cpp, `check_head_dim_size_flash`)
FLASH_FORMATS = (torch.float16, torch.bfloat16)
_NAMES = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@contextmanager
def gpu_attention(memories: ScriptMemories) -> Iterator[None]:
    """Let attention of tensors on the GPU run in the kernel that PyTorch dispatches to there.

    PyTorch chooses among them only for what it knows to be on a GPU (`sdp_utils.cpp`): flash for
    16-bit numbers without a mask, else the memory-efficient one, unless the script forbids it.
    """
    plain: Callable[..., Tensor] = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        options = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        if not memories.is_on_gpu(query):
            return plain(query, key, value, **options)
        tensors = [query, key, value]
        if torch.is_autocast_enabled(GPU):
            tensors = [each.to(torch.get_autocast_dtype(GPU)) for each in tensors]
        if _takes_flash(tensors, options):
            return _flash(tensors, options)
        if options.pop("enable_gqa", False):
            repeats = query.shape[-3] // key.shape[-3]
            tensors[1:] = [each.repeat_interleave(repeats, -3) for each in tensors[1:]]
        if cuda.mem_efficient_sdp_enabled():
            return _efficient(tensors, options)
        return plain(*tensors, **options)

    with patch.object(functional, "scaled_dot_product_attention", attention):
        yield


def _takes_flash(tensors: list[Tensor], options: dict[str, Any]) -> bool:
    is_allowed = cuda.flash_sdp_enabled() or cuda.cudnn_sdp_enabled()
    fits = all(each.dtype in FLASH_FORMATS and each.shape[-1] <= MOST_WIDE for each in tensors)
    return is_allowed and fits and options.get("attn_mask") is None


def _flash(tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    result = torch.ops.aten._scaled_dot_product_flash_attention(  # noqa: SLF001 - what a GPU runs
        *tensors,
        options.get("dropout_p", 0.0),
        options.get("is_causal", False),
        scale=options.get("scale"),
    )
    output: Tensor = result[0]
    return output


def _efficient(tensors: list[Tensor], options: dict[str, Any]) -> Tensor:
    query, key, _ = tensors
    bias = options.get("attn_mask")
    if bias is not None:
        # PyTorch makes an additive mask of a boolean one.
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype)
        bias = bias.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    result = torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
        *tensors,
        bias,
        torch.is_grad_enabled() and any(each.requires_grad for each in tensors),
        options.get("dropout_p", 0.0),
        options.get("is_causal", False),
        scale=options.get("scale"),
    )
    output: Tensor = result[0]
    return output
