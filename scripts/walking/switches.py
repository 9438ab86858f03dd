"""Every switch of a plan at every value that it may have, one at a time."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, combinations, product

from meshwright.hwprofiles import (
    ContextParallel,
    OffloadModule,
    Precision,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    StageSplit,
)
from meshwright.planner.changes import Fields, switched
from meshwright.planner.space import divisors
from meshwright.simulator import PlanError, ResolvedPlan, StepResult, TrainingJob
from meshwright.simulator.layout import AXES, MAX_ZERO_STAGE, PLAN_FIELDS, PlanField
from meshwright.simulator.schedules import SCHEDULES

Turns = Callable[[ResolvedPlan, TrainingJob], Iterable[Fields]]

# Fields that are not walked, with the reason.
LEFT_OUT: dict[str, str] = {
    **{str(axis): "takes what others leave" for axis in AXES if AXES[axis].takes_rest},
    "recompute_method": "with each number of recompute_layers",
    "prediction_stage": "behind all layers, where no rule for stages leaves room",
    "parameter_server": "of stacks whose ranks are no mesh",
}
FORMATS = (None, *Precision)


def _degrees(name: str) -> Turns:
    """Return the turns of an axis: every degree that divides the devices."""
    return lambda plan, _job: ({name: each} for each in divisors(plan.world_size))


def _expert_degrees(name: str, *others: None) -> Turns:
    """Return the turns of a degree that divides the ranks of a pipeline stage."""
    return lambda plan, _job: (
        {name: each} for each in (*others, *divisors(plan.world_size // plan.pp))
    )


def _virtual_stages(plan: ResolvedPlan, job: TrainingJob) -> Iterator[Fields]:
    """Yield each number of virtual stages, with each rule for their layers."""
    most = job.model.num_layers // plan.pp
    for vpp, rule in product(range(1, most + 1) if plan.pp > 1 else (1,), StageSplit):
        schedules = [name for name, each in SCHEDULES.items() if each.interleaves == (vpp > 1)]
        yield from (
            {"num_virtual_stages": vpp, "schedule": each, "stages": rule} for each in schedules
        )


def _modules(_plan: ResolvedPlan, _job: TrainingJob) -> Iterator[Fields]:
    """Yield every selection of parts of layers that run again."""
    known = tuple(RecomputeModule)
    selections = chain.from_iterable(combinations(known, size) for size in range(len(known) + 1))
    yield from (
        {"recompute": Recompute.SELECTIVE, "recompute_modules": each} for each in selections
    )


def _layers(plan: ResolvedPlan, job: TrainingJob) -> Iterator[Fields]:
    """Yield every number of layers that run again, of every method."""
    most = max(plan.stages, default=job.model.num_layers)
    for number, method in product(range(1, most + 1), RecomputeMethod):
        yield {
            "recompute": Recompute.FULL,
            "recompute_modules": (),
            "recompute_layers": number,
            "recompute_method": method,
        }


# The turns of fields whose values are not few, or go with those of another one.
TURNS: dict[str, Turns] = {
    **{axis.value: _degrees(axis) for axis in AXES if not AXES[axis].takes_rest},
    "ep": _expert_degrees("ep"),
    "etp": _expert_degrees("etp", None),
    "cp_inner": lambda plan, _job: (
        {"cp_type": ContextParallel.HYBRID_RING, "cp_inner": each} for each in divisors(plan.cp)
    ),
    "num_virtual_stages": _virtual_stages,
    "microbatch_size": lambda plan, job: (
        {"microbatch_size": each} for each in divisors(job.global_batch_size // plan.dp)
    ),
    "zero_stage": lambda _plan, _job: ({"zero_stage": each} for each in range(MAX_ZERO_STAGE + 1)),
    "recompute_modules": _modules,
    "recompute_layers": _layers,
    "offload_layers": lambda _plan, job: (
        {"offload_layers": each} for each in range(1, job.model.num_layers)
    ),
    "offload_modules": lambda _plan, _job: (
        {"offload_modules": each} for each in combinations(OffloadModule, 2)
    ),
    "microbatch_group_size": lambda plan, job: (
        {"microbatch_group_size": each} for each in range(1, plan.num_microbatches(job) + 1)
    ),
    "stages": lambda _plan, _job: ({"stages": each} for each in StageSplit),
    "dp_shard": lambda plan, _job: ({"dp_shard": each} for each in divisors(plan.dp)),
    "gradient_precision": lambda _plan, _job: (
        {"gradient_precision": kept, "reduce_precision": reduced}
        for kept, reduced in product(FORMATS, FORMATS)
    ),
}


def turns(field: PlanField, plan: ResolvedPlan, job: TrainingJob) -> Iterable[Fields]:
    """Return what turning a field's switch changes, once a value that it may have.

    Raises:
        KeyError: If nothing says which values a field has: of a new one a line of `TURNS` does, or
            of `LEFT_OUT`.
    """
    if field.name in TURNS:
        return TURNS[field.name](plan, job)
    if not field.choices:
        raise KeyError(field.name)
    unsaid = (None,) if field.is_optional else ()
    return ({field.name: each} for each in (*unsaid, *field.choices))


def turned(step: StepResult) -> Iterator[tuple[Fields, ResolvedPlan]]:
    """Yield each plan that differs from that of *step* by one field, with what differs."""
    plan, job = step.plan, step.job
    for field in PLAN_FIELDS.values():
        if field.name in LEFT_OUT:
            continue
        for fields in turns(field, plan, job):
            differing = {
                name: value
                for name, value in fields.items()
                if name == "stages" or value != getattr(plan, name)
            }
            try:
                other, all_differing = switched(step, differing)
            except PlanError:  # there is no such layout
                continue
            if other != plan:
                yield (
                    {name: each for name, each in all_differing.items() if each is not None},
                    other,
                )
