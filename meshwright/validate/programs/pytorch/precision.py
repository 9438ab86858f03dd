"""Number formats of a job as PyTorch calls them."""

from contextlib import AbstractContextManager, nullcontext

import torch

from meshwright.hwprofiles import Precision

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def autocast(
    precision: Precision, device_type: str, *, caches: bool = True
) -> AbstractContextManager[object]:
    """Return the context in which fp32 weights compute in a 16-bit *precision*.

    Args:
        precision: Of the products.
        device_type: Of the device.
        caches: Whether what is cast of a weight is kept for its next use, as of a leaf it is.
    """
    if precision is Precision.FP32:
        return nullcontext()
    return torch.autocast(device_type, DTYPES[precision], cache_enabled=caches)
