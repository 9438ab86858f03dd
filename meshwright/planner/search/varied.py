"""Searched and fixed fields of a search's plans, with the reason of each fixed one."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from meshwright.hwprofiles import PipelineRuntime
from meshwright.planner.space import (
    ACTIVATIONS,
    COLUMNS,
    LONG_SEQUENCE,
    PASSES,
    Column,
    Space,
    SpaceLimits,
    are_equal,
    askable_values,
    divisors,
    is_searched,
    lays_out_unequal,
)
from meshwright.simulator import SCHEDULES
from meshwright.simulator.layout import (
    AXES,
    PLAN_FIELDS,
    Axis,
    PlanField,
    applicable_values,
    searched_zero_stages,
)
from meshwright.simulator.model import has_mtp_layers

# Fields that only some stacks have, with the trait of those stacks.
OF_STACKS = {
    "recompute_modules": "recompute_modules",
    "recompute_layers": "recompute_methods",
    "expert_overlap": "expert_overlaps",
    "moment_precision": "moment_precisions",
}
PREDICTION_STAGE = "prediction_stage"
UNEQUAL = "unequal"  # layers of virtual stages
ONLY_ONE = "only one offered"


Numbers = Callable[[str], Column]


class Held(NamedTuple):
    """A field with one value in all layouts; None is the stack's default."""

    name: str
    value: object
    reason: str


class SearchedFields(NamedTuple):
    """Searched fields of a plan, fixed ones, and values that were excluded."""

    searched: tuple[str, ...]
    held: tuple[Held, ...]
    left_out: tuple[Held, ...] = ()

    @classmethod
    def of(cls, space: Space, limits: SpaceLimits, numbers: Numbers) -> "SearchedFields":
        """Return the searched and fixed fields of the layouts that a stack offers.

        Args:
            space: Space of the job and the stack.
            limits: Limits of the search.
            numbers: Returns the numbers of a field in such layouts.
        """
        fields = [
            each
            for each in PLAN_FIELDS.values()
            if each.name != "parameter_server"
            # Fields without any value for this model say nothing of it.
            and applicable_values(each, space.job.model) != ()
            and not _is_of_others(each, space, numbers)
        ]
        codes = {
            each.name: _extremes(numbers(each.name)) for each in fields if each.name in COLUMNS
        }
        searched = tuple(name for name, found in codes.items() if len(found) > 1)
        held = tuple(_held(fields, codes, space, limits))
        return cls(searched, held, tuple(_excluded(space, limits)))


def _extremes(numbers: Column) -> list[int]:
    """Return the least and the largest of *numbers*: one if all are equal."""
    return [*dict.fromkeys((int(numbers.min()), int(numbers.max())))] if len(numbers) else []


def _reason(field: PlanField, space: Space, limits: SpaceLimits) -> str:
    """Return the reason why a field that nobody asked for is fixed."""
    axis = field.declaration.axis or field.declaration.acts_on
    if axis in set(Axis) and not is_searched(Axis(axis), space.job, space.stack, limits):
        return f"sequences below {LONG_SEQUENCE:,} tokens: ask with --max-{axis}"
    if len(askable_values(field, space.job, space.stack)) > 1:
        is_format = field.name.endswith("_precision")
        return (
            "as the framework has them: ask with --also precision"
            if is_format
            else "ask with --also"
        )
    return "ask by value" if field.name in PASSES else ONLY_ONE


def _reason_without_column(field: PlanField, space: Space) -> str:
    """Return the reason why a field that is never searched has its default."""
    if field.name == PREDICTION_STAGE:
        return "simulate another with --stages"
    offered = bool(getattr(space.stack, field.declaration.offered_by or "", False))
    return "it can only cost" if offered else ONLY_ONE


def _is_of_others(field: PlanField, space: Space, numbers: Numbers) -> bool:
    """Return True if *field* is of an axis or a trait that the stack of *space* lacks.

    Axes of experts count as lacking for models without them, too.
    """
    stack = space.stack
    if field.name in OF_STACKS:
        is_known = (
            not field.declaration.of_experts or applicable_values(field, space.job.model) is None
        )
        return not (is_known and getattr(stack, OF_STACKS[field.name]))
    has_core = stack.pipeline_runtime is PipelineRuntime.MEGATRON_CORE
    if field.name == "microbatch_group_size":
        return not has_core
    if field.name == PREDICTION_STAGE:
        return not (has_core and has_mtp_layers(space.job.model))
    # Fields of recomputed layers, and of hybrid context parallelism, searched where asked for.
    if field.name in {"recompute_method", "cp_inner", *ACTIVATIONS}:
        return not numbers(field.name).any()
    if field.declaration.of_experts:
        return not (stack.expert_parallel and applicable_values(field, space.job.model) is None)
    axis = field.declaration.axis or field.declaration.acts_on
    known = AXES.get(Axis(axis)) if axis in set(Axis) else None
    return bool(known and known.is_rare and not getattr(stack, known.offered_by or ""))


def _excluded(space: Space, limits: SpaceLimits) -> Iterator[Held]:
    """Yield values of searched fields that the stack offers and that have to be asked for."""
    name, stack = "zero_stage", space.stack
    if limits.values(name) is None:
        for stage in sorted({*stack.zero_stages} - {*searched_zero_stages(stack)}):
            yield Held(name, stage, f"ask with --zero {stage}")
    if _lacks_unequal(space, limits):
        yield Held("num_virtual_stages", UNEQUAL, "ask with --max-vpp")


def _lacks_unequal(space: Space, limits: SpaceLimits) -> bool:
    """Return True if virtual stages of unequal layers are possible, and not searched."""
    num_layers, num_gpus, stack = space.job.model.num_layers, space.num_gpus, space.stack
    interleaves = any(
        SCHEDULES[name].interleaves and limits.allows("schedule", name) for name in stack.schedules
    )
    if not interleaves or lays_out_unequal(num_layers, num_gpus, limits):
        return False
    return not all(
        are_equal(num_layers, pp * vpp)
        for pp in divisors(num_gpus)[1:]
        if limits.allows("pp", pp)
        for vpp in range(2, num_layers // pp + 1)
    )


def _held(
    fields: list[PlanField], codes: dict[str, list[int]], space: Space, limits: SpaceLimits
) -> Iterator[Held]:
    """Yield the fixed fields with their values and reasons."""
    for field in fields:
        name = field.name
        if name not in codes:
            yield Held(name, field.default, _reason_without_column(field, space))
        elif len(codes[name]) == 1:
            pins = limits.values(name)
            value = field.value(codes[name][0]) if pins is None else pins[0]
            value = None if value == () else value
            yield Held(name, value, _reason(field, space, limits) if pins is None else "asked for")
