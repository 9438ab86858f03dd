"""From a plan file to what a framework has to be told, and back: habits of stacks made plain."""

from collections.abc import Mapping
from dataclasses import replace

from meshwright.hwprofiles import Strategy
from meshwright.planner.export.table import Facts
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import ParallelPlan, PlanError
from meshwright.simulator.layout import (
    PLAN_FIELDS,
    chosen_formats,
    reshards_units,
    syncs_by_default,
)

# Fields of which a plan says None where it does what its stack does.
HABITS = (
    "dp_shard",
    "reshard_after_forward",
    "gradient_precision",
    "reduce_precision",
    "sync_each_microbatch",
)


def facts_of(saved: SavedPlan) -> Facts:
    """Return all that a plan says, habits of its stack included, by the names of the fields.

    Raises:
        PlanError: If the model is no transformer, or its ranks are not those of a mesh.
    """
    if saved.stack.strategy is not Strategy.MESH:
        raise PlanError(
            f"stack={saved.stack.name} trains with a strategy of its own; allowed: stacks with "
            f"strategy {Strategy.MESH}"
        )
    model, plan, job = saved.job.transformer, saved.plan, saved.job
    values: dict[str, object] = {name: getattr(plan, name) for name in PLAN_FIELDS}
    values |= habits(saved) | {
        name: getattr(plan, name) for name in HABITS if getattr(plan, name) is not None
    }
    values |= {
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
        "precision": job.precision,
        "world_size": plan.world_size,
        "model": model.name,
    }
    return Facts(values, model, saved.stack)


def habits(saved: SavedPlan) -> dict[str, object]:
    """Return what the stack does where the plan says None; None for what has no effect."""
    plan, stack = saved.plan, saved.stack
    kept, reduced = chosen_formats(stack, saved.job.precision, plan.gradient_formats)
    summed = plan.num_microbatches(saved.job) > 1 and plan.dp > 1
    return {
        "dp_shard": plan.dp,
        "reshard_after_forward": reshards_units(plan, stack) if plan.zero_stage >= 3 else None,
        "gradient_precision": kept,
        "reduce_precision": reduced,
        "sync_each_microbatch": (
            bool(syncs_by_default(stack, plan.zero_stage, plan.pp)) if summed else None
        ),
    }


def settled(saved: SavedPlan) -> SavedPlan:
    """Return *saved* with None where its plan says what its stack does anyway."""
    bare = _with(saved.plan, dict.fromkeys(HABITS))
    usual = habits(replace(saved, plan=bare))
    own = {name: getattr(saved.plan, name) for name in HABITS}
    kept = {name: None if value == usual[name] else value for name, value in own.items()}
    return replace(saved, plan=_with(saved.plan, kept))


def _with(plan: ParallelPlan, changes: Mapping[str, object]) -> ParallelPlan:
    return ParallelPlan.of({name: getattr(plan, name) for name in PLAN_FIELDS} | {**changes})
