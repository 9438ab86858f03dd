"""Library calls of a script that would read values, start processes, compile or write files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, unset_fake_temporarily
from torch.amp import GradScaler
from torch.distributed import checkpoint, tensor
from torch.optim.optimizer import _foreach_supported_types as step_types
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _foreach_supported_types as norm_types
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from meshwright.validate.scripts.gpu import ScriptTensors

_FINITE = {torch.isfinite: True, torch.Tensor.isfinite: True}
_NOT_FINITE = dict.fromkeys(
    (torch.isnan, torch.isinf, torch.Tensor.isnan, torch.Tensor.isinf), False
)
_VERDICTS = _FINITE | _NOT_FINITE
_ARRAYS: set[object] = {torch.Tensor.numpy, torch.Tensor.__array__}
_FOREACH = (step_types, norm_types)  # of tensors that optimizers and norms take all at once
_RANDOM = (tensor._random, tensor._dispatch)  # noqa: SLF001
_SAVES = ((torch, "save"), (checkpoint, "save"), (checkpoint, "async_save"))


class AnsweredValues(TorchFunctionMode):
    """Answers questions for the values of tensors without data that are not operators.

    All numbers are finite; an array has zeros.

    Args:
        values: Notes what was answered.
    """

    def __init__(self, values: ScriptTensors) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Call *func*, or answer it."""
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            # C++ code would read the values of tensors in it.
            own = tree_map_only(FakeTensor, FakeTensor.item, args[0])
            return func(own, *args[1:], **(kwargs or {}))
        tensor = args[0] if args else None
        if isinstance(tensor, FakeTensor):
            if func in _VERDICTS:
                with unset_fake_temporarily():
                    return torch.tensor(_VERDICTS[func]).expand(tensor.shape)
            if func in _ARRAYS:
                self._values.note("an array of a tensor without data: zeros")
                with unset_fake_temporarily():
                    return func(torch.zeros(tensor.shape, dtype=tensor.dtype), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def libraries_answered(values: ScriptTensors) -> Iterator[None]:
    """Let the code inside compile, save, scale gradients and load data, as far as counting can."""
    load = DataLoader.__init__

    def loader(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        options: dict[str, object] = {
            "num_workers": 0,
            "pin_memory": False,
            "persistent_workers": False,
        }
        options |= {"prefetch_factor": None, "timeout": 0, "multiprocessing_context": None}
        load(self, *args, **kwargs | options)

    def saved(*_args: object, **_kwargs: object) -> None:
        values.note("a checkpoint that is to be saved: nothing is written")

    def compiled(model: object = None, *_args: object, **_kwargs: object) -> object:
        values.note("torch.compile: counted as it runs without")
        return model if model is not None else lambda function: function  # a decorator then

    def stepped(_self: object, optimizer: Any, _state: object, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        return optimizer.step(*args, **kwargs)  # of finite gradients

    changes: list[tuple[object, str, object]] = [
        (torch, "compile", compiled),
        (nn.Module, "compile", compiled),
        (DataLoader, "__init__", loader),
        (GradScaler, "_maybe_opt_step", stepped),
        # Its weak references keep ``Module.to`` from exchanging parameters; nobody asks for them.
        (FakeTensorConverter, "set_tensor_memo", lambda *_args: None),
        # Random numbers without data need no generator that ranks agree on.
        *((module, "is_rng_supported_mesh", lambda _mesh: False) for module in _RANDOM),
        *((module, name, saved) for module, name in _SAVES),
    ]
    with ExitStack() as stack:
        for owner, name, function in changes:
            stack.enter_context(patch.object(owner, name, function))
        for kinds in _FOREACH:
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)
        stack.enter_context(AnsweredValues(values))
        yield
