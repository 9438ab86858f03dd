"""Processes that outlive what started them."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "MESHWRIGHT_TEST_MARK"


def is_alive(pid: int) -> bool:
    """Return whether a process runs: one that ended and that nobody asked for does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def marked(mark: str) -> list[int]:
    """Return the processes that run with *mark* in their environment, the lowest number first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # another's, or gone
            continue
    return sorted(pid for pid in found if is_alive(pid))


def left_running(pids: Callable[[], list[int]], within_s: float) -> list[int]:
    """Return which of *pids* still run after a while, and end them."""
    until = time.monotonic() + within_s
    while (left := [pid for pid in pids() if is_alive(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left
