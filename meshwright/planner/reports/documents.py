"""Results as JSON documents: the keys that `--json` promises.

No wall-clock figure and no order of a set enters a document: equal results give equal bytes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from meshwright.hwprofiles import PS_PER_S, Cluster, Source, StackProfile, changed_facts
from meshwright.planner.changes import Change
from meshwright.planner.reports.money import Budget
from meshwright.planner.reports.plan_file import Json, job_fields, plan_fields
from meshwright.planner.search import (
    FrontierPoint,
    Held,
    Nearest,
    SearchResult,
    Unlaunchable,
    Verdict,
)
from meshwright.records import Record
from meshwright.simulator import (
    CONVENTION,
    AsyncRun,
    MemoryResult,
    StageMemory,
    StepResult,
    TrainingJob,
    count_parameters,
)
from meshwright.simulator.blocks import model_flops

if TYPE_CHECKING:
    from meshwright.planner.largest import Largest

# Figures of a step, by which it is told from others; what a search has proven; what a run costs.
FIGURES = (
    *("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu"),
    *("mfu_fraction", "hfu_fraction", "bubble_fraction", "schedule_bubble_fraction"),
    "exposed_comm_s",
)
COST = ("days", "gpu_hours", "cost_usd")


def named(record: object, *names: str) -> dict[str, Json]:
    """Return attributes of a record by name.

    >>> named(1 + 2j, "real", "imag")
    {'real': 1.0, 'imag': 2.0}
    """
    return {name: cast("Json", getattr(record, name)) for name in names}


def json_text(document: Mapping[str, Json]) -> str:
    """Return a document as text: two-space indent, ASCII, a newline at the end.

    >>> print(json_text({"step_time_s": 0.1, "warnings": []}), end="")
    {
      "step_time_s": 0.1,
      "warnings": []
    }
    """
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def step_document(
    result: StepResult,
    budget: Budget | None = None,
    changes: Sequence[Change] = (),
    largest: "Largest | None" = None,
) -> dict[str, Json]:
    """Return the document of one simulated step.

    Args:
        result: The step.
        budget: Adds ``training_run``: days and cost of a number of tokens.
        changes: Of a plan that does not fit: what makes it fit.
        largest: The largest value of a quantity that fits, if it was asked for.
    """
    document: dict[str, Json] = {
        **_task_fields(result, result.plan.world_size),
        "num_microbatches": result.num_microbatches,
        "plan": plan_fields(result.plan),
        **named(result, *FIGURES),
        "time_breakdown_s": {
            category: time_ps / PS_PER_S for category, time_ps in result.breakdown_ps.items()
        },
        "memory": memory_fields(result.memory),
        "provenance": {source: result.source_fractions[source] for source in Source},
        "warnings": list(result.warnings),
    }
    # Ways to make a plan fit are told only of one that does not.
    if not result.memory.fits:
        document["changes"] = [_change_fields(each) for each in changes]
    if result.lanes:
        document["lanes"] = [
            {"name": lane.name, "busy_s": lane.busy_ps / PS_PER_S, "bytes": lane.moved_bytes()}
            for lane in result.lanes
        ]
    if result.asynchronous is not None:
        document["asynchronous"] = async_fields(result.asynchronous)
    if budget is not None:
        document["training_run"] = run_fields(budget, result)
    document |= _largest_fields(largest)
    return document | changed_fields(result.cluster, result.stack)


def _task_fields(result: StepResult | SearchResult, num_gpus: int) -> dict[str, Json]:
    """Return model, job, cluster, stack and GPUs of a result."""
    return {
        "model": model_fields(result.job),
        "job": job_fields(result.job),
        "cluster": result.cluster.name,
        "stack": result.stack.name,
        "num_gpus": num_gpus,
    }


def changed_fields(cluster: Cluster, stack: StackProfile) -> dict[str, Json]:
    """Return the facts that differ from the built-in cluster and stack, by name."""
    changes = (*changed_facts(stack), *changed_facts(cluster))
    if not changes:
        return {}
    from pydantic import TypeAdapter  # noqa: PLC0415  (few commands change facts)

    values = {each.field: {"value": each.value, "built_in": each.built_in} for each in changes}
    # Records become what a plan file holds of them.
    writer = TypeAdapter(object)
    written = writer.dump_python(values, mode="json", fallback=Record.model_dump)
    return {"changed_facts": cast("Json", written)}


def async_fields(run: AsyncRun) -> dict[str, Json]:
    """Return rounds of each worker and the distribution of staleness."""
    return {
        "workers": [
            {
                "worker": worker,
                "rounds": rounds,
                "round_time_s": None if time_ps is None else time_ps / PS_PER_S,
            }
            for worker, (rounds, time_ps) in enumerate(zip(run.rounds, run.round_ps, strict=True))
        ],
        "staleness": {
            "mean": run.mean_staleness,
            "max": run.max_staleness,
            "histogram": [
                {"updates": updates, "count": count} for updates, count in run.staleness.items()
            ],
        },
    }


def model_fields(job: TrainingJob) -> dict[str, Json]:
    """Return name, size and FLOPs of the model of a job."""
    return {
        "name": job.model.name,
        "parameters": count_parameters(job.model),
        "flops_per_step": model_flops(job),
        "flops_convention": CONVENTION,
    }


def memory_fields(memory: MemoryResult) -> dict[str, Json]:
    """Return the memory of the fullest rank, each pipeline rank and a host in use, in bytes."""
    on_host = ("host_bytes", "host_capacity_bytes") if memory.host_bytes else ()
    return {
        **named(memory, "peak_bytes", "reserved_bytes", "device_bytes", "capacity_bytes"),
        **named(memory, "usable_bytes", "fits", "worst_rank"),
        "by_stage": [stage_fields(stage) for stage in memory.by_stage],
        **named(memory, *on_host),
    }


def stage_fields(stage: StageMemory) -> dict[str, Json]:
    """Return the bytes of one pipeline rank at its peak, and the time of the peak."""
    return {
        "stage": stage.stage,
        **stage.terms,
        "peak": stage.peak_bytes,
        "peak_time_s": stage.peak_time_ps / PS_PER_S,
        **named(stage, "peak_moment", "largest_tensor"),
    }


def run_fields(budget: Budget, result: StepResult) -> dict[str, Json]:
    """Return days, GPU hours and cost of a whole training run."""
    return budget.run(result)._asdict()


def search_document(
    result: SearchResult, budget: Budget | None = None, largest: "Largest | None" = None
) -> dict[str, Json]:
    """Return the document of a search."""
    return {
        **_task_fields(result, result.num_gpus),
        **proof_fields(result),
        "rejections": {reason: result.rejections[reason] for reason in sorted(result.rejections)},
        "searched": list(result.varied.searched),
        "held": [_held_fields(each) for each in result.varied.held],
        "left_out": [_held_fields(each) for each in result.varied.left_out],
        "plans": [
            {**step_document(plan, budget), "like": [plan_fields(each) for each in like]}
            for plan, like in zip(result.plans, result.like, strict=True)
        ],
        "frontier": [_frontier_fields(point) for point in result.frontier],
        "frontier_left_out": result.num_below,
        "launcher": result.launcher or None,
        "not_launched": result.not_launched or None,
        "unlaunchable": _unlaunchable_fields(result.unlaunchable),
        "nearest": None if result.nearest is None else _nearest_fields(result.nearest),
        "verdict": None if result.verdict is None else _verdict_fields(result.verdict),
        **_largest_fields(largest),
        **changed_fields(result.cluster, result.stack),
    }


def proof_fields(result: SearchResult) -> dict[str, Json]:
    """Return the size of the space, the layouts that fit and were simulated, and the proof."""
    feasible = "feasible" if result.is_counted else "feasible_at_least"
    return {
        **named(result, "space_size", "looked_at"),
        feasible: result.feasible,
        **named(result, "simulated", "optimal", "bound_gap_fraction"),
    }


def _verdict_fields(verdict: Verdict) -> dict[str, Json]:
    """Return the cause for which nothing fits, the layouts of each cause, and ways out."""
    return {
        **named(verdict, "cause", "text"),
        "layouts": {str(cause): count for cause, count in verdict.layouts.items()},
        "rules": [
            {
                **named(each, "whose", "field", "reason", "why", "layouts"),
                "allowed": [*each.allowed],
            }
            for each in verdict.rules
        ],
        "ways": [
            {
                **named(each, "options", "num_gpus"),
                "step_time_s": each.step_ps / PS_PER_S,
                **named(each, "device_bytes", "note"),
            }
            for each in verdict.ways
        ],
    }


def _largest_fields(largest: "Largest | None") -> dict[str, Json]:
    if largest is None:
        return {}
    fields = named(largest, "value", "next_value", "why")
    return {"largest": {"quantity": largest.quantity.field, **fields}}


def _held_fields(held: Held) -> dict[str, Json]:
    value = held.value if isinstance(held.value, int | None) else str(held.value)
    return {"field": held.name, "value": value, "reason": held.reason}


def _frontier_fields(point: FrontierPoint) -> dict[str, Json]:
    return {
        "plan": plan_fields(point.plan),
        "step_time_s": point.step_ps / PS_PER_S,
        "device_bytes": point.device_bytes,
        "proven": point.proven,
        "bound_gap_fraction": point.bound_gap_fraction,
    }


def _unlaunchable_fields(faster: Unlaunchable | None) -> dict[str, Json] | None:
    if faster is None:
        return None
    return {
        "plan": plan_fields(faster.plan),
        "step_time_s": faster.step_ps / PS_PER_S,
        "device_bytes": faster.device_bytes,
        "refusals": [*faster.refusals],
    }


def _nearest_fields(nearest: Nearest) -> dict[str, Json]:
    return {
        "plan": plan_fields(nearest.plan),
        "lacks_bytes": nearest.lacks_bytes,
        "changes": [_change_fields(each) for each in nearest.changes],
    }


def _change_fields(change: Change) -> dict[str, Json]:
    crossing: dict[str, Json] = {"crossing": change.crossing} if change.crossing else {}
    return {
        "options": change.options,
        "fields": cast("dict[str, Json]", dict(change.fields)),
        **named(change, "saved_bytes", "device_bytes"),
        "step_time_s": change.step_ps / PS_PER_S,
        "slower_fraction": change.slower_fraction,
        **crossing,
        "plan": plan_fields(change.plan),
    }
