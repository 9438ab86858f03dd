"""A search as text for a terminal: the best plans, the proof, what was refused and why."""

from collections.abc import Iterator
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.hwprofiles import GIBI, PS_PER_S, Strategy, format_bytes
from meshwright.planner.reports.facts import changed_lines
from meshwright.planner.reports.money import Budget
from meshwright.planner.reports.step import (
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
from meshwright.planner.search import FrontierPoint, SearchResult
from meshwright.simulator import ModelSpec, ParallelPlan, StepResult, TrainingJob
from meshwright.simulator.layout import SEARCHED_FIELDS

MAX_FRONTIER_LINES = 8
LAYOUT_COLUMNS = tuple(str(each.declaration.heading) for each in SEARCHED_FIELDS)
WORD_COLUMNS = {each.declaration.heading for each in SEARCHED_FIELDS if each.choices} | {"proven"}
RESULT_COLUMNS = ("MFU", "GiB", "bubble", "comm s")
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
        parts += [_plans_table(result, budget), Text()]
    parts.append(facts_table(_facts(result)))
    if result.frontier:
        shown = f"memory against time, {len(result.frontier)} layouts that no other beats in both"
        parts += [Text(), Text(shown), _frontier_table(result)]
    if result.plans:
        parts += warning_lines(result.plans[0].warnings)
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
    counts = f"{result.space_size:,} layouts, {result.feasible:,} feasible, "
    yield "space", f"{counts}{result.simulated:,} simulated"
    for reason in sorted(result.rejections, key=lambda name: (-result.rejections[name], name)):
        yield "rejected", f"{result.rejections[reason]:,} {reason}"
    if result.plans:
        best = result.plans[0].plan
        kernel = f"attention={best.attention}, " if isinstance(result.job.model, ModelSpec) else ""
        yield "best", f"{kernel}stages of {format_stages(best.stages)} layers"
    if result.nearest is not None:
        yield "nearest", layout_text(result.nearest.plan, result.job)
        yield "lacks", format_bytes(result.nearest.lacks_bytes)
        yield from (("change", change) for change in result.nearest.changes)


def _thinned(points: tuple[FrontierPoint, ...]) -> list[FrontierPoint]:
    """Return the first, the last and evenly spaced points between."""
    last = len(points) - 1
    if last < MAX_FRONTIER_LINES:
        return list(points)
    steps = MAX_FRONTIER_LINES - 1
    return [points[index * last // steps] for index in range(MAX_FRONTIER_LINES)]


def _plans_table(result: SearchResult, budget: Budget | None) -> Table:
    money = [] if budget is None else _money_columns(budget, result.plans[0])
    sample = result.job.model.sample
    rates = ("step s", f"{SHORT_SAMPLES.get(sample, sample)}/s/GPU")
    table = _table("", *_layout_columns(result), *rates, *RESULT_COLUMNS, *money)
    for rank, step in enumerate(result.plans, 1):
        cells = [str(rank), *_layout_cells(step.plan), *_result_cells(step)]
        table.add_row(*cells, *([] if budget is None else _money_cells(step, budget)))
    return table


def _frontier_table(result: SearchResult) -> Table:
    table = _table("GiB", "step s", *_layout_columns(result), "proven")
    for point in _thinned(result.frontier):
        size, time = f"{point.device_bytes / GIBI:.1f}", f"{point.step_ps / PS_PER_S:.4g}"
        table.add_row(size, time, *_layout_cells(point.plan), yes_no(point.proven))
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for name in names:
        justify: Literal["left", "right"] = "left" if name in WORD_COLUMNS else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _layout_columns(result: SearchResult) -> tuple[str, ...]:
    """Return the heads of `_layout_cells`."""
    has_servers = result.stack.strategy is Strategy.PARAMETER_SERVER
    return (*LAYOUT_COLUMNS, "servers") if has_servers else LAYOUT_COLUMNS


def _layout_cells(plan: ParallelPlan) -> list[str]:
    values = [getattr(plan, each.name) for each in SEARCHED_FIELDS]
    if plan.parameter_server is not None:
        values.append(plan.parameter_server.servers)
    return [value_text(value) for value in values]


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
