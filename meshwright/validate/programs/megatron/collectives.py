"""Collectives on flat buffers under the names of the installed PyTorch."""

import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 renamed both; the old names warn there, the new ones are missing before.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Fill *whole* with every rank's *own*, along dim 0, and return it."""
    _GATHER(whole, own, group=group)
    return whole


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Fill *own* with this rank's part of the sum of *whole*, and return it."""
    _REDUCE_SCATTER(own, whole, group=group)
    return own
