"""Communication that is done as soon as it is asked for."""
# ruff: noqa: SLF001 - PyTorch makes such works in its own tests only

from collections.abc import Iterable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from meshwright.validate.counting.errors import UnsupportedTorchError

T = TypeVar("T")


def finished_work(outputs: list[torch.Tensor]) -> dist.Work:
    """Return a Work that is done and whose future holds *outputs*."""
    create = getattr(torch._C._distributed_c10d, "_create_work_from_future", None)
    if create is None:
        raise UnsupportedTorchError(f"torch {torch.__version__} cannot make a completed Work")
    return cast("dist.Work", create(done(outputs, outputs)))


def done(result: T, tensors: Iterable[torch.Tensor]) -> torch.futures.Future[T]:
    """Return a future that holds *result* already; it must know of which GPUs its *tensors* are."""
    gpus = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    future: torch.futures.Future[T] = torch.futures.Future(devices=[f"cuda:{gpu}" for gpu in gpus])
    future.set_result(result)
    return future
