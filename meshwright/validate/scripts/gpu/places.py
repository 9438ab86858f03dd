"""Place in a user's script where something happens."""

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_PACKAGE = f"{__name__.partition('.')[0]}."
_OURS = str(Path(__file__).parents[3])
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib"))


def script_place() -> str:
    """Return the file and line of the script, or of what it imports, that runs now.

    The innermost that is neither of an installed library nor of Python itself; after it, where
    a library was called, the line of that.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to ask
    inner = ""
    while frame is not None:
        file = frame.f_code.co_filename
        # By name as well: an installed copy may run beside the checkout whose tests are collected.
        is_ours = frame.f_globals.get("__name__", "").startswith(_PACKAGE)
        if not (is_ours or file.startswith(("<", _TORCH, _OURS))):
            place = f"{_short(file)}:{frame.f_lineno}"
            if not file.startswith(_LIBRARIES):
                return f"{place} ({inner})" if inner else place
            inner = inner or place
        frame = frame.f_back
    return inner or "somewhere in PyTorch"


def _short(file: str) -> str:
    """Return a path from the working folder, or from where libraries are."""
    path = Path(file)
    roots = (*map(Path, _LIBRARIES), Path.cwd())
    folders = [folder for folder in roots if path.is_relative_to(folder)]
    return str(path.relative_to(folders[-1])) if folders else file
