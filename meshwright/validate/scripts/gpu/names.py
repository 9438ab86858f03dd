"""Tensor methods of a script on its GPU: answers about it, and moves there and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from meshwright.validate.counting import storage_identity
from meshwright.validate.scripts.gpu.memories import GPU, HOST, ScriptMemories, is_gpu

_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined] # properties made in C
_DEVICE = Tensor.device.__get__
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MOVE = ("device", "dtype", "non_blocking", "copy")  # parameters of ``Tensor.to``


class GpuNames(TorchFunctionMode):
    """Says of tensors that they are on the script's GPU, and moves them there and back.

    Args:
        memories: Know which tensors are on the GPU.
        number: Of the GPU in its node.
    """

    def __init__(self, memories: ScriptMemories, number: int) -> None:
        super().__init__()
        self._memories = memories
        self._gpu = torch.device(GPU, number)
        self._answers = {_IS_CUDA: True, _DEVICE: self._gpu, Tensor.get_device: number}
        self._methods: dict[object, Callable[..., Any]] = {
            Tensor.pin_memory: lambda tensor, *_args, **_kwargs: tensor,
            Tensor.record_stream: lambda tensor, *_args, **_kwargs: tensor,
            Tensor.cuda: lambda tensor, *_args, **_kwargs: self._moved(tensor, self._gpu),
            Tensor.to: self._moved,
            Tensor.cpu: lambda tensor: self._moved(tensor, HOST),
            Tensor.type: self._typed,
            Tensor.data_ptr: _address,
            _SET_DATA: _set_data,
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call *func*, devices in full; or answer for a tensor that is on the GPU."""
        named = dict(kwargs or {})
        if func in self._answers and self._memories.is_on_gpu(args[0]):
            return self._answers[func]
        if is_gpu(named.get("device")):
            named["device"] = self._gpu
        method = self._methods.get(func, func)
        return method(*args, **named)

    def _moved(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Return ``tensor.to(...)``: the tensor itself, if it is there and stays as it is."""
        device = kwargs.get("device", args[0] if args else None)
        to: Callable[..., Tensor] = tensor.to
        if not self._memories.is_on_gpu(tensor):
            return to(*(self._gpu if is_gpu(each) else each for each in args), **kwargs)
        if device in (HOST.type, HOST):
            return self._host_copy(tensor).to(*args, **kwargs)
        if not is_gpu(device):
            return to(*args, **kwargs)
        named = dict(zip(_MOVE, args, strict=False)) | kwargs
        if named.get("dtype") in (None, tensor.dtype) and not named.get("copy"):
            return tensor
        return to(**named | {"device": None})

    def _host_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, where data are for PyTorch in any case."""
        self._memories.leaves_gpu = True
        try:
            copy: Tensor = torch.ops.aten._to_copy.default(tensor, device=HOST)  # noqa: SLF001
            return copy
        finally:
            self._memories.leaves_gpu = False

    def _typed(self, tensor: Tensor, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        """Return the old name of a tensor's type, which names its device; or a converted tensor."""
        result = tensor.type(*args, **kwargs)
        if not isinstance(result, str) or not self._memories.is_on_gpu(tensor):
            return result
        return f"torch.{GPU}.{result.rpartition('.')[2]}"


def _address(tensor: Tensor) -> int:
    """Return a number for a storage without data, whose address is 0 as that of all others."""
    if isinstance(tensor, FakeTensor):
        return storage_identity(tensor.untyped_storage())
    return tensor.data_ptr()


def _set_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data
    if isinstance(tensor, FakeTensor):
        tensor.fake_device = data.device
