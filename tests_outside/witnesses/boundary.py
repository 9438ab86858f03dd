"""Answers of a machine with GPUs to the frameworks, which a rank without data cannot give.

Each answer stands with its reason. None changes what a framework computes, sends or keeps.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch.overrides import TorchFunctionMode

from meshwright.validate.counting import fake_cluster

_VALUE = torch.ops.aten._local_scalar_dense.default


@contextlib.contextmanager
def values_answered() -> Iterator[None]:
    """Answer who asks a tensor for its value: numbers are 1, conditions do not hold.

    Frameworks ask for numbers of tokens, norms and losses, to scale by them and to print them.
    """

    def answer(_mode: object, _operator: object, tensor: Tensor) -> float | int | bool:
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    with patch.dict(op_implementations_dict, {_VALUE: answer}):
        yield


@contextlib.contextmanager
def modules_converted() -> Iterator[None]:
    """Let ``module.bfloat16()`` and the like convert parameters as they do those with data.

    PyTorch would not convert one without data that anything refers to weakly, as its own record of
    them does, and would lose what a framework has noted on it.
    """
    apply = nn.Module._apply

    def convert(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        own = [each for each in module._parameters.values() if each is not None]
        notes = [dict(vars(each)) for each in own]
        converted = apply(module, *args, **kwargs)
        for each, noted in zip(own, notes, strict=True):
            new = vars(each)
            new.update({name: value for name, value in noted.items() if name not in new})
        return converted

    with (
        patch.object(FakeTensorConverter, "set_tensor_memo", lambda *_: None),
        patch.object(nn.Module, "_apply", convert),
    ):
        yield


def addresses_answered() -> contextlib.AbstractContextManager[object]:
    """Give each storage an address of its own; of tensors without data all are 0."""
    return patch.object(Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def objects_shared() -> Iterator[None]:
    """Let all ranks have the Python objects of this one: bytes without data cannot be read."""

    def gather(found: list[object], own: object, group: object = None) -> None:
        found[:] = [own] * len(found)

    with patch.object(dist, "all_gather_object", gather):
        yield


@contextlib.contextmanager
def cluster_answered(rank: int, world_size: int) -> Iterator[None]:
    """Be *rank* of a fake cluster, with values, converted modules and objects as above."""
    with fake_cluster(rank, world_size), values_answered(), modules_converted(), objects_shared():
        yield


class GpuIsHere(TorchFunctionMode):
    """Puts on the CPU what asks for a GPU: fake tensors of one need a build of PyTorch with CUDA.

    What asks a tensor for the name of its type hears that of a GPU's.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        device = kwargs.get("device")
        if str(device).startswith("cuda") or isinstance(device, int):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # of the host, which needs a GPU
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args, **kwargs).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


@contextlib.contextmanager
def gpu_answers() -> Iterator[None]:
    """Let code that speaks to ``torch.cuda`` run: there is one device, and it is idle."""
    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        GpuIsHere(),
    ):
        yield
