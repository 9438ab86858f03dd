"""Search or simulation as asked for, or at the largest value of a quantity that fits.

Imports are local, so that a command waits for no more than it needs.
"""
# ruff: noqa: PLC0415

from typing import TYPE_CHECKING, cast

from meshwright.planner.cli.request import Setting, resolve_plan
from meshwright.planner.options import Given, RankingOptions
from meshwright.planner.search import Progress, SearchResult, search
from meshwright.planner.space import SpaceLimits
from meshwright.simulator import (
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    parse_stages,
    simulate,
)
from meshwright.simulator.layout import Quantity

if TYPE_CHECKING:
    from meshwright.planner.largest import Largest


def searched(
    setting: Setting,
    pins: SpaceLimits,
    ranking: RankingOptions,
    progress: Progress | None,
) -> "tuple[Largest | None, SearchResult]":
    """Return the search of *setting*, at the largest value of a quantity if one is asked for."""
    problem = setting.job, setting.cluster, setting.stack, setting.world_size
    limit, top = setting.memory_limit_bytes, ranking.top
    if ranking.max is None:
        result = search(
            *problem,
            limits=pins,
            memory_limit_bytes=limit,
            top=top,
            progress=progress,
            counts=ranking.count,
        )
        return None, result
    if ranking.count:
        raise PlanError("--count and --max contradict each other: the count is of one size")
    from meshwright.planner.largest import find_largest

    return find_largest(
        *problem, ranking.max, limits=pins, memory_limit_bytes=limit, top=top, progress=progress
    )


def simulated(
    setting: Setting, given: Given, quantity: Quantity | None, progress: Progress | None
) -> "tuple[Largest | None, StepResult]":
    """Return the step of *setting*, at the largest value of *quantity* if one is asked for.

    Raises:
        PlanError: If options contradict each other, the model or the number of devices.
    """
    from meshwright.planner.largest import find_largest_of_plan

    name = "microbatch_size"
    if quantity is None:
        plan = resolve_plan(setting, given)
        if progress is not None:
            progress("simulating", 0, 0)
        return None, step_of(setting, plan)
    # A quantity is searched for or given, not both.
    if quantity is Quantity.MICRO_BATCH and name in given:
        raise PlanError(f"--max {quantity} and --micro-batch {given[name]} contradict each other")

    # A list of stages fixes the number of layers, which --max layers would change.
    listed = parse_stages(cast("str", given["stages"])) if "stages" in given else ()
    if quantity is Quantity.LAYERS and isinstance(listed, tuple) and listed:
        raise PlanError(f"--max {quantity} and --stages {given['stages']} contradict each other")

    def plan_of(job: TrainingJob, size: int | None) -> ResolvedPlan:
        override = {} if size is None else {name: size}
        return resolve_plan(setting._replace(job=job), {**given, **override})

    return find_largest_of_plan(
        setting.job,
        setting.cluster,
        setting.stack,
        plan_of,
        quantity,
        memory_limit_bytes=setting.memory_limit_bytes,
        progress=progress,
    )


def step_of(setting: Setting, plan: ResolvedPlan) -> StepResult:
    """Return the simulated step of *plan* in *setting*."""
    job, stack, limit = setting.job, setting.stack, setting.memory_limit_bytes
    return simulate(job, plan, setting.cluster, stack, memory_limit_bytes=limit)
