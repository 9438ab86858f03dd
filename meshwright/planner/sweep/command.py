"""Command ``meshwright sweep``."""

from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from meshwright.planner.cli import (
    NOTHING_FITS,
    STEP_WIDTH,
    check_json,
    print_written,
    progress_bar,
    read_budget,
    show,
    tell,
)
from meshwright.planner.options import (
    JobOptions,
    MoneyOptions,
    OutputOptions,
    SweepOptions,
    check_counts,
)
from meshwright.planner.sweep.files import write_sweep
from meshwright.planner.sweep.grid import Request, cells_of
from meshwright.planner.sweep.report import sweep_report
from meshwright.planner.sweep.result import sweep_document
from meshwright.planner.sweep.run import ExecutorFactory, run_cells, sweep_folder
from meshwright.planner.sweep.store import Store, manifest
from meshwright.planner.sweep.varied import read_words
from meshwright.planner.sweep.workers import dask_workers, local_processes, num_cores
from meshwright.simulator import PlanError


def run_sweep(
    job: JobOptions,
    options: SweepOptions,
    fields: Mapping[str, object],
    money: MoneyOptions,
    output: OutputOptions,
) -> int:
    """Run ``meshwright sweep``; return its exit status."""
    check_counts(options)
    # Without a cluster: each cell has the price of its own.
    budget = read_budget(money)
    request = Request(
        varied=read_words(options.vary or ()),
        job=job,
        fields=fields,
        plan=options.plan,
        is_weak=options.weak,
        is_simulation=options.simulate,
    )
    executors = _place(options)
    check_json(output)
    folder = None if output.out is None else sweep_folder(output.out, force=output.force)
    store: Store | None = None
    written: tuple[str, ...] = ()
    with progress_bar(estimates=True) as progress:
        tell(progress, "laying out cells")
        cells = cells_of(request)
        if folder is not None:
            store = Store(folder, manifest(request, cells), restarts=output.force)
        result = replace(run_cells(request, cells, store, executors, progress), budget=budget)
        if folder is not None:
            tell(progress, "drawing pictures")
            written = write_sweep(result, folder)
    show(output.json, lambda: sweep_document(result), lambda: sweep_report(result), STEP_WIDTH)
    print_written(output, written)
    return 0 if result.num_fitting else NOTHING_FITS


def _place(options: SweepOptions) -> ExecutorFactory:
    """Return the factory of the executor that runs cells.

    Raises:
        PlanError: If both processes and Dask are asked for.
    """
    if options.dask is None:
        return partial(local_processes, num_cores() if options.jobs is None else options.jobs)
    if options.jobs is not None:
        raise PlanError("--jobs and --dask contradict each other: the workers are Dask's")
    scheduler = options.dask

    def place(_count: int) -> AbstractContextManager[Executor]:
        return dask_workers(scheduler)

    return place
