"""Commands of the planner: search, simulate, matmul, and the lists of what is built in.

Imports are local, so that a command waits for no more than it needs.
"""
# ruff: noqa: PLC0415

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.hwprofiles import Profile
    from meshwright.planner.options import (
        FileOptions,
        Given,
        JobOptions,
        JsonOptions,
        MatmulOptions,
        MoneyOptions,
        NameOptions,
        OutputOptions,
        ProfileOptions,
        RankingOptions,
    )
    from meshwright.planner.reports import Json

STEP_WIDTH = 100
SEARCH_WIDTH = 130
MATMUL_WIDTH = 130
NOTHING_FITS = 1
WRITTEN = "written  "
UNBOUNDED_COLUMNS = 10**6  # columns where a line goes to no terminal
# How far back an estimate of what is left looks; parts of long work differ in length.
ESTIMATE_WINDOW_S, LONG_ESTIMATE_WINDOW_S = 30.0, 3600.0
STREAMS = {"<stdout>": "standard output", "<stderr>": "standard error"}


def run_search(
    job: "JobOptions",
    layout: "Given",
    limits: "Given",
    ranking: "RankingOptions",
    money: "MoneyOptions",
    output: "OutputOptions",
) -> int:
    """Run ``meshwright search``; return its exit status."""
    from meshwright.planner.cli.growth import searched
    from meshwright.planner.cli.request import read_budget, read_setting
    from meshwright.planner.cli.search_request import read_limits
    from meshwright.planner.options import check_counts

    setting = read_setting(job)
    check_counts(ranking)
    pins = read_limits(setting, {**layout, **limits})
    budget = read_budget(money, setting.cluster)
    # Refused before the work, not after it.
    folder = check_outputs(output)
    written: tuple[str, ...] = ()
    with progress_bar() as progress:
        largest, result = searched(setting, pins, ranking, progress)
        if folder is not None:
            from meshwright.planner.reports import write_search

            tell(progress, "drawing pictures")
            written = write_search(result, folder, budget, largest)

    def document() -> "Mapping[str, Json]":
        from meshwright.planner.reports import search_document

        return search_document(result, budget, largest)

    def report() -> "RenderableType":
        from meshwright.planner.reports import search_report

        return search_report(result, budget, largest)

    show(output.json, document, report, SEARCH_WIDTH)
    print_written(output, written)
    return 0 if result.plans else NOTHING_FITS


def run_simulate(
    job: "JobOptions",
    layout: "Given",
    replication: "Given",
    files: "FileOptions",
    money: "MoneyOptions",
    output: "OutputOptions",
) -> int:
    """Run ``meshwright simulate``; return its exit status."""
    from meshwright.planner.changes import cheapest_changes
    from meshwright.planner.cli.buckets import with_bucket_size
    from meshwright.planner.cli.growth import simulated
    from meshwright.planner.cli.request import read_budget, read_setting
    from meshwright.planner.reports import check_file, new_file, step_document

    setting = with_bucket_size(read_setting(job, files.plan), replication)
    given = {**layout, **replication}
    budget = read_budget(money, setting.cluster)
    folder = check_outputs(output)
    written: tuple[str, ...] = ()
    trace = None if files.trace is None else check_file("--trace", files.trace)
    limit_bytes = setting.memory_limit_bytes
    with progress_bar() as progress:
        largest, result = simulated(setting, given, files.max, progress)
        changes = cheapest_changes(result, limit_bytes, progress)
        if folder is not None:
            from meshwright.planner.reports import write_step

            tell(progress, "drawing pictures")
            written = write_step(result, folder, budget, changes, largest)
        if trace is not None:
            from meshwright.simulator import write_chrome_trace

            tell(progress, "writing the trace")
            with new_file(trace) as path:
                write_chrome_trace(result, path)
    parts = result, budget, changes, largest

    def report() -> "RenderableType":
        from meshwright.planner.reports import step_report

        return step_report(*parts)

    show(output.json, lambda: step_document(*parts), report, STEP_WIDTH)
    print_written(output, written, files.trace)
    # A quantity of which no value fits ends as a search in which nothing fits.
    return NOTHING_FITS if largest is not None and largest.value is None else 0


def run_matmul(options: "MatmulOptions", output: "OutputOptions") -> int:
    """Run ``meshwright matmul``; return its exit status."""
    from meshwright.planner.matmul import matmul_document, matmul_report, read_study, write_matmul

    # Everything that can be refused is refused before anything is drawn.
    study = read_study(options)
    check_outputs(output)
    written = () if output.out is None else write_matmul(study, Path(output.out))
    show(output.json, lambda: matmul_document(study), lambda: matmul_report(study), MATMUL_WIDTH)
    print_written(output, written)
    return 0


def run_models(options: "NameOptions") -> int:
    """Run ``meshwright models``; return its exit status."""
    from meshwright.planner.reports import models_table

    return print_report(models_table(options.name), STEP_WIDTH)


def run_clusters(options: "ProfileOptions") -> int:
    """Run ``meshwright clusters``; return its exit status."""
    from meshwright.hwprofiles import load_cluster
    from meshwright.planner.reports import clusters_table

    if options.toml:
        return print_toml(options.name, load_cluster)
    return print_report(clusters_table(options.name), STEP_WIDTH)


def run_stacks(options: "ProfileOptions") -> int:
    """Run ``meshwright stacks``; return its exit status."""
    from meshwright.hwprofiles import load_stack
    from meshwright.planner.reports import stacks_table

    if options.toml:
        return print_toml(options.name, load_stack)
    return print_report(stacks_table(options.name), STEP_WIDTH)


def run_schedules(options: "NameOptions") -> int:
    """Run ``meshwright schedules``; return its exit status."""
    from meshwright.planner.reports import schedules_table

    return print_report(schedules_table(options.name), STEP_WIDTH)


def check_outputs(output: "OutputOptions") -> Path | None:
    """Return the folder of ``--out``, once it is sure that the results can be written.

    Raises:
        PlanError: If they cannot.
    """
    from meshwright.planner.reports import check_folder

    check_json(output)
    return None if output.out is None else check_folder(output.out, force=output.force)


def check_json(output: "JsonOptions") -> None:
    """Raise PlanError when the file of ``--json`` cannot be written."""
    from meshwright.planner.reports import check_file

    if output.json is not None and output.json != "-":
        check_file("--json", output.json)


def show(
    target: str | None,
    document: "Callable[[], Mapping[str, Json]]",
    report: "Callable[[], RenderableType]",
    width: int,
) -> None:
    """Write the document where ``--json`` says, and the report unless standard output is taken.

    Neither is made unasked: a document tells more of a search's plans than its table does.
    """
    from meshwright.planner.reports import json_text, write_whole

    if target == "-":
        write_text(sys.stdout, json_text(document()))
        return
    if target is not None:
        write_whole(Path(target), json_text(document()))
    print_report(report(), width)


def print_written(output: "JsonOptions", names: Sequence[str] = (), *files: str | None) -> None:
    """Print the paths that were written, unless standard output is taken.

    Args:
        output: Where results go.
        names: Files in its folder.
        files: Others.
    """
    from meshwright.hwprofiles import shown_path
    from meshwright.planner.options import OutputOptions

    if output.json == "-":
        return
    lines = [shown_path(Path(each)) for each in (output.json, *files) if each is not None]
    lines = [f"{WRITTEN}{each}" for each in lines]
    if isinstance(output, OutputOptions) and output.out is not None:
        lines += _folder_lines(WRITTEN + shown_path(Path(output.out)), names)
    write_text(sys.stdout, "".join(f"{line}\n" for line in lines))


def _folder_lines(folder: str, names: Sequence[str]) -> list[str]:
    """Return lines that name a folder's files, no wider than the terminal or COLUMNS."""
    if not names:
        return [folder]
    width, lines = get_terminal_size(fallback=(UNBOUNDED_COLUMNS, 0)).columns, [f"{folder}:"]
    for name in names:
        is_short = len(lines[-1]) + 1 + len(name) <= width
        lines[-1:] = [f"{lines[-1]} {name}"] if is_short else [lines[-1], " " * len(WRITTEN) + name]
    return lines


def tell(progress: Callable[[str, int, int], None] | None, what: str) -> None:
    """Report the start of a phase whose length nobody knows."""
    if progress is not None:
        progress(what, 0, 0)


def print_report(report: "RenderableType", width: int) -> int:
    """Print *report* and return the status of success.

    A terminal has its own width, which COLUMNS overrules; so it does elsewhere, where *width* is
    that of the report.
    """
    from rich.console import Console
    from rich.segment import Segments

    from meshwright.hwprofiles import shown_text

    # Printed into memory first: ends of lines are trimmed, and one write can fail as a whole.
    printed, on_terminal = StringIO(), sys.stdout.isatty()
    is_told = on_terminal or os.environ.get("COLUMNS", "").isdigit()
    console = Console(
        file=printed,
        force_terminal=on_terminal,
        width=None if is_told else width,
        markup=False,
        emoji=False,
        highlight=False,
    )
    # Colours are sequences that a terminal obeys; those of a text from a file are shown instead.
    plain = [
        each if each.control else each._replace(text=shown_text(each.text))
        for each in console.render(report)
    ]
    console.print(Segments(plain))
    # rich fills lines up to the width of the console.
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    write_text(sys.stdout, "\n".join(lines) + "\n", is_styled=True)
    return 0


def print_toml(name: str | None, load: "Callable[[str], Profile]") -> int:
    """Print a profile as a file; return the status of success.

    Raises:
        PlanError: If none is named.
    """
    from meshwright.hwprofiles import profile_toml
    from meshwright.simulator import PlanError

    if name is None:
        raise PlanError("--toml needs NAME: it shows one")
    write_text(sys.stdout, profile_toml(load(name)))
    return 0


@contextmanager
def progress_bar(*, estimates: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield the callback that work reports its progress to: a line on a terminal, None elsewhere.

    The line has what is being done, how much of it where that is known, the time so far, and with
    *estimates* how long the rest may take.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(24)]
    columns += [TextColumn("{task.fields[count]}"), TimeElapsedColumn()]
    if estimates:
        columns += [TextColumn("left"), TimeRemainingColumn()]
    # Cells of a sweep differ in length, so that their estimate looks further back.
    period_s = LONG_ESTIMATE_WINDOW_S if estimates else ESTIMATE_WINDOW_S
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, speed_estimate_period=period_s) as bar:
        tasks = {"starting": bar.add_task("starting", total=None, count="")}

        def report(what: str, done: int, total: int) -> None:
            # One bar at a time: that of a phase takes the place of the one before.
            if what not in tasks:
                bar.remove_task(tasks.popitem()[1])
                tasks[what] = bar.add_task(what, total=total or None, count="")
            count = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
            bar.update(tasks[what], completed=done, total=total or None, count=count)

        yield report


def write_text(stream: TextIO, text: str, *, is_styled: bool = False) -> None:
    """Write *text*, whatever letters the stream knows.

    Args:
        stream: Standard output or error.
        text: With its line ends.
        is_styled: Whether it has sequences of ours that a terminal obeys.

    Raises:
        OSError: If the stream takes no more; it names the stream.
    """
    from meshwright.hwprofiles import shown_text

    text = text if is_styled else shown_text(text)
    encoding = stream.encoding or "utf-8"
    try:
        # A stream of another encoding shows an escape instead of failing.
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except OSError as error:
        raise OSError(
            error.errno, error.strerror, STREAMS.get(getattr(stream, "name", ""))
        ) from None
