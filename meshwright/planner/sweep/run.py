"""The public function of this package: run the cells of a sweep, or those that are left."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from meshwright.planner.cli import read_budget
from meshwright.planner.options import MoneyOptions, release_claims
from meshwright.planner.reports import check_folder
from meshwright.planner.search import Progress
from meshwright.planner.sweep.files import write_sweep
from meshwright.planner.sweep.grid import Cell, Request, Task, cells_of, tasks_of
from meshwright.planner.sweep.outcome import Document, refused
from meshwright.planner.sweep.result import SweepResult
from meshwright.planner.sweep.store import Store, is_sweep_folder, manifest
from meshwright.planner.sweep.varied import read_options, variations
from meshwright.planner.sweep.workers import finished, local_processes

RUNNING = "running cells"
ExecutorFactory = Callable[[int], AbstractContextManager[Executor | None]]


def sweep(  # noqa: PLR0913 -- the public entry; all but the first is keyword-only
    vary: Mapping[str, Sequence[object]],
    *,
    weak: bool = False,
    simulate: bool = False,
    jobs: int = 1,
    executor: Executor | None = None,
    out: str | Path | None = None,
    force: bool = False,
    tokens: float | None = None,
    price: float | None = None,
    progress: Progress | None = None,
    **options: object,
) -> SweepResult:
    """Return the best layout of every combination of what is varied.

    Args:
        vary: Values by the name of an option of ``search``, as ``{"gpus": [64, 128]}``, or by the
            key of a fact, as ``{"device.memory_bandwidth": ["3 TB/s", "4 TB/s"]}``.
        weak: Grow the batch with the GPUs that are varied, from the first number of them.
        simulate: Simulate the one layout that the options give, instead of a search.
        jobs: Processes of this machine, which do not run the caller's script again.
        executor: What runs the cells instead, such as that of a Dask client.
        out: A folder that keeps each cell when it is finished: the same sweep goes on in it. At the
            end it gets what ``meshwright sweep --out`` writes.
        force: Begin anew in a folder in use.
        tokens: Of a whole run, to tell its days and its cost.
        price: Of a GPU, in US dollars an hour; by default that of its cluster.
        progress: Called with what is being done, how many cells are finished, and of how many.
        options: Those of ``search`` by name, as ``model="gpt2", cluster="dgx-a100",
            global_batch=64, max_tp=8, set=["loss=fused"]``; of ``simulate`` with *simulate*.

    Raises:
        PlanError: If an option is at fault, a value is that of no cell, or *out* is in use.
        ProfileError: If a cluster or a stack is at fault.

    >>> found = sweep({"gpus": [8, 16]}, model="gpt2", cluster="dgx-a100", global_batch=16,
    ...               tp=1, pp=1, zero=1, micro_batch=1)
    >>> [row["dp"] for row in found.rows]
    [8, 16]
    """
    budget = read_budget(MoneyOptions(tokens=tokens, price=None if price is None else str(price)))
    job, fields, plan = read_options(options)
    request = Request(
        varied=variations(list(vary.items())),
        job=job,
        fields=fields,
        plan=plan,
        is_weak=weak,
        is_simulation=simulate,
    )
    cells = cells_of(request)
    try:
        folder = None if out is None else sweep_folder(str(out), force=force)
        executors = partial(local_processes, jobs) if executor is None else _lent(executor)
        store = None
        if folder is not None:
            store = Store(folder, manifest(request, cells), restarts=force)
        result = run_cells(request, cells, store, executors, progress)
        result = replace(result, budget=budget)
        if folder is not None:
            write_sweep(result, folder)
    finally:
        release_claims()
    return result


def _lent(executor: Executor) -> ExecutorFactory:
    """Return a factory that lends *executor*, and leaves it open."""
    return lambda _count: nullcontext(executor)


def sweep_folder(text: str, *, force: bool) -> Path:
    """Return the folder of a sweep, claimed; it may be in use by a sweep.

    Raises:
        PlanError: If it cannot be written, or is in use by anything else.
    """
    return check_folder(text, force=force or is_sweep_folder(Path(text)))


def run_cells(
    request: Request,
    cells: Sequence[Cell],
    store: Store | None,
    executors: ExecutorFactory,
    progress: Progress | None,
) -> SweepResult:
    """Run the cells that are not finished, and return all.

    Args:
        request: What is asked for.
        cells: Its cells.
        store: What keeps them, if anything does.
        executors: Makes who runs so many, entered only if there is something to run.
        progress: As of `sweep`.
    """
    tasks = dict(tasks_of(cells))
    documents = dict(store.finished(list(tasks))) if store is not None else {}
    tell = progress or (lambda _what, _done, _total: None)
    tell(RUNNING, len(documents), len(tasks))
    # Cells that an earlier run finished are not run again.
    remaining = {number: task for number, task in tasks.items() if number not in documents}
    if remaining:
        with executors(len(remaining)) as executor:
            for number, document in finished(executor, remaining):
                if store is not None:
                    store.keep(number, document)
                documents[number] = document
                tell(RUNNING, len(documents), len(tasks))
    return SweepResult(
        varied=request.varied,
        cells=tuple(cells),
        documents=tuple(_document(each, documents) for each in cells),
        is_weak=request.is_weak,
    )


def _document(cell: Cell, documents: Mapping[int, Document]) -> Document:
    return documents[cell.number] if isinstance(cell.task, Task) else refused(str(cell.task))
