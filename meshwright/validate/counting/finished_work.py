"""Communication that is done as soon as it is asked for, and what it leaves in its outputs."""
# ruff: noqa: SLF001 - PyTorch makes such works in its own tests only

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")
DEVICES = ("CPU", "CUDA")  # dispatch keys of the operators


class UnsupportedTorchError(RuntimeError):
    """This release of PyTorch lacks an interface that counting needs."""


def finished_work(outputs: list[torch.Tensor]) -> dist.Work:
    """Return a Work that is done and whose future holds *outputs*."""
    create = getattr(torch._C._distributed_c10d, "_create_work_from_future", None)
    if create is None:
        raise UnsupportedTorchError(f"torch {torch.__version__} cannot make a completed Work")
    return cast("dist.Work", create(done(outputs, outputs)))


def done(result: T, tensors: Iterable[torch.Tensor]) -> torch.futures.Future[T]:
    """Return a completed future of *result*; it must know the GPUs of its *tensors*."""
    # A fake tensor may be on a GPU that no future can wait for.
    real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
    gpus = sorted({tensor.device.index for tensor in real if tensor.device.type == "cuda"})
    future: torch.futures.Future[T] = torch.futures.Future(devices=[f"cuda:{gpu}" for gpu in gpus])
    future.set_result(result)
    return future


@contextmanager
def outputs_filled() -> Iterator[None]:
    """Let reduce-scatters and all-to-alls return this rank's own input.

    The fake process group of PyTorch to 2.11 leaves their outputs as memory had them.  Numbers that
    were never written make a step's time another one: losses and weights become NaN.
    """
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for name, implementation in (
                ("_reduce_scatter_base_", _own_part),
                ("reduce_scatter_tensor_coalesced_", _own_parts),
                ("alltoall_base_", _returned),
            ):
                for key in DEVICES:
                    library.impl(name, implementation, key, allow_override=True)
        yield
    finally:
        library._destroy()  # there is no public way to take back what was put in


def _own_part(
    output: Tensor, whole: Tensor, group: torch.ScriptObject, *_: object
) -> tuple[Tensor, torch.ScriptObject]:
    _copy_part(output, whole, group)
    return output, finished_work([output]).boxed()


def _own_parts(
    outputs: Sequence[Tensor], wholes: Sequence[Tensor], group: torch.ScriptObject, *_: object
) -> torch.ScriptObject:
    for output, whole in zip(outputs, wholes, strict=True):
        _copy_part(output, whole, group)
    return finished_work(list(outputs)).boxed()


def _returned(
    output: Tensor, given: Tensor, _group: torch.ScriptObject, *_: object
) -> torch.ScriptObject:
    most = min(output.numel(), given.numel())
    output.view(-1)[:most].copy_(given.view(-1)[:most])
    return finished_work([output]).boxed()


@torch.no_grad()
def _copy_part(output: Tensor, whole: Tensor, group: torch.ScriptObject) -> None:
    ranks = dist.ProcessGroup.unbox(group)
    output.copy_(whole.view(ranks.size(), -1)[ranks.rank()].view(output.shape))
