"""Output files and folders, written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.hwprofiles import shown_path
from meshwright.planner.options import claim, scratch_folder
from meshwright.simulator import PlanError

# Written by an earlier search into the same folder; there may be more than the next one writes.
NUMBERED_PLANS = "plan-[0-9]*.json"
FOLDER_MODE = 0o755


def output_path(option: str, text: str) -> Path:
    """Return the path that an option gives.

    Raises:
        PlanError: If *text* can be no path.
    """
    if not text.strip() or "\0" in text:
        raise PlanError(f"{option} {text!r} is no path; allowed: the name of a file or folder")
    return Path(text)


def check_file(option: str, text: str) -> Path:
    """Return the path of a file to write.

    Raises:
        PlanError: If it could not be written: before the work, not after it.
    """
    path = output_path(option, text)
    shown = shown_path(path)
    try:
        _look_at(path)
        if path.is_dir():
            raise PlanError(f"{option} {shown} is a folder; allowed: a file")
        if not path.parent.is_dir():
            raise PlanError(f"{option} {shown}: there is no folder {shown_path(path.parent)}")
        target = path if path.exists() else path.parent
        if not os.access(target, os.W_OK):
            raise PlanError(f"{option} {shown} cannot be written: permission denied")
    except OSError as error:
        raise PlanError(f"{option} {shown} cannot be written: {error.strerror}") from None
    return path


def check_folder(text: str, *, force: bool) -> Path:
    """Return the path of a folder to write into.

    Args:
        text: Value of ``--out``; the folder need not exist.
        force: Accept a folder with files in it.

    Raises:
        PlanError: If it is no such folder, or is one in use.
    """
    path = output_path("--out", text)
    shown = shown_path(path)
    try:
        _look_at(path)
        if path.exists() and not path.is_dir():
            raise PlanError(f"--out {shown} is a file; allowed: a folder")
        if path.is_dir() and not force and any(path.iterdir()):
            raise PlanError(f"--out {shown} is not empty; allowed: a new folder, or --force")
        # The folder is made later: the nearest one that exists has to allow it.
        existing = next(each for each in path.absolute().parents if each.exists())
        if not existing.is_dir():
            raise PlanError(f"--out {shown}: {shown_path(existing)} is no folder")
        if not os.access(existing, os.W_OK):
            raise PlanError(f"--out {shown} cannot be written: permission denied")
        # From here on no other command writes there.
        claim(path, existing)
    except OSError as error:
        raise PlanError(f"--out {shown} cannot be written: {error.strerror}") from None
    return path


def _look_at(path: Path) -> None:
    """Raise OSError where *path* leads nowhere, as a loop of links does."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file, which a user named, takes its place in the end.

    If the block fails nothing does.  A link stays one, and a device or a pipe, such as /dev/stdout,
    is written to as it is.

    Raises:
        PlanError: If it cannot be written, such as on a full disk; nothing is left of it then.
    """
    path = Path(os.path.realpath(path))
    # /dev/stdout and pipes cannot be replaced by a rename.
    if path.exists() and not path.is_file():
        with _refusals_named(path):
            yield path
        return
    with output_file(path) as written:
        yield written


def write_whole(path: Path, text: str) -> None:
    """Write *text* to a file, all of it or nothing; raises as `new_file`."""
    with new_file(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file takes its place in an output folder, as in `new_file`.

    A link of that name is replaced: nobody asked for what it leads to to be written.
    """
    path = Path(os.path.realpath(path.parent)) / path.name
    with _scratch_folder(path) as scratch:
        written = scratch / path.name
        yield written
        written.replace(path)


def write_output(path: Path, text: str) -> None:
    """Write *text* to a file of an output folder, all of it or nothing; raises as `new_file`."""
    with output_file(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write into; it takes the place of *path* when the block ends well.

    Where *path* is a folder in use, its files are replaced one by one and others are kept, but
    for the numbered plans of an earlier search.

    Raises:
        PlanError: If it cannot be written, such as on a full disk; nothing is left of it then.
    """
    path = Path(os.path.realpath(path))
    with _refusals_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_folder(path) as scratch:
        # Renamed at the end, so that nobody finds a folder half written.
        written = scratch / "files"
        written.mkdir(mode=FOLDER_MODE)
        yield written
        if not path.is_dir() or not any(path.iterdir()):
            written.replace(path)
            return
        for stale in path.glob(NUMBERED_PLANS):
            stale.unlink()
        for file in sorted(written.iterdir()):
            file.replace(path / file.name)


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the names of the files in a folder, to tell what was written."""
    return tuple(sorted(each.name for each in folder.iterdir()))


@contextmanager
def _scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a folder beside *path*, on the same file system, and remove it at the end."""
    with _refusals_named(path), scratch_folder(path.parent) as scratch:
        yield scratch


@contextmanager
def _refusals_named(path: Path) -> Iterator[None]:
    """Name *path* where the system refuses a write in the block; a closed pipe passes."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(f"{shown_path(path)} cannot be written: {reason}") from None
