"""The front door: the command ``meshwright``, and the public names of the packages behind it.

Imports are local: ``--version`` must not wait for numpy, nor a library user for typer and rich.

>>> from meshwright import load_model
>>> load_model("gpt3-175b").num_layers
96
"""
# ruff: noqa: PLC0415

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hwprofiles import (
        Attention,
        Cluster,
        Precision,
        ProfileError,
        Recompute,
        StackProfile,
        StageSplit,
        list_clusters,
        list_stacks,
        load_cluster,
        load_stack,
    )
    from planner import SearchResult, SpaceLimits, search
    from planner.options import (
        FileOptions,
        JobOptions,
        LayoutOptions,
        LimitOptions,
        MatmulOptions,
        MoneyOptions,
        NameOptions,
        OutputOptions,
        ReplicaOptions,
    )
    from planner.plan_file import Json
    from simulator import (
        ModelSpec,
        ParallelPlan,
        PlanError,
        StepResult,
        TrainingJob,
        list_models,
        load_model,
        resolve_stages,
        simulate,
    )

__all__ = [
    "Attention",
    "Cluster",
    "ModelSpec",
    "ParallelPlan",
    "PlanError",
    "Precision",
    "ProfileError",
    "Recompute",
    "SearchResult",
    "SpaceLimits",
    "StackProfile",
    "StageSplit",
    "StepResult",
    "TrainingJob",
    "list_clusters",
    "list_models",
    "list_stacks",
    "load_cluster",
    "load_model",
    "load_stack",
    "main",
    "resolve_stages",
    "search",
    "simulate",
]

STEP_WIDTH = 100
SEARCH_WIDTH = 130
MATMUL_WIDTH = 130
NOTHING_FITS, USER_MISTAKE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def __getattr__(name: str) -> object:
    """Return a public name of one of the packages, imported when first asked for."""
    if name in __all__:
        for package in ("hwprofiles", "simulator", "planner"):
            module = import_module(package)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return __all__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: The words after ``meshwright``; by default those of the process.

    >>> main(["--version"])
    meshwright 0.1.0
    0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read the output has gone; leave nothing for the flush at exit to fail on.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        return BROKEN_PIPE
    return status


def _run(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        from hwprofiles.version import VERSION

        _write(sys.stdout, f"meshwright {VERSION}\n")
        return 0
    from hwprofiles import ProfileError
    from planner.options import run_command_line
    from simulator import PlanError

    try:
        return run_command_line(_commands(), words)
    except (PlanError, ProfileError) as error:
        return _complain(str(error), USER_MISTAKE)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _complain(f"{error.strerror or error}{where}", USER_MISTAKE)


def _complain(message: str, status: int) -> int:
    """Print *message* as one plain line and return *status*."""
    line = " ".join(message.split())
    printable = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    _write(sys.stderr, f"error: {printable}\n")
    return status


def _write(stream: TextIO, text: str) -> None:
    """Write *text*, whatever letters the stream knows."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


def _commands() -> dict[str, Callable[..., int]]:
    from planner import options
    from planner.options import as_command

    shared = (options.JobOptions, options.LayoutOptions)
    after = (options.MoneyOptions, options.OutputOptions)
    return {
        "search": as_command(_search, *shared, options.LimitOptions, *after),
        "simulate": as_command(
            _simulate, *shared, options.ReplicaOptions, options.FileOptions, *after
        ),
        "matmul": as_command(_matmul, options.MatmulOptions, options.OutputOptions),
        "models": as_command(_models, options.NameOptions),
        "clusters": as_command(_clusters, options.NameOptions),
        "stacks": as_command(_stacks, options.NameOptions),
        "schedules": as_command(_schedules, options.NameOptions),
    }


def _search(
    job: "JobOptions",
    layout: "LayoutOptions",
    limits: "LimitOptions",
    money: "MoneyOptions",
    output: "OutputOptions",
) -> int:
    """Find the fastest layouts of a model on a cluster, with a proof."""
    from planner import search
    from planner.documents import search_document
    from planner.request import read_budget, read_limits, read_setting
    from planner.result_files import write_search
    from planner.search_report import search_report

    setting = read_setting(job)
    pins = read_limits(setting, layout, limits)
    budget = read_budget(money, setting.cluster)
    folder = _check_outputs(output)
    with _progress_bar() as progress:
        result = search(
            setting.job,
            setting.cluster,
            setting.stack,
            setting.world_size,
            limits=pins,
            memory_limit_bytes=setting.memory_limit_bytes,
            top=limits.top,
            progress=progress,
        )
    if folder is not None:
        write_search(result, folder, budget)
    _show(output.json, search_document(result, budget), search_report(result, budget), SEARCH_WIDTH)
    return 0 if result.plans else NOTHING_FITS


def _simulate(
    job: "JobOptions",
    layout: "LayoutOptions",
    replicas: "ReplicaOptions",
    files: "FileOptions",
    money: "MoneyOptions",
    output: "OutputOptions",
) -> int:
    """Simulate one training step of a layout."""
    from planner.buckets import with_buckets
    from planner.documents import step_document
    from planner.output_folder import check_file, new_file
    from planner.report import step_report
    from planner.request import read_budget, read_setting, resolve_plan
    from planner.result_files import write_step
    from simulator import simulate
    from simulator.chrome_trace import write_chrome_trace

    setting = with_buckets(read_setting(job, files.plan), replicas)
    plan = resolve_plan(setting, layout, replicas)
    budget = read_budget(money, setting.cluster)
    folder = _check_outputs(output)
    trace = None if files.trace is None else check_file("--trace", files.trace)
    limit_bytes = setting.memory_limit_bytes
    result = simulate(
        setting.job, plan, setting.cluster, setting.stack, memory_limit_bytes=limit_bytes
    )
    if folder is not None:
        write_step(result, folder, budget)
    if trace is not None:
        with new_file(trace) as path:
            write_chrome_trace(result, path)
    _show(output.json, step_document(result, budget), step_report(result, budget), STEP_WIDTH)
    return 0


def _matmul(options: "MatmulOptions", output: "OutputOptions") -> int:
    """Multiply matrices on several devices: every signature, its bytes and its time."""
    from planner.matmul_report import matmul_document, matmul_report, write_matmul
    from planner.matmul_study import read_study

    study = read_study(options)
    _check_outputs(output)
    if output.out is not None:
        write_matmul(study, Path(output.out))
    _show(output.json, matmul_document(study), matmul_report(study), MATMUL_WIDTH)
    return 0


def _models(options: "NameOptions") -> int:
    """List the built-in models, or show one."""
    from planner.catalogue import models_table

    return _print(models_table(options.name), STEP_WIDTH)


def _clusters(options: "NameOptions") -> int:
    """List the built-in clusters, or show one with its device, links and sources."""
    from planner.catalogue import clusters_table

    return _print(clusters_table(options.name), STEP_WIDTH)


def _stacks(options: "NameOptions") -> int:
    """List the built-in software stacks, or show one with its sources."""
    from planner.catalogue import stacks_table

    return _print(stacks_table(options.name), STEP_WIDTH)


def _schedules(options: "NameOptions") -> int:
    """List the pipeline schedules, or show one."""
    from planner.catalogue import schedules_table

    return _print(schedules_table(options.name), STEP_WIDTH)


def _check_outputs(output: "OutputOptions") -> Path | None:
    """Return the folder of ``--out``, once it is sure that the results can be written.

    Raises:
        PlanError: If they cannot.
    """
    from planner.output_folder import check_file, check_folder

    if output.json is not None and output.json != "-":
        check_file("--json", output.json)
    return None if output.out is None else check_folder(output.out, force=output.force)


def _show(
    target: str | None, document: "Mapping[str, Json]", report: "RenderableType", width: int
) -> None:
    """Write the document where ``--json`` says, and the report unless standard output is taken."""
    from planner.documents import json_text
    from planner.output_folder import new_file

    if target == "-":
        _write(sys.stdout, json_text(document))
        return
    if target is not None:
        with new_file(Path(target)) as path:
            path.write_text(json_text(document), encoding="utf-8", newline="\n")
    _print(report, width)


def _print(report: "RenderableType", width: int) -> int:
    """Print *report*, to a terminal in its own width; return the status of success."""
    from rich.console import Console

    console = Console(
        width=None if sys.stdout.isatty() else width, markup=False, emoji=False, highlight=False
    )
    with console.capture() as capture:
        console.print(report)
    _write(sys.stdout, "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")
    return 0


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield what a search reports its progress to: a bar on a terminal, elsewhere nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        yield report


if __name__ == "__main__":
    sys.exit(main())
