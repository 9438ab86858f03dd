"""A sweep as text for a terminal: a line a cell."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.hwprofiles import GIBI
from meshwright.planner.reports import Column, ColumnTable, facts_table, layout_column, value_text
from meshwright.planner.sweep.outcome import Outcome
from meshwright.planner.sweep.result import SweepResult
from meshwright.simulator.layout import SEARCHED_FIELDS

NONE = "-"
SHORT = {"tokens": "tok"}
MOST_VALUES = 12  # of one thing that is varied, told in the heading
KNOWN = {
    "model": "model",
    "cluster": "cluster",
    "stack": "stack",
    "num_gpus": "GPUs",
    "global_batch_size": "batch",
    "seq_len": "length",
    "precision": "precision",
}
Row = Mapping[str, Any]
MEASURES: tuple[tuple[str, str, Callable[[Any], str], bool], ...] = (
    ("step s", "step_time_s", lambda value: f"{value:.4g}", True),
    ("{}/s/GPU", "tokens_per_s_per_gpu", lambda value: f"{value:,.0f}", False),
    ("MFU", "mfu_fraction", lambda value: f"{value:.1%}", False),
    ("GiB", "device_bytes", lambda value: f"{value / GIBI:.1f}", True),
    ("scaling", "scaling_efficiency", lambda value: f"{value:.1%}", False),
    ("days", "days", lambda value: f"{value:,.1f}", False),
    ("cost USD", "cost_usd", lambda value: f"{value:,.0f}", False),
)


def sweep_report(result: SweepResult) -> RenderableType:
    """Return the report of a sweep: what all cells share, a line each, and why some have none."""
    rows = result.rows
    parts: list[RenderableType] = [
        Text(repr(result)[1:-1].replace("SweepResult", "sweep"), style="bold"),
        facts_table(_facts(result, rows)),
        Text(),
        _table(result, rows),
    ]
    reasons = list(_reasons(rows))
    if reasons:
        parts += [Text(), facts_table(reasons)]
    return Group(*parts)


def _facts(result: SweepResult, rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield what is varied, and what all cells are known by."""
    for each in result.varied:
        texts = [value.text for value in each.values]
        more = [f"... {len(texts):,} in all"] if len(texts) > MOST_VALUES else []
        # As --vary takes them.
        sign = "; " if any("," in text for text in texts) else ", "
        yield "vary", f"{each.name} {sign.join([*texts[:MOST_VALUES], *more])}"
    shared = [
        f"{head} {rows[0][name]:,}" if isinstance(rows[0][name], int) else f"{head} {rows[0][name]}"
        for name, head in KNOWN.items()
        if len({row[name] for row in rows}) == 1 and rows[0][name] is not None
    ]
    yield "all", ", ".join(shared)


def _table(result: SweepResult, rows: Sequence[Row]) -> ColumnTable:
    columns = [Column(head="", cells=[str(row["cell"]) for row in rows], is_first=True)]
    heads = _heads([each.name for each in result.varied])
    for number, variation in enumerate(result.varied):
        cells = [cell.values[number].text for cell in result.cells]
        is_word = not all(type(value.content) in {int, float} for value in variation.values)
        columns.append(Column(head=heads[number], cells=cells, is_word=is_word, is_first=True))
    if result.is_weak and "global_batch_size" not in {each.column for each in result.varied}:
        batches = [f"{row['global_batch_size']:,}" for row in rows]
        columns.append(Column(head="batch", cells=batches, is_first=True))
    layout, shared = _layout(result, rows)
    return ColumnTable([*columns, *layout, *_measures(result, rows)], shared)


def _heads(names: Sequence[str]) -> list[str]:
    """Return the last word of each key, or the keys where that is one of several.

    >>> _heads(["gpus", "device.memory_bandwidth"])
    ['gpus', 'memory_bandwidth']
    """
    last = [name.rpartition(".")[2] for name in names]
    return last if len(set(last)) == len(last) else list(names)


def _layout(result: SweepResult, rows: Sequence[Row]) -> tuple[list[Column], list[str]]:
    """Return the columns of the layouts, and what all of them have in common."""
    varied = {each.column for each in result.varied}
    columns: list[Column] = []
    shared: list[str] = []
    with_layout = [row for row in rows if "step_time_s" in row]
    for field in SEARCHED_FIELDS:
        values = {_shown(row, field.name) for row in with_layout}
        if field.name in varied or field.name == "stages" or values <= {NONE}:
            continue
        declaration, head = field.declaration, str(field.declaration.heading)
        if len(values) == 1 and not (declaration.axis and declaration.is_basic):
            if not field.default_goes_without_saying or values != {str(field.default)}:
                shared.append(f"{head}={values.pop()}")
            continue
        cells = [_shown(row, field.name) for row in rows]
        columns.append(layout_column(field, cells))
    return columns, shared


def _shown(row: Row, name: str) -> str:
    value = row.get(name)
    return NONE if value in {None, ""} else value_text(value)


def _measures(result: SweepResult, rows: Sequence[Row]) -> Iterator[Column]:
    """Yield what the steps of cells come to, where one of them has it."""
    samples = {SHORT.get(each.sample, each.sample) for each in result.cells if each.sample}
    for unit, name, text, is_first in MEASURES:
        head = unit.format(next(iter(samples)) if len(samples) == 1 else "samples")
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            cells = [NONE if value is None else text(value) for value in values]
            yield Column(head=head, cells=cells, is_first=is_first)
    ends = {str(row["outcome"]) for row in rows}
    if ends != {Outcome.FITS}:
        cells = ["" if row["outcome"] == Outcome.FITS else row["outcome"] for row in rows]
        yield Column(head=" ", cells=cells, is_word=True, is_first=True)


def _reasons(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield each reason why cells have no layout that fits, with their numbers."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"] is not None:
            reasons.setdefault(f"{row['outcome']}: {row['reason']}", []).append(str(row["cell"]))
    for reason, numbers in reasons.items():
        yield ", ".join(numbers), reason
