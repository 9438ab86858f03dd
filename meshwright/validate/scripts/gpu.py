"""A GPU that is not there: tensors say that they are on it, and move there and back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from meshwright.validate.counting import storage_identity
from meshwright.validate.scripts.memories import GPU, HOST, STAND_IN, ScriptMemories, is_gpu

_ASK_DEVICE = torch.ops.prim.device.default
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}  # noqa: SLF001
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined] # properties made in C
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_NUMBER = torch.Tensor.get_device
_UNMOVED = (torch.Tensor.pin_memory, torch.Tensor.record_stream)


class GpuNames(TorchFunctionMode):
    """Says of tensors that they are on the script's GPU, and moves them there and back.

    Args:
        memories: Know which tensors are on the GPU.
        local_rank: Number of the GPU.
    """

    def __init__(self, memories: ScriptMemories, local_rank: int) -> None:
        super().__init__()
        self._memories = memories
        self._gpu = torch.device(GPU, local_rank)
        self._answers = {_IS_CUDA: True, _DEVICE: self._gpu, _NUMBER: local_rank}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call *func*, devices in full; or answer for a tensor that is on the GPU."""
        named = dict(kwargs or {})
        if func in _UNMOVED:
            return args[0]
        if func in self._answers and self._memories.is_on_gpu(args[0]):
            return self._answers[func]
        if func is torch.Tensor.cuda:
            func, args, named = torch.Tensor.to, (args[0], self._gpu), {}
        if func is torch.Tensor.to:
            return self._moved(args, named)
        if func == _SET_DATA and isinstance(args[0], FakeTensor):
            args[0].fake_device = args[1].device
        if func is torch.Tensor.type and len(args) == 1 and self._memories.is_on_gpu(args[0]):
            return str(func(*args)).replace("torch.", "torch.cuda.").replace("cuda.cuda", "cuda")
        if func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return storage_identity(args[0].untyped_storage())  # of all that have no data it is 0
        if func is torch.Tensor.cpu and self._memories.is_on_gpu(args[0]):
            return self._host_copy(args[0])
        if is_gpu(named.get("device")):
            named["device"] = self._gpu
        return func(*args, **named)

    def _moved(self, args: tuple[Any, ...], named: dict[str, Any]) -> object:
        """Return what ``to`` returns: the tensor itself, if it is there and stays as it is."""
        tensor, device = args[0], named.get("device", args[1] if len(args) > 1 else None)
        if is_gpu(device):
            named |= dict(zip(("device", "dtype", "non_blocking", "copy"), args[1:], strict=False))
            is_there = self._memories.is_on_gpu(tensor) and not named.get("copy")
            if is_there and named.get("dtype") in (None, tensor.dtype):
                return tensor
            named["device"] = None if is_there else self._gpu
            return tensor.to(**named)
        if device in ("cpu", HOST) and self._memories.is_on_gpu(tensor):
            tensor = self._host_copy(tensor)
        return tensor.to(*args[1:], **named)

    def _host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host, where PyTorch thinks that the tensor is."""
        self._memories.leaves_gpu = True
        try:
            return torch.ops.aten._to_copy.default(tensor, device=HOST)  # noqa: SLF001
        finally:
            self._memories.leaves_gpu = False


@contextmanager
def gpu_of_fakes() -> Iterator[None]:
    """Let tensors without data be on a GPU that PyTorch need not have.

    Its C++ code is told that they are on the host: autograd would ask a GPU for its streams.
    What it makes by that word on the host comes to the GPU with the first tensor that is there.
    """
    dispatch, common = FakeTensor.__torch_dispatch__, FakeTensor._find_common_device  # noqa: SLF001
    handlers = fake_tensor._DISPATCH_META_HANDLERS  # noqa: SLF001 - where the mode answers
    ask = handlers[_ASK_DEVICE]

    def told(device: torch.device) -> torch.device:
        return STAND_IN if device.type == GPU else device

    def of_tensor(_cls: type, func: object, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        result = dispatch(func, types, args, kwargs or {})
        return told(result) if func is _ASK_DEVICE else result

    def together(func: torch._ops.OpOverload, flat_args: Sequence[object]) -> Any:  # noqa: ANN401
        fakes = [each for each in flat_args if isinstance(each, FakeTensor)]
        gpus = [each.fake_device for each in fakes if each.fake_device.type == GPU]
        if gpus and func not in _COPIES:
            for each in fakes:
                if each.fake_device.type == HOST.type and each.dim():
                    each.fake_device = gpus[0]
        return common(func, flat_args)

    run = FakeTensorMode.dispatch

    def placed(mode: FakeTensorMode, func: object, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        named = dict(kwargs or {})
        if named.get("device") == STAND_IN:
            named["device"] = torch.device(GPU, torch.cuda.current_device())
        return run(mode, func, types, args, named)

    group = torch._C._group_tensors_by_device_and_dtype  # noqa: SLF001

    def grouped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        gpu = torch.device(GPU, torch.cuda.current_device())
        groups = group(*args, **kwargs).items()
        return {(gpu if device == STAND_IN else device, dtype): at for (device, dtype), at in groups}

    with ExitStack() as stack:
        for change in (
            patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped),  # noqa: SLF001
            patch.object(FakeTensorMode, "dispatch", placed),
            patch.dict(handlers, {_ASK_DEVICE: lambda args: told(ask(args))}),
            patch.object(FakeTensor, "__torch_dispatch__", classmethod(of_tensor)),
            patch.object(FakeTensor, "_find_common_device", staticmethod(together)),
            patch.object(FakeTensorMode, "avoid_device_init", property(lambda _mode: True)),
        ):
            stack.enter_context(change)
        yield
