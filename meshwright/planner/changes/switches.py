"""What of a plan can be switched, one thing at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import prod

from meshwright.hwprofiles import ContextParallel, StackProfile, StageSplit, Strategy
from meshwright.simulator import ParallelPlan, PlanError, TrainingJob, resolve_stages
from meshwright.simulator.layout import AXES, PLAN_FIELDS, usual_zero_stages

Fields = Mapping[str, object]


def switches(plan: ParallelPlan, stack: StackProfile) -> Iterator[Fields]:
    """Yield the single changes of *plan* that may save memory.

    They are the other values of fields that have few, a higher ZeRO stage, more shards, smaller
    microbatches, no virtual stages, the other rules for stages and twice the ranks along an axis.
    Whether stack, job and the rest of the plan go with one is for a simulation to say.
    """
    usual = {name: each for name, each in PLAN_FIELDS.items() if not each.declaration.is_rare}
    for name, field in usual.items():
        others = (each for each in field.choices if each != getattr(plan, name))
        yield from chain.from_iterable(_chosen(plan, name, each) for each in others)
    yield from (
        {"zero_stage": stage} for stage in usual_zero_stages(stack) if stage > plan.zero_stage
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


def _chosen(plan: ParallelPlan, name: str, value: object) -> Iterator[Fields]:
    """Yield the changes of *plan* to one value of a field: of a ring of swaps for each size."""
    if value is ContextParallel.RING_OF_SWAPS:
        sizes = (each for each in range(2, plan.cp) if plan.cp % each == 0)
        yield from ({name: value, "cp_inner": each} for each in sizes)
    elif name == "cp_type" and plan.cp_inner is not None:
        yield {name: value, "cp_inner": None}
    else:
        yield {name: value}


def neighbours(plan: ParallelPlan, stack: StackProfile) -> Iterator[Fields]:
    """Yield the plans one change away: `switches`, and those that take more memory.

    Others are half the ranks along an axis, larger microbatches, more or fewer virtual stages and
    a lower ZeRO stage.
    """
    yield from switches(plan, stack)
    yield {"microbatch_size": 2 * plan.microbatch_size}
    yield from (
        {"zero_stage": stage} for stage in usual_zero_stages(stack) if stage < plan.zero_stage
    )
    if stack.strategy is not Strategy.MESH:
        return
    for vpp in sorted({plan.num_virtual_stages // 2, 2 * plan.num_virtual_stages} - {0, 1}):
        yield {"num_virtual_stages": vpp, "schedule": "interleaved"}
    for axis, known in AXES.items():
        if not known.takes_rest and plan.degree(axis) % 2 == 0:
            yield {axis.value: plan.degree(axis) // 2}


def switched(job: TrainingJob, plan: ParallelPlan, fields: Fields) -> tuple[ParallelPlan, Fields]:
    """Return *plan* with *fields* on as many devices, and all the fields that differ.

    Raises:
        PlanError: If there is no such plan.
    """
    values = dict(fields)
    rule = values.pop("stages", None)
    degrees = {axis: values.get(axis, plan.degree(axis)) for axis in AXES}
    (rest,) = (axis for axis, known in AXES.items() if known.takes_rest)
    others = prod(int(str(degree)) for axis, degree in degrees.items() if axis is not rest)
    if values.keys() & AXES.keys():
        if plan.world_size % others:
            raise PlanError(f"{plan.world_size} devices are no multiple of {others}")
        values[rest.value] = plan.world_size // others
    same = {name: getattr(plan, name) for name in PLAN_FIELDS}
    changed = ParallelPlan.of(same | values | {"stages": (), "prediction_stage": None})
    if rule is not None:
        wanted = StageSplit(str(rule))
        stages = resolve_stages(job.model, job.seq_len, changed.num_stages, wanted)
        return replace(changed, stages=stages), values | {"stages": rule}
    if changed.num_stages == plan.num_stages:
        changed = replace(changed, stages=plan.stages, prediction_stage=plan.prediction_stage)
    return changed, values
