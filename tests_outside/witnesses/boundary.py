"""What a machine with GPUs answers to the frameworks, and a rank without data cannot.

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
from torch.overrides import TorchFunctionMode

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
    """Let ``module.bfloat16()`` and the like give a module new parameters.

    PyTorch would swap the old for the new, which it refuses for tensors without data that
    anything refers to weakly. What frameworks note on a parameter stays with it.
    """
    converted: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in converted:
                with torch.no_grad():
                    new = nn.Parameter(fn(old), old.requires_grad)
                notes = {key: value for key, value in vars(old).items() if key not in vars(new)}
                vars(new).update(notes)
                converted[id(old)] = (old, new)
            module._parameters[name] = converted[id(old)][1]
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else fn(buffer)
        return module

    with patch.object(nn.Module, "_apply", apply):
        yield


@contextlib.contextmanager
def objects_shared() -> Iterator[None]:
    """Let all ranks have the Python objects of this one: bytes without data cannot be read."""

    def gather(found: list[object], own: object, group: object = None) -> None:
        found[:] = [own] * len(found)

    with patch.object(dist, "all_gather_object", gather):
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
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
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
