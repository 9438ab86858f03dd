"""Results as tables: one row a plan, one row a pipeline rank of each plan."""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.hwprofiles import PS_PER_S, Cluster, StackProfile
from meshwright.planner.reports.documents import COST, FIGURES, named
from meshwright.planner.reports.money import Budget
from meshwright.planner.reports.plan_file import job_fields
from meshwright.simulator import ResolvedPlan, StepResult, TrainingJob
from meshwright.simulator.layout import PLAN_FIELDS

Row = Mapping[str, object]


def plans_csv(
    results: Sequence[StepResult],
    budget: Budget | None = None,
    likes: Sequence[Sequence[ResolvedPlan]] | None = None,
) -> str:
    """Return a CSV with one row for each plan: `plan_rows`."""
    return table_csv(plan_rows(results, budget, likes))


def plan_rows(
    results: Sequence[StepResult],
    budget: Budget | None = None,
    likes: Sequence[Sequence[ResolvedPlan]] | None = None,
) -> list[Row]:
    """Return one row for each plan, best first, counted from 1.

    A switch has a column where one of the plans does not leave it to the stack.

    Args:
        results: The plans.
        budget: Adds days and cost of a number of tokens.
        likes: Of a search: what is folded into each, of which ``like`` is the number.
    """
    names = [
        name
        for name, field in PLAN_FIELDS.items()
        if field.declaration.is_basic
        or (
            field.declaration.heading
            and any(getattr(each.plan, name) != field.default for each in results)
        )
    ]
    rows = [_plan_row(rank, result, names, budget) for rank, result in enumerate(results, 1)]
    if likes is not None:
        rows = [{**row, "like": len(like)} for row, like in zip(rows, likes, strict=True)]
    return rows


def known_by(job: TrainingJob, cluster: Cluster, stack: StackProfile, num_gpus: int) -> Row:
    """Return the columns that every row of every table has, so that tables can be joined."""
    return {
        "model": job.model.name,
        "cluster": cluster.name,
        "stack": stack.name,
        "num_gpus": num_gpus,
        **job_fields(job),
    }


def _known_by(step: StepResult) -> Row:
    return known_by(step.job, step.cluster, step.stack, step.plan.world_size)


def stages_csv(results: Sequence[StepResult]) -> str:
    """Return a CSV with the memory of each pipeline rank of each plan."""
    return table_csv(
        [row for rank, result in enumerate(results, 1) for row in _stage_rows(rank, result)]
    )


def table_csv(rows: Sequence[Row]) -> str:
    """Return rows as a CSV; what a row lacks of another's columns is empty in it."""
    # As objects: a column with gaps, or with bytes and seconds, would turn into floats otherwise.
    import pandas as pd  # noqa: PLC0415  (half a second that only tables need)

    text: str = pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")
    return text


def _plan_row(rank: int, result: StepResult, names: Sequence[str], budget: Budget | None) -> Row:
    plan = result.plan
    row: dict[str, object] = {
        "plan": rank,
        **_known_by(result),
        **_plan_cells(result, names),
        **named(result, *(name for name in FIGURES if name != "tokens_per_s")),
        **named(result.memory, "peak_bytes", "reserved_bytes", "device_bytes", "fits"),
    }
    if plan.parameter_server is not None:
        row["servers"] = plan.parameter_server.servers
    row |= {
        f"{category.value}_s": time_ps / PS_PER_S
        for category, time_ps in result.breakdown_ps.items()
    }
    if budget is not None:
        row |= named(budget.run(result), *COST)
    return row


def _plan_cells(result: StepResult, names: Sequence[str]) -> Row:
    """Return the fields of *names*, the number of microbatches behind their size."""
    cells: dict[str, object] = {}
    for name in names:
        value = getattr(result.plan, name)
        is_list = isinstance(value, tuple)
        cells[name] = " ".join(str(count) for count in value) if is_list else value
        if name == "microbatch_size":
            cells["num_microbatches"] = result.num_microbatches
    return cells


def _stage_rows(rank: int, result: StepResult) -> Iterator[Row]:
    plan = result.plan
    for stage in result.memory.by_stage:
        # Without a mesh of ranks a row is a device, which holds or serves the whole model.
        layers = plan.stages if result.lanes else plan.stages[stage.stage :: plan.pp]
        yield {
            "plan": rank,
            **_known_by(result),
            "stage": stage.stage,
            "layers": sum(layers),
            **{f"{name}_bytes": size for name, size in stage.terms.items()},
            "peak_bytes": stage.peak_bytes,
            "peak_time_s": stage.peak_time_ps / PS_PER_S,
            **named(stage, "peak_moment", "largest_tensor"),
        }
