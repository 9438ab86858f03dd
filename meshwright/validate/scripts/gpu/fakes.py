"""Tensors without data on a GPU that PyTorch need not have been built for.

Its C++ code is told that they are on another device, one without hardware of its own: autograd
would ask a GPU for its streams. What it makes there in turn is on the GPU.
"""
# ruff: noqa: ANN401, SLF001 - what is changed here is private to torch, and untyped

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.validate.scripts.gpu.memories import GPU, HOST, PLACEHOLDER_DEVICE

_ASK = torch.ops.prim.device.default
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


@contextmanager
def gpu_of_fakes(number: int) -> Iterator[None]:
    """Let tensors of fake modes be on GPU *number* of a node."""
    gpu = torch.device(GPU, number)
    handlers = fake_tensor._DISPATCH_META_HANDLERS
    handle: Callable[..., Any] = handlers[_ASK]
    group = torch._C._group_tensors_by_device_and_dtype
    dispatch = _with_placeholder(FakeTensor.__torch_dispatch__)
    changes = (
        patch.dict(handlers, {_ASK: lambda args: _as_placeholder(handle(args))}),
        patch.object(FakeTensor, "__torch_dispatch__", classmethod(dispatch)),
        patch.object(FakeTensorMode, "dispatch", _made_on_gpu(FakeTensorMode.dispatch, gpu)),
        patch.object(
            FakeTensor, "_find_common_device", _common_device(FakeTensor._find_common_device)
        ),
        # As where there is no GPU: values come to one after they have been taken in.
        patch.object(FakeTensorMode, "avoid_device_init", property(lambda _mode: True)),
        patch.object(
            torch._C, "_group_tensors_by_device_and_dtype", _grouped_by_device(group, gpu)
        ),
    )
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        FakeTensorMode.cache_clear()  # results of another run are on the GPU of its rank
        yield


def _as_placeholder(device: torch.device) -> torch.device:
    return PLACEHOLDER_DEVICE if device.type == GPU else device


def _with_placeholder(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tensor's dispatch that names the placeholder when C++ code asks for its device."""

    def run(_cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(func, types, args, kwargs or {})
        return _as_placeholder(result) if func is _ASK else result

    return run


def _made_on_gpu(dispatch: Callable[..., Any], gpu: torch.device) -> Callable[..., Any]:
    """Return a mode's dispatch that makes tensors of the placeholder on the GPU."""

    def run(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if named.get("device") == PLACEHOLDER_DEVICE:
            named["device"] = gpu
        return dispatch(mode, func, types, args, named)

    return run


def _common_device(common: Callable[..., Any]) -> object:
    """Return the search for one device of operands; those with data were on the host till now."""

    def find(func: torch._ops.OpOverload, flat_args: Sequence[object]) -> Any:
        fakes = [each for each in flat_args if isinstance(each, FakeTensor)]
        gpus = [each.fake_device for each in fakes if each.fake_device.type == GPU]
        if gpus and func not in _COPIES:
            for each in fakes:
                if each.fake_device == HOST and each.dim():
                    each.fake_device = gpus[0]
        return common(func, flat_args)

    return staticmethod(find)


def _grouped_by_device(group: Callable[..., Any], gpu: torch.device) -> Callable[..., Any]:
    """Return the grouping of tensors by device for optimizers, with the GPU as device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return {
            (gpu if device == PLACEHOLDER_DEVICE else device, dtype): tensors
            for (device, dtype), tensors in group(*args, **kwargs).items()
        }

    return run
