"""Values for what the fake process group of PyTorch to 2.11 leaves as memory had it.

Numbers that were never written make a step's time another one: losses and weights become NaN.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.validate.counting.finished_work import finished_work

DEVICES = ("CPU", "CUDA")  # dispatch keys of the operators


@contextmanager
def outputs_filled() -> Iterator[None]:
    """Let collectives that reduce and scatter or exchange return what this rank gave."""
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
        library._destroy()  # noqa: SLF001 - there is no public way to take back what was put in


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
