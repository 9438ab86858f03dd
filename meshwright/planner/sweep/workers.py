"""Executors of cells: this process, local ones, any executor, or Dask's workers."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

from meshwright.planner.sweep.grid import Task
from meshwright.planner.sweep.outcome import Document, run_task
from meshwright.simulator import PlanError

P = ParamSpec("P")
T = TypeVar("T")
ENDED_STATUS = 143  # as after SIGTERM
CONNECT_S = 10.0


def num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def finished(
    executor: Executor | None, tasks: Mapping[int, Task]
) -> Iterator[tuple[int, Document]]:
    """Yield the number and the document of each task as it ends.

    Args:
        executor: What runs tasks; None for this process.
        tasks: By number.

    Raises:
        PlanError: If a process of the executor ends of itself.
    """
    if executor is None:
        for number, task in tasks.items():
            yield number, run_task(task)
        return
    futures: dict[Future[Document], int] = {}
    try:
        for number, task in tasks.items():
            futures[executor.submit(run_task, task)] = number
        for future in as_completed(list(futures)):
            # What is told is let go: Dask would compute it again where its holder is lost.
            yield futures.pop(future), future.result()
    except BrokenExecutor:
        if isinstance(executor, _Processes):
            allowed = "the same command again, which goes on, with fewer --jobs"
        else:
            allowed = "an executor of fewer, in a script under if __name__ == '__main__'"
        raise PlanError(
            "a process that ran cells has ended of itself, for lack of memory perhaps; "
            f"allowed: {allowed}"
        ) from None
    finally:
        for future in futures:
            future.cancel()


@contextmanager
def local_processes(jobs: int, num_tasks: int) -> Iterator[Executor | None]:
    """Yield an executor of new processes, which end with the block, or with this process.

    They are started afresh, not forked: threads and files of this one are none of theirs, and the
    script that runs here is not run again there.

    Args:
        jobs: Processes that may be started; of one nothing is, this process runs the tasks.
        num_tasks: What there is to run.
    """
    count = min(jobs, num_tasks)
    # A process of its own would only cost its start.
    if count == 1:
        yield None
        return
    context = get_context("spawn")
    child_end, parent_end = context.Pipe(duplex=False)
    pool = _Processes(count, mp_context=context, initializer=_begin, initargs=(child_end,))
    try:
        yield pool
        pool.shutdown()
    finally:
        # What is left of an interrupted block: its processes end within a cell, not after it.
        parent_end.close()
        pool.shutdown(cancel_futures=True)
        child_end.close()


class _Processes(ProcessPoolExecutor):
    """Pool of processes, which a terminal's Ctrl-C does not reach."""

    def submit(self, run: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        with _no_interrupt_for_children(), script_runs_once():
            return super().submit(run, *args, **named)


def _begin(parent: Connection) -> None:
    """End this process as soon as the other end of *parent* is closed, however that came."""

    def watch() -> None:
        parent.poll(None)
        os._exit(ENDED_STATUS)

    threading.Thread(target=watch, daemon=True, name="watch for end").start()


@contextmanager
def script_runs_once() -> Iterator[None]:
    """Let processes that are spawned in the block not import the program of this one.

    multiprocessing tells a new process to import ``__main__`` by its name or its file, for what is
    pickled may be defined there: a script that is not guarded by ``if __name__ == "__main__"`` runs
    again in each, and starts processes in turn. What runs there is of this package.
    """
    main = sys.modules["__main__"]
    attributes = {
        name: value for name, value in vars(main).items() if name in {"__spec__", "__file__"}
    }
    try:
        main.__spec__ = None
        vars(main).pop("__file__", None)
        yield
    finally:
        vars(main).update(attributes)


@contextmanager
def _no_interrupt_for_children() -> Iterator[None]:
    """Keep Ctrl-C, which a terminal sends to all processes of a command, for this one alone.

    A process inherits what is blocked, and ours comes when it is no more.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def dask_workers(scheduler: str) -> Iterator[Executor]:
    """Yield an executor of the workers of a Dask scheduler.

    Args:
        scheduler: Its address, as ``tcp://node:8786``, or the file that it wrote.

    Raises:
        PlanError: If Dask is not installed, or there is no such scheduler.
    """
    try:
        from distributed import Client  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError:
        raise PlanError(
            "--dask needs distributed; allowed: pip install 'meshwright[dask]'"
        ) from None
    try:
        if Path(scheduler).is_file():
            client = Client(scheduler_file=scheduler, timeout=CONNECT_S, set_as_default=False)
        else:
            client = Client(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise PlanError(f"--dask {scheduler}: no scheduler answers: {error}") from None
    with client:
        yield client.get_executor()
