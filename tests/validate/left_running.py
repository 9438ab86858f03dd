"""Processes that outlive what started them, for tests that end it."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def left_running(pids: Callable[[], list[int]], within_s: float) -> list[int]:
    """Return which of *pids* still run after a while, and end them."""
    until = time.monotonic() + within_s
    while (left := [pid for pid in pids() if is_alive(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left
