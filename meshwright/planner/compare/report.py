"""A comparison as text and as a document."""

from collections.abc import Iterator, Sequence
from typing import cast

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.hwprofiles import GIBI, PS_PER_S
from meshwright.planner.compare.comparison import (
    Comparison,
    Terms,
    differences,
    memory_terms,
    time_terms,
)
from meshwright.planner.reports import (
    Column,
    ColumnTable,
    Json,
    layout_column,
    step_columns,
    step_document,
    value_text,
)
from meshwright.simulator import StepResult
from meshwright.simulator.layout import SEARCHED_FIELDS, PlanField, stages_rule

MILLI = 1e-3


def comparison_document(comparison: Comparison) -> dict[str, Json]:
    """Return the document of a comparison: each step, and its differences to the first."""
    first, *others = comparison.steps
    return {
        "names": list(comparison.names),
        **({"refused": dict(comparison.refused)} if comparison.refused else {}),
        "steps": [
            {
                **step_document(step),
                "time_terms_s": _seconds(time_terms(step)),
                "memory_terms_bytes": cast("dict[str, Json]", dict(memory_terms(step))),
            }
            for step in comparison.steps
        ],
        "differences": [
            {
                "name": name,
                "step_time_s": (other.step_ps - first.step_ps) / PS_PER_S,
                "time_terms_s": _seconds(_difference(time_terms(other), time_terms(first))),
                "device_bytes": other.memory.device_bytes - first.memory.device_bytes,
                "memory_terms_bytes": cast(
                    "dict[str, Json]", _difference(memory_terms(other), memory_terms(first))
                ),
            }
            for name, other in zip(comparison.names[1:], others, strict=True)
        ],
    }


def comparison_report(comparison: Comparison) -> RenderableType:
    """Return the report of a comparison: layouts, times and memory."""
    steps, names = comparison.steps, comparison.names
    # One unit for all steps, so that columns compare.
    longest_s = max(step.step_time_s for step in steps)
    unit, scale = ("s", 1.0) if longest_s >= 1 else ("ms", MILLI)
    first = Column(head="", cells=names, is_word=True, is_first=True)
    times = comparison.rows(time_terms) | {"step": tuple(step.step_ps for step in steps)}
    sizes = comparison.rows(memory_terms)
    # The sum of the terms goes last, as below a column of figures.
    sizes |= {"device": tuple(step.memory.device_bytes for step in steps)}
    return Group(
        ColumnTable(
            [first, *_setting_columns(comparison), *_layout_columns(steps), *_result_columns(steps)]
        ),
        Text(),
        terms_table(f"time, {unit}", names, times, PS_PER_S * scale),
        Text(),
        terms_table("memory of the fullest, GiB", names, sizes, GIBI),
        *(Text(f"\nrefused  {name}: {why}") for name, why in comparison.refused.items()),
    )


def terms_table(
    title: str, names: Sequence[str], rows: dict[str, tuple[int, ...]], scale: float
) -> ColumnTable:
    """Return a table with a row a term, a column a step, and one for each difference to the first.

    Args:
        title: What the terms are of, and their unit.
        names: Of the steps.
        rows: What each step has of each term; the last row is the sum.
        scale: Of a unit.
    """
    words = [name.replace("_", " ") for name in rows]
    columns = [Column(head=title, cells=words, is_word=True, is_first=True)]
    values = list(zip(*rows.values(), strict=True))
    for number, name in enumerate(names):
        cells = [f"{value / scale:.3f}" for value in values[number]]
        columns.append(Column(head=name, cells=cells, is_first=True))
    for number, name in enumerate(names[1:]):
        more = [differences(each)[number] / scale for each in rows.values()]
        columns.append(Column(head=f"{name} more", cells=[f"{value:+.3f}" for value in more]))
    return ColumnTable(columns)


def _setting_columns(comparison: Comparison) -> Iterator[Column]:
    """Yield columns of job, cluster and stack where steps differ and their names do not say it."""
    steps = comparison.steps
    facts = {
        "model": [step.job.model.name for step in steps],
        "cluster": [step.cluster.name for step in steps],
        "stack": [step.stack.name for step in steps],
        "GPUs": [f"{step.plan.world_size:,}" for step in steps],
        "batch": [step.job.batch_text for step in steps],
        "precision": [str(step.job.precision) for step in steps],
    }
    for head, cells in facts.items():
        # What the name of a column says is not said twice.
        if len(set(cells)) > 1 and cells != list(comparison.names):
            yield Column(head=head, cells=cells, is_word=head != "GPUs", is_layout=True)


def _layout_columns(steps: Sequence[StepResult]) -> Iterator[Column]:
    """Yield the degrees of all axes, and the other fields in which the plans differ."""
    for field in SEARCHED_FIELDS:
        cells = [_value_text(step, field) for step in steps]
        if field.declaration.axis or len(set(cells)) > 1:
            yield layout_column(field, cells)


def _value_text(step: StepResult, field: PlanField) -> str:
    value = getattr(step.plan, field.name)
    if field.name == "stages":
        # The rule compares plans of different pipeline ranks, lists of layers do not.
        value = stages_rule(step.job, step.plan, step.stack)
    return "-" if value in {None, ()} else value_text(value)


def _result_columns(steps: Sequence[StepResult]) -> list[Column]:
    samples = dict.fromkeys(step.job.model.sample for step in steps)
    columns = step_columns(steps, f"{'|'.join(samples)}/s/GPU")
    fits = ["yes" if step.memory.fits else "NO" for step in steps]
    if "NO" in fits:
        columns.append(Column(head="fits", cells=fits, is_word=True, is_first=True))
    return columns


def _difference(terms: Terms, others: Terms) -> dict[str, int]:
    return {name: terms[name] - others[name] for name in terms}


def _seconds(terms: Terms) -> dict[str, Json]:
    return {name: time_ps / PS_PER_S for name, time_ps in terms.items()}
