"""A search as text for a terminal: the best plans, the proof, what was refused and why."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.hwprofiles import GIBI, PS_PER_S, Strategy, counted, format_bytes
from meshwright.planner.reports.columns import Column, ColumnTable
from meshwright.planner.reports.facts import changed_lines
from meshwright.planner.reports.money import Budget
from meshwright.planner.reports.step import (
    change_facts,
    degrees_text,
    facts_table,
    format_stages,
    headline,
    job_text,
    switches_text,
    value_text,
    warning_lines,
    yes_no,
)
from meshwright.planner.search import FrontierPoint, Held, SearchResult
from meshwright.planner.space import LACKS_MEMORY, waste_hints
from meshwright.simulator import ModelSpec, ParameterServer, ResolvedPlan, StepResult, TrainingJob
from meshwright.simulator.layout import SEARCHED_FIELDS, PlanField, stages_rule, without_defaults

if TYPE_CHECKING:
    from meshwright.planner.largest import Largest

MAX_FRONTIER_LINES = 8
WORD_COLUMNS = {each.declaration.heading for each in SEARCHED_FIELDS if each.choices} | {"proven"}
DEFAULT_CELL = "-"  # a field that the plan leaves to the stack
SHORT_SAMPLES = {"tokens": "tok"}
TIME_COLUMN = "days"
COST_COLUMN = "cost USD"
Row: TypeAlias = Mapping[str, object]
"""Fields of a plan by name, as a table shows them."""


def search_report(
    result: SearchResult, budget: Budget | None = None, largest: "Largest | None" = None
) -> RenderableType:
    """Return the report of a search.

    Args:
        result: The search.
        budget: Adds days and cost of a number of tokens to each plan.
        largest: The largest value of a quantity that fits, if it was asked for.
    """
    devices = f"{counted(result.num_gpus, 'GPU')} of {result.cluster.name}"
    verdict = () if result.verdict is None else (*result.verdict.lines, "")
    parts: list[RenderableType] = [
        *map(Text, verdict),
        Text(headline(result.job, devices, result.stack.name), style="bold"),
        facts_table([("job", job_text(result.job)), *changed_lines(result.cluster, result.stack)]),
        Text(),
    ]
    if result.plans:
        parts += [_plans_table(result, budget), Text()]
    largest_facts = [] if largest is None else [("largest", str(largest))]
    parts.append(facts_table([*largest_facts, *_facts(result)]))
    parts += _frontier_parts(result)
    if result.plans:
        parts += warning_lines(result.plans[0].warnings)
    hints = waste_hints(result.job, result.cluster, result.num_gpus)
    return Group(*parts, *(Text(f"hint: {each}") for each in hints))


def proof_text(result: SearchResult) -> str:
    """Return the proof of the first plan in words."""
    if not result.plans:
        return f"none of {result.space_size:,} layouts fits"
    over = counted(result.space_size, "layout")
    if result.optimal:
        return f"proven optimal over {over}"
    return f"within {result.bound_gap_fraction:.1%} of the optimum over {over}"


def layout_text(plan: ResolvedPlan, job: TrainingJob) -> str:
    """Return a plan in one line, for people."""
    servers = plan.parameter_server
    return (
        f"{degrees_text(plan)} vpp={plan.num_virtual_stages} "
        f"mb={plan.microbatch_size} {plan.schedule} {switches_text(plan, job)}"
        f"{'' if servers is None else f' servers={servers.servers}'}"
    )


def _facts(result: SearchResult) -> Iterator[tuple[str, str]]:
    yield "proof", proof_text(result)
    yield from _launch_facts(result)
    yield "searched", ", ".join(result.varied.searched) or "nothing"
    for reason, names in _reasons(result.varied.held):
        yield "held", f"{names} ({reason})"
    for reason, names in _reasons(result.varied.left_out):
        yield "left out", f"{names} ({reason})"
    laid_out, least = "", ""
    if not result.is_counted:
        laid_out, least = f"{result.looked_at:,} laid out, ", "at least "
    counts = f"{counted(result.space_size, 'layout')}, {laid_out}{least}{result.feasible:,}"
    yield "space", f"{counts} feasible, {result.simulated:,} simulated"
    for reason in sorted(result.rejections, key=lambda name: (-result.rejections[name], name)):
        at_least = least if reason == LACKS_MEMORY else ""
        yield "rejected", f"{at_least}{result.rejections[reason]:,} {reason}"
    if result.plans:
        yield from _fastest_facts(result)
        best = result.plans[0].plan
        kernel = f"attention={best.attention}, " if isinstance(result.job.model, ModelSpec) else ""
        yield "best", f"{kernel}stages of {format_stages(best.stages)}"
    if result.nearest is not None:
        yield "nearest", layout_text(result.nearest.plan, result.job)
        yield "lacks", format_bytes(result.nearest.lacks_bytes)
        if result.verdict is None:
            yield from change_facts(result.nearest.changes)


def _launch_facts(result: SearchResult) -> Iterator[tuple[str, str]]:
    """Yield the framework that launches the plans, and a faster plan that it cannot launch."""
    if result.launcher:
        yield "launch", f"each plan as it stands, with {result.launcher}"
    if result.not_launched:
        yield "launch", f"no plan as it stands: {result.not_launched}"
    faster = result.unlaunchable
    if faster is not None:
        time_s = faster.step_ps / PS_PER_S
        gain = f", {1 - faster.step_ps / result.plans[0].step_ps:.1%} less" if result.plans else ""
        why = "; ".join(faster.refusals)
        layout = layout_text(faster.plan, result.job)
        yield "not launched", f"{time_s:.4g} s{gain}, with {layout}: {why}"


def _shared(rows: Sequence[Row]) -> list[str]:
    """Return the fields that a table of *rows* leaves out, as all have the same."""
    shown_fields = _shown_fields(rows)
    return [
        f"{each.declaration.heading}={value_text(value)}"
        for each in SEARCHED_FIELDS
        if each not in shown_fields
        and (value := rows[0][each.name]) not in {None, ()}
        and not (each.default_goes_without_saying and value == each.default)
    ]


def _fastest_facts(result: SearchResult) -> Iterator[tuple[str, str]]:
    """Say which plan the fastest is folded into, if it is."""
    best = result.plans[0]
    for index in result.listed:
        if best.plan in result.like[index]:
            listed = result.plans[index]
            faster = listed.step_ps / best.step_ps - 1
            rows = [_row(result, each.plan) for each in (best, listed)]
            differing = " ".join(
                f"{each.declaration.heading}={_cell_text(rows[0][each.name])}"
                for each in _shown_fields(rows)
                if getattr(best.plan, each.name) != getattr(listed.plan, each.name)
            )
            yield "fastest", f"plan 1: plan {index + 1} with {differing}, {faster:.2%} faster"


def _reasons(fields: Sequence[Held]) -> Iterator[tuple[str, str]]:
    """Yield each reason of fixed fields, or of excluded values, with these."""
    for reason in dict.fromkeys(each.reason for each in fields):
        texts = (
            each.name if each.value is None else f"{each.name}={value_text(each.value)}"
            for each in fields
            if each.reason == reason
        )
        yield reason, ", ".join(texts)


def _thinned(points: tuple[FrontierPoint, ...]) -> list[FrontierPoint]:
    """Return the first, the last and evenly spaced points between."""
    last = len(points) - 1
    if last < MAX_FRONTIER_LINES:
        return list(points)
    steps = MAX_FRONTIER_LINES - 1
    return [points[index * last // steps] for index in range(MAX_FRONTIER_LINES)]


def _plans_table(result: SearchResult, budget: Budget | None) -> ColumnTable:
    """Return the plans of a search, the fastest first, also where a simpler one stands for it."""
    steps = result.plans
    rows = [_row(result, each.plan) for each in steps]
    sample = result.job.model.sample
    columns = [
        _column("", [str(index + 1) for index in range(len(steps))], is_first=True),
        *_layout_columns(rows),
        *_server_columns(result, [step.plan for step in steps]),
        *step_columns(steps, f"{SHORT_SAMPLES.get(sample, sample)}/s/GPU"),
        *([] if budget is None else _money_columns(budget, steps)),
    ]
    likes = [
        _like_text(len(like)) if index in result.listed else "the fastest"
        for index, like in enumerate(result.like)
    ]
    if any(likes):
        columns.append(Column(head=" ", cells=likes, is_word=True))
    return ColumnTable(columns, _shared(rows))


def _like_text(count: int) -> str:
    return f"and {count} like it" if count else ""


def _frontier_parts(result: SearchResult) -> Iterator[RenderableType]:
    """Yield the curve of memory against time, and what of it is left out."""
    if not result.frontier:
        return
    points, is_proven = _thinned(result.frontier), all(each.proven for each in result.frontier)
    layouts = f"{counted(len(result.frontier), 'layout')} that no other beats in both"
    shown = f"; {len(points)} shown" if len(points) < len(result.frontier) else ""
    yield Text()
    yield Text(f"memory against time, {layouts}{', proven' if is_proven else ''}{shown}")
    yield _frontier_table(result, points, is_proven=is_proven)
    if result.num_below:
        least = "" if result.is_counted else "at least "
        below = f"{counted(result.num_below, 'layout')} below {_gib_text(result.frontier[0])} GiB"
        yield Text(f"left out: {least}{below}, as their steps take too many passes to simulate")


def _gib_text(point: FrontierPoint) -> str:
    return f"{point.device_bytes / GIBI:.1f}"


def _frontier_table(
    result: SearchResult, points: Sequence[FrontierPoint], *, is_proven: bool
) -> ColumnTable:
    """Return *points* of the curve; where not all are proven with what is known of each."""
    rows = [_row(result, each.plan) for each in points]
    columns = [
        _column("GiB", [_gib_text(point) for point in points], is_first=True),
        _column("step s", [f"{point.step_ps / PS_PER_S:.4g}" for point in points], is_first=True),
        *_layout_columns(rows),
        *_server_columns(result, [each.plan for each in points]),
    ]
    if not is_proven:
        columns.append(_column("proven", [_proven_text(point) for point in points]))
    return ColumnTable(columns, _shared(rows))


def _proven_text(point: FrontierPoint) -> str:
    return yes_no(point.proven) if point.proven else f"within {point.bound_gap_fraction:.1%}"


def _column(head: str, cells: Sequence[str], *, is_first: bool = False) -> Column:
    return Column(head=head, cells=cells, is_word=head in WORD_COLUMNS, is_first=is_first)


def _shown_fields(rows: Sequence[Row]) -> list[PlanField]:
    """Return the fields that a table of *rows* shows: degrees, and what is not the same in all."""
    return [
        field
        for field in SEARCHED_FIELDS
        if (field.declaration.axis and field.declaration.is_basic)
        or len({row[field.name] for row in rows}) > 1
    ]


def _row(result: SearchResult, plan: ResolvedPlan) -> Row:
    """Return the fields of a plan in a table: of stages the rule, None where it is the stack's."""
    fields_set = without_defaults(result.job, result.stack, plan)
    row = {each.name: getattr(fields_set, each.name) for each in SEARCHED_FIELDS}
    return {**row, "stages": stages_rule(result.job, plan, result.stack)}


def _layout_columns(rows: Sequence[Row]) -> Iterator[Column]:
    """Yield a column for each field that is shown."""
    for field in _shown_fields(rows):
        yield layout_column(field, [_cell_text(row[field.name]) for row in rows])


def _server_columns(result: SearchResult, plans: Sequence[ResolvedPlan]) -> Iterator[Column]:
    if result.stack.strategy is Strategy.PARAMETER_SERVER:
        servers = (plan.parameter_server or ParameterServer() for plan in plans)
        yield _column("servers", [str(each.servers) for each in servers])


def layout_column(field: PlanField, cells: Sequence[str]) -> Column:
    """Return the column of a field of plans; those of axes come first."""
    return Column(
        head=str(field.declaration.heading),
        cells=cells,
        is_word=bool(field.choices),
        is_layout=True,
        is_first=field.declaration.axis is not None,
    )


def step_columns(steps: Sequence[StepResult], rate: str) -> list[Column]:
    """Return the columns of the results of steps; time and memory come first."""
    cells = [
        ("step s", [f"{step.step_time_s:.4g}" for step in steps]),
        (rate, [f"{step.tokens_per_s_per_gpu:,.0f}" for step in steps]),
        ("MFU", [f"{step.mfu_fraction:.1%}" for step in steps]),
        ("GiB", [f"{step.memory.device_bytes / GIBI:.1f}" for step in steps]),
        ("bubble", [f"{step.bubble_fraction:.1%}" for step in steps]),
        ("comm s", [f"{step.exposed_comm_s:.3g}" for step in steps]),
    ]
    return [_column(head, each, is_first=head in {"step s", "GiB"}) for head, each in cells]


def _money_columns(budget: Budget, steps: Sequence[StepResult]) -> Iterator[Column]:
    """Yield days and cost; no cost where no price is known."""
    runs = [budget.run(step) for step in steps]
    yield _column(TIME_COLUMN, [f"{run.days:,.1f}" for run in runs])
    if budget.price_usd_per_gpu_hour is not None:
        yield _column(COST_COLUMN, [f"{run.cost_usd:,.0f}" for run in runs])


def _cell_text(value: object) -> str:
    return DEFAULT_CELL if value is None else value_text(value)
