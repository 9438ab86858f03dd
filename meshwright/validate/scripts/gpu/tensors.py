"""The operators of a script: some compute on data, the others on sizes alone, some not at all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.simulator import PlanError
from meshwright.validate.counting import communication_of, current_fake_mode, is_wrapper, tensors_in
from meshwright.validate.scripts.gpu.memories import HOST, ScriptMemories, is_gpu
from meshwright.validate.scripts.gpu.places import script_place

MOST_BYTES = 2**28  # of whole numbers that are made with data: a mask of 16,384 x 16,384
_ATEN = torch.ops.aten
_VALUE = _ATEN._local_scalar_dense.default  # noqa: SLF001 - what ``item`` calls
_COPY = _ATEN._to_copy.default  # noqa: SLF001 - what ``to``, ``cuda`` and ``float`` call
_SAME = {_ATEN.equal.default, _ATEN.allclose.default}
_PUTS = {_ATEN.index_put.default, _ATEN.index_put_.default}
_RANGES = {_ATEN.linspace.default, _ATEN.logspace.default}  # of which scripts read values


class ScriptRefusedError(PlanError):
    """A script asks for what only data can answer."""


class ScriptTensors(TorchDispatchMode):
    """Lets numbers that a script makes on its own keep their values; the others have none.

    Whole numbers and truth values (indices, token ids, masks), what comes of a file or an array,
    and what is computed of these alone have data. All else are tensors of the fake mode below.
    A value that is not there is answered by a constant, and noted: 0.0, 1 or False; two tensors
    are equal.

    Args:
        memories: Know which tensors are on the GPU.
        fakes: The fake mode. Others are of libraries, such as DTensor's when it propagates
            shardings, and all is without data in them.

    Attributes:
        notes: Number of such answers, by question and place.
        refused: The last question that had no answer, if any; a script may go on without.
    """

    def __init__(self, memories: ScriptMemories, fakes: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.notes: Counter[tuple[str, str]] = Counter()
        self.refused: ScriptRefusedError | None = None
        self._memories, self._fakes = memories, fakes

    def note(self, what: str) -> None:
        """Note an answer that need not be true."""
        self.notes[what, script_place()] += 1

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run one operator with data, without, or not at all.

        Raises:
            ScriptRefusedError: If a size depends on data that is not there.
        """
        kwargs = kwargs or {}
        mode = current_fake_mode()
        if mode is not self._fakes:
            return func(*args, **(_on_host(kwargs) if mode is None else kwargs))
        if any(map(is_wrapper, types)):
            return NotImplemented
        given = tensors_in((args, kwargs))
        has_data = not any(isinstance(tensor, FakeTensor) for tensor in given)
        if has_data and given:
            return self._with_data(func, args, kwargs)
        if func is _VALUE or func in _SAME:
            return self._answer(func, given[0])
        if func is _COPY and self._is_there(args[0], kwargs):
            func, kwargs = torch.ops.aten.detach.default, {}
        if func in _PUTS and isinstance(args[0], FakeTensor):
            # Values of a tensor on the GPU are there, though computed of whole numbers alone.
            args = (*args[:2], _ATEN.empty_like.default(args[2], device=args[0].device), *args[3:])
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            self.refused = ScriptRefusedError(
                f"{script_place()}: {func} has a size that depends on data, which is not there "
                "when a script is counted; allowed: sizes that are known before"
            )
            raise self.refused from error
        # Made from no tensor: it can be made again, with data.
        if not given and self._can_have_data(func, result):
            return self._with_data(func, args, kwargs)
        return result

    def _with_data(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> object:
        """Run an operator on data; numbers that are not whole lose theirs on the GPU."""
        if func is _COPY and is_gpu(kwargs.get("device")) and args[0].is_floating_point():
            return func(*args, **kwargs)
        here = (HOST if isinstance(each, torch.device) else each for each in args)
        with unset_fake_temporarily():
            return func(*here, **_on_host(kwargs))

    def _can_have_data(self, func: torch._ops.OpOverload, result: object) -> bool:
        """Return True if a new tensor is remade with data: whole numbers, unless very many."""
        if not isinstance(result, FakeTensor) or result.is_meta or communication_of(func):
            return False
        is_whole = not (result.is_floating_point() or result.is_complex())
        return func in _RANGES or (is_whole and result.nbytes <= MOST_BYTES)

    def _is_there(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
        """Return True if a copy to the GPU is of a tensor that is there, in its format, already.

        PyTorch is told that such a tensor is on the host.
        """
        same = {"dtype": tensor.dtype, "layout": tensor.layout}
        is_same = all(kwargs.get(name) in (None, value) for name, value in same.items())
        to_gpu = is_gpu(kwargs.get("device")) and kwargs.get("memory_format") is None
        return to_gpu and is_same and self._memories.is_on_gpu(tensor)

    def _answer(self, func: torch._ops.OpOverload, tensor: torch.Tensor) -> object:
        if func in _SAME:
            self.note("whether tensors without data are equal: True")
            return True
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            with unset_fake_temporarily():
                return constant.item()
        answer: object = 0.0 if tensor.is_floating_point() else 1
        if tensor.dtype is torch.bool:
            answer = False
        self.note(f"a value of a tensor without data: {answer}")
        return answer


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords that name the host in the place of a GPU: data are there alone."""
    return {**kwargs, "device": HOST} if is_gpu(kwargs.get("device")) else dict(kwargs)
