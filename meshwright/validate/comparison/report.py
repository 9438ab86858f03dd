"""A validation as tables for a terminal, as a page and as a JSON document."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.hwprofiles import Offload, counted, format_time
from meshwright.planner.reports import (
    Json,
    SavedPlan,
    job_fields,
    json_text,
    named,
    new_folder,
    plan_document,
    plan_fields,
)
from meshwright.validate.comparison.checks import (
    ONE_MEMORY,
    PEAK,
    PEAK_TOLERANCE,
    Check,
    CheckUnit,
    CheckVerdict,
)
from meshwright.validate.comparison.validation import RankKind, Validation
from meshwright.validate.launch import RunFailure, rank_path
from meshwright.validate.ranks import num_processes, write_measurement

COLUMNS = ("quantity", "predicted", "measured", "difference", "verdict")
MOST_FAILURES = 20
HOW = {
    "fake": "one process as each rank, tensors without data: PyTorch operators are counted",
    "gloo": "a process for each rank on CPUs",
    "nccl": "a process and a GPU for each rank",
}


class Section(NamedTuple):
    """A title and rows of `COLUMNS`."""

    title: str
    rows: list[tuple[str, ...]]


def sections(validation: Validation) -> list[Section]:
    """Return the tables: one for each kind of rank, one for the run."""
    found = [Section(kind.title, _rank_rows(kind)) for kind in validation.shown_kinds()]
    if validation.run_checks:
        found.append(Section("the run", [_row(each) for each in validation.run_checks]))
    return found


def head_lines(validation: Validation) -> list[str]:
    """Return the head of a report: model, layout, backend and microbatches."""
    saved = validation.saved
    plan, job = saved.plan, saved.job
    few, whole = validation.num_microbatches_run, validation.num_microbatches
    many = f"all microbatches of a step were run, {whole} a rank"
    if few < whole:
        many = f"{few} of {whole} microbatches were run; the counts scale exactly with their number"
    servers = num_processes(plan, saved.stack) - plan.world_size
    with_servers = f" and {servers:,} server{'s' if servers > 1 else ''}" if servers > 0 else ""
    size = f"{counted(plan.world_size, 'GPU')}{with_servers} of {saved.cluster.name}"
    degrees = " ".join(f"{axis}={degree}" for axis, degree in plan.degrees.items())
    way = f" cp_type={plan.cp_type}" if plan.cp_type else ""
    way += f" ep={plan.ep} etp={plan.expert_tp}" if plan.ep > 1 else ""
    fields = f"zero_stage={plan.zero_stage} microbatch_size={plan.microbatch_size}{way}"
    return [
        f"{job.model.name}, plan for {size}, stack {saved.stack.name}",
        f"layout   {degrees} vpp={plan.num_virtual_stages} {fields}, {job.precision}",
        f"backend  {validation.backend}: {HOW[validation.backend]}",
        f"batch    {many}",
    ]


def closing_lines(validation: Validation) -> list[str]:
    """Return the notes on reported rows, and the verdict."""
    lines = [f"note: {reason}" for reason in _notes(validation)]
    others = validation.others()
    if others:
        lines.append(f"{len(others):,} more ranks were compared and are not shown")
    failures = list(validation.failures())
    if not failures:
        return [*lines, f"all exact quantities agree, {_peak_words(validation)}"]
    lines.append(f"quantities that do not agree: {len(failures)}")
    lines += [f"  {whose}: {_failure(check)}" for whose, check in failures[:MOST_FAILURES]]
    if len(failures) > MOST_FAILURES:
        lines.append(f"  and {len(failures) - MOST_FAILURES} more")
    return lines


def validation_report(validation: Validation) -> RenderableType:
    """Return a validation as tables for a terminal."""
    parts: list[RenderableType] = [Text(line) for line in head_lines(validation)]
    for section in sections(validation):
        table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
        for index, name in enumerate((section.title, *COLUMNS[1:])):
            is_number = 0 < index < len(COLUMNS) - 1
            table.add_column(
                name,
                justify="right" if is_number else "left",
                no_wrap=index > 0,
                overflow="fold",
            )
        for row in section.rows:
            table.add_row(*row)
        parts += [Text(""), table]
    parts += [Text(""), *(Text(line) for line in closing_lines(validation))]
    return Group(*parts)


def validation_page(validation: Validation) -> str:
    """Return a validation as a page of Markdown."""
    lines = ["# Validation", "", *(f"    {line}" for line in head_lines(validation))]
    for section in sections(validation):
        lines += ["", f"## {section.title}", ""]
        lines += _pipes(COLUMNS), _pipes(["---", *["---:"] * 3, "---"])
        lines += [_pipes(row) for row in section.rows]
    lines += ["", *(f"    {line}" for line in closing_lines(validation))]
    return "\n".join(lines) + "\n"


def validation_document(validation: Validation) -> dict[str, Json]:
    """Return a validation as JSON, with every kind of rank."""
    return {
        **saved_fields(validation.saved),
        **named(validation, "backend", "num_microbatches", "num_microbatches_run", "agrees"),
        "ranks": [
            {
                "ranks": list(kind.ranks),
                "shown": kind.shown,
                "checks": [check_fields(each) for each in kind.checks],
            }
            for kind in validation.kinds
        ],
        "run": [check_fields(each) for each in validation.run_checks],
    }


def saved_fields(saved: SavedPlan) -> dict[str, Json]:
    """Return the compared plan with its model, job, cluster and stack as JSON."""
    return {
        "model": saved.job.model.name,
        "job": job_fields(saved.job),
        "cluster": saved.cluster.name,
        "stack": saved.stack.name,
        "plan": plan_fields(saved.plan),
    }


def failure_document(failure: RunFailure) -> dict[str, Json]:
    """Return the failure of a run as JSON."""
    return {
        "agrees": False,
        "failure": {
            **named(failure, "rank", "phase", "kind", "cause"),
            "others": list(failure.others),
        },
    }


def write_validation(validation: Validation, folder: Path) -> None:
    """Write plan.json, report.md, validation.json and each rank's measurement."""
    with new_folder(folder) as files:
        texts = {
            "plan.json": json_text(plan_document(validation.saved)),
            "report.md": validation_page(validation),
            "validation.json": json_text(validation_document(validation)),
        }
        for name, text in texts.items():
            (files / name).write_text(text, encoding="utf-8", newline="\n")
        for rank, measurement in sorted(validation.measurements.items()):
            write_measurement(measurement, rank_path(files, rank, "json"))


def check_fields(check: Check) -> dict[str, Json]:
    """Return a check as JSON."""
    values = ("predicted", "measured", "difference_fraction")
    return named(check, "quantity", "unit", *values, "verdict", "reason")


def _rank_rows(kind: RankKind) -> list[tuple[str, ...]]:
    """Return a row a check; collectives that agree are one row together."""
    calls = [check for check in kind.checks if check.unit is CheckUnit.CALLS]
    equal = [check for check in calls if check.verdict is CheckVerdict.PASSED]
    rows: list[tuple[str, ...]] = []
    for check in kind.checks:
        # All calls that agree are one row, in the place of the first.
        if calls and check is calls[0] and equal:
            count = f"{sum(each.measured for each in equal):,.0f}"
            name = f"calls of collectives ({len(equal)} kind{'s' if len(equal) > 1 else ''})"
            rows.append((name, count, count, "0", CheckVerdict.PASSED))
        if check not in equal:
            rows.append(_row(check))
    return rows


def _row(check: Check) -> tuple[str, ...]:
    predicted = "" if check.predicted is None else _text(check.predicted, check.unit)
    return (
        check.quantity,
        predicted,
        _text(check.measured, check.unit),
        _difference(check),
        check.verdict,
    )


def _text(value: float, unit: CheckUnit) -> str:
    match unit:
        case CheckUnit.SECONDS:
            return format_time(value)
        case CheckUnit.NATS:
            return f"{value:.6f}"
        case CheckUnit.FLOPS | CheckUnit.CALLS | CheckUnit.BYTES | CheckUnit.UPDATES:
            return f"{value:,.0f}"


def _difference(check: Check) -> str:
    """Return the difference; a small one is not rounded to 0.

    >>> _difference(Check(quantity="x", unit=CheckUnit.BYTES, predicted=10**6, measured=10**6 + 3))
    '+0.0003%'
    """
    fraction = check.difference_fraction
    if fraction is None:
        return ""
    if fraction == 0:
        return "0"
    return f"{fraction:+.1%}" if abs(fraction) >= 0.01 else f"{100 * fraction:+.1g}%"


def _failure(check: Check) -> str:
    predicted = "nothing" if check.predicted is None else _text(check.predicted, check.unit)
    found = f"{predicted} predicted, {_text(check.measured, check.unit)} measured"
    return f"{check.quantity}: {found}; {check.reason}"


def _notes(validation: Validation) -> list[str]:
    """Return the reasons of the run's reported rows, each once."""
    return list(
        dict.fromkeys(
            check.reason
            for check in validation.run_checks
            if check.verdict is CheckVerdict.REPORTED and check.reason
        )
    )


def _peak_words(validation: Validation) -> str:
    if validation.backend == "gloo" and validation.saved.plan.offload is not Offload.NONE:
        return f"{ONE_MEMORY}: peak live bytes are at most those of both"
    peaks = [check for kind in validation.kinds for check in kind.checks if check.quantity == PEAK]
    kept = " and what gloo may hold" if any(check.reason for check in peaks) else ""
    return f"peak live bytes within {PEAK_TOLERANCE:.1%}{kept}"


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
