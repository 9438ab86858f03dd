"""Locks of a process: claims on output folders, and scratch folders.

Imports are local: most commands write no folder.
"""
# ruff: noqa: PLC0415

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.hwprofiles import shown_path
from meshwright.simulator import PlanError

_claims: dict[Path, int] = {}  # of this process: descriptors by lock file


def claim(path: Path, folder: Path) -> None:
    """Keep other commands from writing to *path* until `release_claims`.

    The lock is that of a file in *folder*, which the system drops when its process ends in
    whatever way; a file that such a process left is taken over.

    Raises:
        PlanError: If another command has claimed it.
        OSError: If no lock can be had in *folder*.
    """
    import hashlib

    # Resolved, so that all spellings of a folder share one lock.
    real = os.path.realpath(path)
    mark = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
    lock = Path(os.path.realpath(folder)) / f".meshwright-{mark}.lock"
    # Again if the lock that was taken is of a file that its owner has removed.
    while lock not in _claims:
        # O_NOFOLLOW: a link that others left at this name is not followed.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(lock, flags, 0o666)
        if _lock(descriptor) is False:
            os.close(descriptor)
            raise PlanError(
                f"--out {shown_path(path)} is being written by another command; allowed: another "
                "folder, or the same when that one has ended"
            )
        with suppress(FileNotFoundError):
            if lock.stat().st_ino == os.fstat(descriptor).st_ino:
                _claims[lock] = descriptor
                return
        os.close(descriptor)  # its owner removed the file while we took the lock


def release_claims() -> None:
    """Release all claims of this process."""
    while _claims:
        lock, descriptor = _claims.popitem()
        # Removed before it is unlocked, so that whoever waits for it sees that it is gone.
        lock.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in *parent* that is removed when the block ends.

    A process that is killed leaves it; the next one that makes scratch in *parent* clears it.

    Raises:
        OSError: If it cannot be made.
    """
    import shutil

    _clear_scratch(parent)
    scratch, descriptor = _new_scratch(parent)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(descriptor)


def _new_scratch(parent: Path) -> tuple[Path, int]:
    """Return a new folder and a descriptor of it, locked where there are locks."""
    import tempfile

    while True:
        scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(), dir=parent))
        with suppress(FileNotFoundError):  # another took it for left, before the lock was ours
            descriptor = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
            if _lock(descriptor) is not False and scratch.exists():
                return scratch, descriptor
            os.close(descriptor)


def _clear_scratch(parent: Path) -> None:
    """Remove scratch that killed processes of this machine left in *parent*.

    The system drops a lock with its process, so what can be locked is nobody's. What cannot be,
    and that of other machines, whose locks may not be seen here, stays.
    """
    import shutil

    for scratch in parent.glob(f"{_scratch_prefix()}*"):
        with suppress(OSError):
            descriptor = os.open(
                scratch, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW
            )
            try:
                if _lock(descriptor):
                    shutil.rmtree(scratch, ignore_errors=True)
            finally:
                os.close(descriptor)


def _scratch_prefix() -> str:
    import hashlib
    import platform

    return f".meshwright-{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"


def _lock(descriptor: int) -> bool | None:
    """Lock an open file: True if it is locked now, None where there are no such locks."""
    try:
        import fcntl  # not on every system
    except ModuleNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have none
        return None
    return True
