"""Which tensors of a script have data: what it makes of numbers on its host; all else has none."""

import sys
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
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
from meshwright.validate.counting import (
    communication_of,
    current_fake_mode,
    is_wrapper,
    tensors_in,
)

MOST_BYTES = 2**28  # of whole numbers that are made with data: a mask of 16,384 x 16,384
_HERE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib")
)
_VALUE = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - what ``item`` calls
_SAME = {torch.ops.aten.equal.default, torch.ops.aten.allclose.default}
_VALUES = {torch.ops.aten.linspace.default, torch.ops.aten.logspace.default}


class ScriptRefusedError(PlanError):
    """A script asks for what only data can answer."""


def script_place() -> str:
    """Return the file and line of the script, or of what it calls, that runs now.

    The innermost frame that is neither of an installed library nor of Python itself; where there
    is none, the innermost that is not of PyTorch.
    """
    torch_folder = str(Path(torch.__file__).parent)
    frame, nearest = sys._getframe(1), ""  # noqa: SLF001 - there is no other way to ask
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", torch_folder, str(_HERE))):
            place = f"{_short(file)}:{frame.f_lineno}"
            if not file.startswith(_LIBRARIES):
                return place
            nearest = nearest or place
        frame = frame.f_back  # type: ignore[assignment] # None at the outermost
    return nearest or "somewhere in PyTorch"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


class HostValues(TorchDispatchMode):
    """Lets numbers that a script makes on its host keep their values; the others have none.

    Whole numbers and truth values (indices, token ids, masks), what comes of a file or an array,
    and what is computed of these alone have data.  All else are tensors of the fake mode below.
    A value that is not there is answered by a constant, and noted: 0.0, 1 or False; two tensors
    are equal.

    Attributes:
        notes: How often which question was answered so at which place.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.notes: Counter[tuple[str, str]] = Counter()

    def note(self, what: str) -> None:
        """Note that the script was answered what need not be so."""
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
        if current_fake_mode() is None:
            return func(*args, **kwargs)
        if any(map(is_wrapper, types)):
            return NotImplemented
        given = tensors_in((args, kwargs))
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _VALUE:
            return self._constant(given[0])
        if func in _SAME:
            self.note(f"{func.__name__.partition('.')[0]} of tensors without data: True")
            return True
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise ScriptRefusedError(
                f"{script_place()}: {func} has a size that depends on data, which counting does "
                "not have; allowed: sizes that are known, or data on the host"
            ) from error
        return result if given else self._with_data(func, args, kwargs, result)

    def _constant(self, tensor: torch.Tensor) -> object:
        known = getattr(tensor, "constant", None)
        if known is not None:
            with unset_fake_temporarily():
                return known.item()
        answer: object = 0.0 if tensor.is_floating_point() else 1
        if tensor.dtype is torch.bool:
            answer = False
        self.note(f"a value of a tensor without data: {answer}")
        return answer

    def _with_data(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: object,
    ) -> object:
        """Return a new tensor, made again with data if it is one of whole numbers."""
        if not isinstance(result, FakeTensor) or result.device.type != "cpu":
            return result
        is_whole = not (result.is_floating_point() or result.is_complex())
        if (
            is_whole and result.nbytes <= MOST_BYTES and communication_of(func) is None
        ) or func in _VALUES:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return result
