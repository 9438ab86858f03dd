"""Single-field changes of a plan."""

from collections.abc import Iterator, Mapping
from itertools import chain

from meshwright.hwprofiles import ContextParallel, StackProfile, StageSplit, Strategy
from meshwright.simulator import ResolvedPlan, StepResult, resolve
from meshwright.simulator.layout import (
    AXES,
    PLAN_FIELDS,
    minimal_options,
    overridden,
    searched_zero_stages,
)

Fields = Mapping[str, object]


def switches(plan: ResolvedPlan, stack: StackProfile) -> Iterator[Fields]:
    """Yield the single changes of *plan* that may save memory.

    They are the other values of fields that have few, a higher ZeRO stage, more shards, smaller
    microbatches, no virtual stages, the other rules for stages and twice the ranks along an axis.
    Whether stack, job and the rest of the plan allow one is decided by its simulation.
    """
    usual = {name: each for name, each in PLAN_FIELDS.items() if not each.declaration.is_rare}
    for name, field in usual.items():
        others = (each for each in field.choices if each != getattr(plan, name))
        yield from chain.from_iterable(_chosen(plan, name, each) for each in others)
    yield from (
        {"zero_stage": stage} for stage in searched_zero_stages(stack) if stage > plan.zero_stage
    )
    if plan.num_shards < plan.dp_cp:
        yield {"dp_shard": plan.dp}
    for size in sorted({1, plan.microbatch_size // 2}):
        if 0 < size < plan.microbatch_size:
            yield {"microbatch_size": size}
    if plan.num_virtual_stages > 1:
        yield {"num_virtual_stages": 1, "schedule": "1f1b"}
    if stack.strategy is Strategy.MESH:
        yield from ({"stages": rule} for rule in StageSplit if plan.pp > 1)
        for axis, known in AXES.items():
            if not known.takes_rest:
                yield {axis.value: 2 * plan.degree(axis)}


def _chosen(plan: ResolvedPlan, name: str, value: object) -> Iterator[Fields]:
    """Yield the changes of *plan* to one value of a field: of hybrid cp for each group size."""
    if value is ContextParallel.HYBRID_RING:
        sizes = (each for each in range(2, plan.cp) if plan.cp % each == 0)
        yield from ({name: value, "cp_inner": each} for each in sizes)
    elif name == "cp_type" and plan.cp_inner is not None:
        yield {name: value, "cp_inner": None}
    else:
        yield {name: value}


def neighbours(plan: ResolvedPlan, stack: StackProfile) -> Iterator[Fields]:
    """Yield the plans one change away: `switches`, and those that take more memory.

    Others are half the ranks along an axis, larger microbatches, more or fewer virtual stages and a
    lower ZeRO stage.
    """
    yield from switches(plan, stack)
    yield {"microbatch_size": 2 * plan.microbatch_size}
    yield from (
        {"zero_stage": stage} for stage in searched_zero_stages(stack) if stage < plan.zero_stage
    )
    if stack.strategy is not Strategy.MESH:
        return
    for vpp in sorted({plan.num_virtual_stages // 2, 2 * plan.num_virtual_stages} - {0, 1}):
        yield {"num_virtual_stages": vpp, "schedule": "interleaved"}
    for axis, known in AXES.items():
        # Odd degrees have no half.
        if not known.takes_rest and plan.degree(axis) % 2 == 0:
            yield {axis.value: plan.degree(axis) // 2}


def switched(step: StepResult, fields: Fields) -> tuple[ResolvedPlan, Fields]:
    """Return the plan of *step* with *fields* on as many devices, and all fields that differ.

    Raises:
        PlanError: If there is no such plan.
    """
    job, cluster, stack, plan = step.job, step.cluster, step.stack, step.plan
    options = overridden(minimal_options(job, cluster, stack, plan), fields, plan, keeps_model=True)
    changed = resolve(job, cluster, stack, options, num_gpus=plan.world_size)
    if not fields.keys() & AXES.keys():
        return changed, fields
    (rest,) = (axis for axis, known in AXES.items() if known.takes_rest)
    return changed, {**fields, rest.value: changed.degree(rest)}
