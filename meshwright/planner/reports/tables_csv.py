"""Results as tables: one row a plan, one row a pipeline rank of each plan."""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.hwprofiles import PS_PER_S
from meshwright.planner.reports.money import Budget
from meshwright.simulator import ParallelPlan, StepResult
from meshwright.simulator.layout import PLAN_FIELDS

Row = Mapping[str, object]


def plans_csv(
    results: Sequence[StepResult],
    budget: Budget | None = None,
    likes: Sequence[Sequence[ParallelPlan]] | None = None,
) -> str:
    """Return a CSV with one row for each plan, best first, counted from 1.

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
    return _csv(rows)


def stages_csv(results: Sequence[StepResult]) -> str:
    """Return a CSV with the memory of each pipeline rank of each plan."""
    return _csv(
        [row for rank, result in enumerate(results, 1) for row in _stage_rows(rank, result)]
    )


def _csv(rows: Sequence[Row]) -> str:
    import pandas as pd  # noqa: PLC0415  (half a second that only tables need)

    text: str = pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")
    return text


def _plan_row(rank: int, result: StepResult, names: Sequence[str], budget: Budget | None) -> Row:
    plan, memory = result.plan, result.memory
    row: dict[str, object] = {
        "plan": rank,
        **_plan_cells(result, names),
        "step_time_s": result.step_time_s,
        "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
        "model_flops_per_s_per_gpu": result.model_flops_per_s_per_gpu,
        "mfu_fraction": result.mfu_fraction,
        "hfu_fraction": result.hfu_fraction,
        "bubble_fraction": result.bubble_fraction,
        "schedule_bubble_fraction": result.schedule_bubble_fraction,
        "exposed_comm_s": result.exposed_comm_s,
        "peak_bytes": memory.peak_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "device_bytes": memory.device_bytes,
        "fits": memory.fits,
    }
    if plan.parameter_server is not None:
        row["servers"] = plan.parameter_server.servers
    row |= {
        f"{category.value}_s": time_ps / PS_PER_S
        for category, time_ps in result.breakdown_ps.items()
    }
    if budget is not None:
        run = budget.run(result)
        row |= {"days": run.days, "gpu_hours": run.gpu_hours, "cost_usd": run.cost_usd}
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
        # Beside a mesh of ranks a row is a device, which holds or serves the whole model.
        layers = plan.stages if result.lanes else plan.stages[stage.stage :: plan.pp]
        yield {
            "plan": rank,
            "stage": stage.stage,
            "layers": sum(layers),
            "parameters_bytes": stage.parameters_bytes,
            "gradients_bytes": stage.gradients_bytes,
            "optimizer_states_bytes": stage.optimizer_states_bytes,
            "activations_bytes": stage.activations_bytes,
            "buffers_bytes": stage.buffers_bytes,
            "peak_bytes": stage.peak_bytes,
            "peak_time_s": stage.peak_time_ps / PS_PER_S,
            "peak_moment": stage.peak_moment,
            "largest_tensor": stage.largest_tensor,
        }
