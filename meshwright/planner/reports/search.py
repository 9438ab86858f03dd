"""A search as text for a terminal: the best plans, the proof, what was refused and why."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.hwprofiles import GIBI, PS_PER_S, Strategy, format_bytes
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
    widest,
    yes_no,
)
from meshwright.planner.search import FrontierPoint, SearchResult
from meshwright.simulator import (
    ModelSpec,
    ParallelPlan,
    StepResult,
    TrainingJob,
)
from meshwright.simulator.layout import SEARCHED_FIELDS, PlanField, stages_rule

MAX_FRONTIER_LINES = 8
WORD_COLUMNS = {each.declaration.heading for each in SEARCHED_FIELDS if each.choices} | {"proven"}
HABIT = "-"  # a switch that the plan leaves to the stack
RESULT_COLUMNS = ("MFU", "GiB", "bubble", "comm s")
LIKE_COLUMN = " "
# What a narrow terminal goes without, the first first.
DISPENSABLE_COLUMNS = ("comm s", "bubble", "MFU")
SHORT_SAMPLES = {"tokens": "tok"}
TIME_COLUMN = "days"
COST_COLUMN = "cost USD"


def search_report(result: SearchResult, budget: Budget | None = None) -> RenderableType:
    """Return the report of a search.

    Args:
        result: The search.
        budget: Adds days and cost of a number of tokens to each plan.
    """
    place = f"{result.num_gpus:,} GPUs of {result.cluster.name}"
    parts: list[RenderableType] = [
        Text(headline(result.job, place, result.stack.name), style="bold"),
        facts_table([("job", job_text(result.job)), *changed_lines(result.cluster, result.stack)]),
        Text(),
    ]
    if result.plans:
        shared = _shared(result, [result.plans[place].plan for place in result.listed])
        parts += [*shared, PlansTable(result, budget), Text()]
    parts.append(facts_table(_facts(result)))
    if result.frontier:
        shown = f"memory against time, {len(result.frontier)} layouts that no other beats in both"
        parts += [
            Text(),
            Text(shown),
            *_shared(result, [each.plan for each in _thinned(result.frontier)]),
        ]
        parts.append(_frontier_table(result))
    if result.plans:
        parts += warning_lines(_first(result).warnings)
    return Group(*parts)


def proof_text(result: SearchResult) -> str:
    """Return what the search proves about its first plan."""
    if not result.plans:
        return f"none of {result.space_size:,} layouts fits"
    over = f"{result.space_size:,} layouts"
    if result.optimal:
        return f"proven optimal over {over}"
    return f"within {result.bound_gap_fraction:.1%} of the optimum over {over}"


def layout_text(plan: ParallelPlan, job: TrainingJob) -> str:
    """Return a plan in one line, for people."""
    servers = plan.parameter_server
    return (
        f"{degrees_text(plan)} vpp={plan.num_virtual_stages} "
        f"mb={plan.microbatch_size} {plan.schedule} {switches_text(plan, job)}"
        f"{'' if servers is None else f' servers={servers.servers}'}"
    )


def _facts(result: SearchResult) -> Iterator[tuple[str, str]]:
    yield "proof", proof_text(result)
    yield "searched", ", ".join(result.varied.searched) or "nothing"
    for reason, names in _held_texts(result):
        yield "held", f"{names} ({reason})"
    counts = f"{result.space_size:,} layouts, {result.feasible:,} feasible, "
    yield "space", f"{counts}{result.simulated:,} simulated"
    for reason in sorted(result.rejections, key=lambda name: (-result.rejections[name], name)):
        yield "rejected", f"{result.rejections[reason]:,} {reason}"
    if result.plans:
        yield from _fastest_facts(result)
        best = _first(result).plan
        kernel = f"attention={best.attention}, " if isinstance(result.job.model, ModelSpec) else ""
        yield "best", f"{kernel}stages of {format_stages(best.stages)} layers"
    if result.nearest is not None:
        yield "nearest", layout_text(result.nearest.plan, result.job)
        yield "lacks", format_bytes(result.nearest.lacks_bytes)
        yield from change_facts(result.nearest.changes)


def _shared(result: SearchResult, plans: Sequence[ParallelPlan]) -> list[RenderableType]:
    """Return a line of the fields that a table of *plans* leaves out, as all have the same."""
    plan, shown = plans[0], _shown_fields(result, plans)
    values = [
        (each.declaration.heading, value)
        for each in SEARCHED_FIELDS
        if each not in shown
        and (value := _value(result, plan, each)) is not None
        and not (each.declaration.axis and value == each.default)
    ]
    text = " ".join(f"{heading}={value_text(value)}" for heading, value in values)
    return [Text(f"all with {text}")] if values else []


def _fastest_facts(result: SearchResult) -> Iterator[tuple[str, str]]:
    """Say which plan the fastest is folded into, if it is."""
    best = result.plans[0]
    for place in result.listed:
        if best.plan in result.like[place]:
            listed = result.plans[place]
            faster = listed.step_ps / best.step_ps - 1
            differing = " ".join(
                f"{each.declaration.heading}={_text(_value(result, best.plan, each))}"
                for each in _shown_fields(result, [best.plan, listed.plan])
                if getattr(best.plan, each.name) != getattr(listed.plan, each.name)
            )
            yield "fastest", f"plan 1: plan {place + 1} with {differing}, {faster:.2%} faster"


def _held_texts(result: SearchResult) -> Iterator[tuple[str, str]]:
    """Yield each reason why fields were held, with their values."""
    held = result.varied.held
    for reason in dict.fromkeys(each.reason for each in held):
        texts = (
            each.name if each.value is None else f"{each.name}={value_text(each.value)}"
            for each in held
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


def _first(result: SearchResult) -> StepResult:
    """Return the plan in the first line of the table."""
    return result.plans[result.listed[0]]


@dataclass(frozen=True, slots=True)
class PlansTable:
    """The plans of a search, with as many columns as the terminal is wide."""

    result: SearchResult
    budget: Budget | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the widest table that fits, else the narrowest."""
        for left_out in range(len(DISPENSABLE_COLUMNS) + 1):
            table = self._table(DISPENSABLE_COLUMNS[:left_out])
            if widest(console, options, table) <= options.max_width:
                break
        yield table

    def _table(self, left_out: Collection[str]) -> Table:
        result, budget = self.result, self.budget
        money = [] if budget is None else _money_columns(budget, result.plans[0])
        sample = result.job.model.sample
        rates = ("step s", f"{SHORT_SAMPLES.get(sample, sample)}/s/GPU")
        plans = [result.plans[place].plan for place in result.listed]
        fields = _shown_fields(result, plans)
        heads = ("", *_layout_columns(result, fields), *rates, *RESULT_COLUMNS, *money)
        rows = [self._row(place, fields) for place in result.listed]
        likes = [_like_text(len(result.like[place])) for place in result.listed]
        if any(likes):
            heads += (LIKE_COLUMN,)
            rows = [[*row, like] for row, like in zip(rows, likes, strict=True)]
        kept = [place for place, head in enumerate(heads) if head not in left_out]
        table = _table(*(heads[place] for place in kept))
        for row in rows:
            table.add_row(*(row[place] for place in kept))
        return table

    def _row(self, place: int, fields: Sequence[PlanField]) -> list[str]:
        step, budget = self.result.plans[place], self.budget
        cells = [str(place + 1), *_layout_cells(self.result, step.plan, fields)]
        cells += _result_cells(step)
        return [*cells, *([] if budget is None else _money_cells(step, budget))]


def _like_text(count: int) -> str:
    return f"and {count} like it" if count else ""


def _frontier_table(result: SearchResult) -> Table:
    points = _thinned(result.frontier)
    fields = _shown_fields(result, [point.plan for point in points])
    table = _table("GiB", "step s", *_layout_columns(result, fields), "proven")
    for point in points:
        size, time = f"{point.device_bytes / GIBI:.1f}", f"{point.step_ps / PS_PER_S:.4g}"
        table.add_row(size, time, *_layout_cells(result, point.plan, fields), yes_no(point.proven))
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for name in names:
        justify: Literal["left", "right"] = "left" if name in WORD_COLUMNS else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _shown_fields(result: SearchResult, plans: Sequence[ParallelPlan]) -> list[PlanField]:
    """Return the fields that a table of *plans* shows: degrees, and what is not the same in all."""
    return [
        field
        for field in SEARCHED_FIELDS
        if (field.declaration.axis and field.declaration.is_basic)
        or len({_value(result, plan, field) for plan in plans}) > 1
    ]


def _value(result: SearchResult, plan: ParallelPlan, field: PlanField) -> object:
    """Return the value of a field in a table: of stages the rule, None where it is the stack's."""
    if field.name != "stages":
        return getattr(plan, field.name)
    return stages_rule(result.job, plan, result.stack)


def _layout_columns(result: SearchResult, fields: Sequence[PlanField]) -> tuple[str, ...]:
    """Return the heads of `_layout_cells`."""
    has_servers = result.stack.strategy is Strategy.PARAMETER_SERVER
    heads = tuple(str(each.declaration.heading) for each in fields)
    return (*heads, "servers") if has_servers else heads


def _layout_cells(
    result: SearchResult, plan: ParallelPlan, fields: Sequence[PlanField]
) -> list[str]:
    values = [_value(result, plan, each) for each in fields]
    if plan.parameter_server is not None:
        values.append(plan.parameter_server.servers)
    return [_text(value) for value in values]


def _result_cells(step: StepResult) -> list[str]:
    return [
        f"{step.step_time_s:.4g}",
        f"{step.tokens_per_s_per_gpu:,.0f}",
        f"{step.mfu_fraction:.1%}",
        f"{step.memory.device_bytes / GIBI:.1f}",
        f"{step.bubble_fraction:.1%}",
        f"{step.exposed_comm_s:.3g}",
    ]


def _money_cells(step: StepResult, budget: Budget) -> list[str]:
    run = budget.run(step)
    days = f"{run.days:,.1f}"
    return [days] if run.cost_usd is None else [days, f"{run.cost_usd:,.0f}"]


def _money_columns(budget: Budget, step: StepResult) -> list[str]:
    """Return the heads of `_money_cells`: no cost where no price is known."""
    has_price = budget.run(step).cost_usd is not None
    return [TIME_COLUMN, COST_COLUMN] if has_price else [TIME_COLUMN]


def _text(value: object) -> str:
    return HABIT if value is None else value_text(value)
