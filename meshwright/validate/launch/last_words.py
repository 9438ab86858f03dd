"""Failure records of a rank: on an exception, on SIGTERM, or when its launcher is gone."""

import faulthandler
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.hwprofiles import KIBI, ProfileError, format_bytes
from meshwright.simulator import PlanError
from meshwright.validate.launch.records import (
    FailureKind,
    RankFailure,
    kind_of_text,
    read_heartbeat,
    write_failure,
)
from meshwright.validate.launch.spec import RunPhase, RunSpec
from meshwright.validate.processes import starter

TERMINATED_STATUS = 128 + signal.SIGTERM
WATCH_S = 1.0


@contextmanager
def failures_kept(spec: RunSpec, rank: int) -> Iterator[None]:
    """Write why the block failed to the rank's failure file, and let the exception pass."""
    try:
        yield
    except Exception as error:
        kind = kind_of(error)
        message = str(error)
        if kind is FailureKind.OUT_OF_MEMORY:
            message = f"{_memory_words()}; {_first_line(message)}"
        missing = tuple(getattr(error, "ranks", ()))
        text = "".join(traceback.format_exception(error))
        _keep(spec, rank, kind, (type(error).__name__, message, text), missing)
        raise


def kind_of(error: Exception) -> FailureKind:
    """Return the kind of failure of an exception.

    >>> kind_of(RuntimeError("[tcp/pair.cc:547] Connection closed by peer [::1]:7")).value
    'peer lost'
    """
    if isinstance(error, PlanError | ProfileError):
        return FailureKind.MISTAKE
    no_memory = "can't allocate memory" in str(error) or "CUDA out of memory" in str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or no_memory:
        return FailureKind.OUT_OF_MEMORY
    if type(error).__name__ == "MissingRanksError":
        return FailureKind.MISSING
    return kind_of_text(str(error)) if isinstance(error, RuntimeError) else FailureKind.EXCEPTION


def watch_for_end(spec: RunSpec, rank: int) -> None:
    """End this process on SIGTERM or when its launcher is gone, and record why.

    A thread does it, since the main thread may be stuck in a call of a C++ library, where
    Python runs no signal handler.
    """
    reader, writer = os.pipe()
    # A signal handler must never wait for a full pipe.
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Without a handler SIGTERM would end the process before the thread can record it.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    arguments = (spec, rank, reader, starter())
    threading.Thread(target=_watch, args=arguments, daemon=True, name="watch for end").start()


def _watch(spec: RunSpec, rank: int, reader: int, parent: int) -> None:
    reason = ""
    while not reason:
        ready, _, _ = select.select([reader], [], [], WATCH_S)
        if ready and signal.SIGTERM in os.read(reader, 64):
            reason = "SIGTERM"
        elif os.getppid() != parent:
            reason = "its launcher is gone"
    heartbeat = read_heartbeat(spec.results, rank)
    if heartbeat is None or heartbeat.phase != RunPhase.DONE:
        _keep(spec, rank, FailureKind.TERMINATED, ("Terminated", reason, _all_threads()))
    sys.stdout.flush()
    sys.stderr.flush()
    # sys.exit would end this thread alone, and the main thread may be stuck.
    os._exit(TERMINATED_STATUS)


def _keep(
    spec: RunSpec,
    rank: int,
    kind: FailureKind,
    words: tuple[str, str, str],
    missing: tuple[int, ...] = (),
) -> None:
    heartbeat = read_heartbeat(spec.results, rank)
    exception, message, text = words
    failure = RankFailure(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        phase=heartbeat.phase if heartbeat else RunPhase.INIT,
        plan=heartbeat.plan if heartbeat else None,
        time_s=time.time(),
        kind=kind,
        exception=exception,
        message=message,
        traceback=text,
        missing=missing,
    )
    write_failure(failure, spec.results)


def _all_threads() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode("utf-8", "replace")


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or ["no message"])[0]


def _memory_words() -> str:
    """Return the bytes of the device's allocator, or without a device the process's peak."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        allocated = format_bytes(torch.cuda.memory_allocated())
        return f"{allocated} allocated, {format_bytes(torch.cuda.memory_reserved())} reserved"
    import resource  # noqa: PLC0415 - not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else KIBI
    return f"{format_bytes(peak * unit)} resident at its peak"
