"""A claim on a folder to write: one command at a time has it, from the first look to its end."""

import hashlib
import os
from contextlib import suppress
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
    real = os.path.realpath(path)
    mark = hashlib.sha256(os.fsencode(real)).hexdigest()[:12]
    lock = Path(os.path.realpath(folder)) / f".meshwright-{mark}.lock"
    while lock not in _claims:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if not _is_locked(descriptor):
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
    """Let others write again."""
    while _claims:
        lock, descriptor = _claims.popitem()
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Lock an open file unless another has; where there are no such locks, all is well."""
    try:
        import fcntl  # noqa: PLC0415 - not on every system
    except ModuleNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have none
        return True
    return True
