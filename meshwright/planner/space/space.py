"""The space of layouts: every combination that divisibility allows, as columns of integers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Attention, Recompute, StackProfile, StageSplit, suggestion
from meshwright.simulator import (
    RUNTIMES,
    SCHEDULES,
    ParallelPlan,
    PlanError,
    TrainingJob,
    resolve_stages,
)
from meshwright.simulator.layout import (
    AXES,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    Axis,
    PlanField,
    Stage,
    divides,
    known_values,
    model_refusal,
    model_stages,
)
from meshwright.simulator.model import AnyModel

Column = NDArray[np.int64]

COLUMNS = tuple(each.name for each in SEARCHED_FIELDS)


class SpaceLimits:
    """What of the space is searched: allowed values of a field (None: all), and largest values.

    ``attention`` and ``stages`` are not searched: they default to the stack's. Values of a field
    are a tuple by its name, as ``tp=(4, 8)``; a largest value is a number, as ``max_pp=16``.

    Raises:
        PlanError: If a name is no searched field, or a limit leaves nothing of one.

    >>> SpaceLimits(tp=(8,), max_pp=16)
    SpaceLimits(tp=(8,), max_pp=16)
    """

    def __init__(
        self,
        *,
        attention: Attention | None = None,
        stages: StageSplit | None = None,
        **limits: tuple[object, ...] | int | None,
    ) -> None:
        self.attention = attention
        self.stages = stages
        self._limits = {name: value for name, value in limits.items() if value is not None}
        known = [*COLUMNS, *(each.limit for each in SEARCHED_FIELDS if each.declaration.is_limited)]
        for name, value in self._limits.items():
            if name not in known:
                raise PlanError(f"{name} is no field of a search; {suggestion(name, known)}")
            if isinstance(value, int) and value < 1:
                raise PlanError(f"{name}={value} leaves nothing; allowed: at least 1")

    def __repr__(self) -> str:
        """Return the limits as they are written."""
        ends = {"attention": self.attention, "stages": self.stages}
        said = self._limits | {name: value for name, value in ends.items() if value is not None}
        return f"SpaceLimits({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    @property
    def is_free(self) -> bool:
        """Whether nothing is pinned or limited."""
        return not self._limits

    def values(self, name: str) -> tuple[object, ...] | None:
        """Return the allowed values of a field, None for all."""
        return cast("tuple[object, ...] | None", self._limits.get(name))

    def allows(self, name: str, value: object) -> bool:
        """Return whether *value* of the field *name* may be searched."""
        allowed, largest = self.values(name), self._limits.get(PLAN_FIELDS[name].limit)
        if allowed is not None and value not in allowed:
            return False
        return largest is None or cast("int", value) <= cast("int", largest)

    def pinned(self, **values: tuple[object, ...]) -> "SpaceLimits":
        """Return the same limits with other allowed values."""
        return SpaceLimits(attention=self.attention, stages=self.stages, **self._limits | values)


@dataclass(frozen=True)
class Space:
    """Layouts of a job on a number of GPUs, one row each, with what they share.

    ``rows`` has a column for each of `COLUMNS`; of a field with few values it holds the index of
    one (`PlanField.choices`).
    """

    job: TrainingJob
    stack: StackProfile
    num_gpus: int
    attention: Attention
    stages: StageSplit
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(self.rows)

    def column(self, name: str) -> Column:
        """Return the numbers of one field."""
        return self.rows[:, COLUMNS.index(name)]

    @cached_property
    def num_microbatches(self) -> Column:
        """Microbatches of each layout's data-parallel ranks."""
        sequences = self.job.global_batch_size // self.column("dp")
        return sequences // self.column("microbatch_size")

    def layers(self, pp: int, num_virtual_stages: int) -> tuple[int, ...]:
        """Return the layers of each virtual stage."""
        return resolve_stages(
            self.job.model, self.job.seq_len, pp * num_virtual_stages, self.stages
        )

    def virtual_stages(self, pp: int, num_virtual_stages: int) -> tuple[Stage, ...]:
        """Return the virtual stages in model order."""
        return model_stages(self.job.model, self.layers(pp, num_virtual_stages))

    def plan(self, index: int) -> ParallelPlan:
        """Return layout *index* as a plan."""
        plan = self.plan_without_stages(index)
        return replace(plan, stages=self.layers(plan.pp, plan.num_virtual_stages))

    def plan_without_stages(self, index: int) -> ParallelPlan:
        """Return layout *index* as a plan that leaves the layers of its stages open."""
        codes = self.rows[index].tolist()
        values = {
            field.name: field.value(code)
            for field, code in zip(SEARCHED_FIELDS, codes, strict=True)
        }
        return ParallelPlan.of({**values, "attention": self.attention})


def enumerate_space(
    job: TrainingJob, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> Space:
    """Return every layout of *job* on *num_gpus* that divisibility and *limits* allow.

    Raises:
        PlanError: If *limits* ask for a value that says nothing of the model.
    """
    for field in SEARCHED_FIELDS:
        for value in limits.values(field.name) or ():
            refusal = model_refusal(field, value, job.model)
            if refusal is not None:
                raise PlanError(refusal)
    blocks = [
        _block(job, stack, limits, {**degrees, "num_virtual_stages": vpp}, schedules)
        for degrees in _degrees(job, num_gpus, limits)
        for vpp, schedules in _virtual_stages(job.model, degrees["pp"], limits)
    ]
    rows = np.concatenate([*blocks, np.empty((0, len(COLUMNS)), np.int64)])
    return Space(
        job=job,
        stack=stack,
        num_gpus=num_gpus,
        attention=limits.attention or stack.attention,
        stages=limits.stages or stack.stage_split,
        rows=rows,
    )


def _degrees(job: TrainingJob, num_gpus: int, limits: SpaceLimits) -> Iterator[dict[str, int]]:
    """Yield the degrees of all axes, in the order of a plan's fields; one takes what is left."""
    names = [each.name for each in SEARCHED_FIELDS if each.declaration.axis]
    free = [Axis(name) for name in names if not AXES[Axis(name)].takes_rest]
    (rest,) = (axis for axis, known in AXES.items() if known.takes_rest)

    def chosen(left: int, known: dict[str, int]) -> Iterator[dict[str, int]]:
        if len(known) < len(free):
            axis = free[len(known)]
            for degree in divisors(left):
                if divides(job, axis, degree) and limits.allows(axis, degree):
                    yield from chosen(left // degree, {**known, axis: degree})
        elif divides(job, rest, left) and limits.allows(rest, left):
            yield {name: left if name == rest else known[name] for name in names}

    yield from chosen(num_gpus, {})


def _virtual_stages(
    model: AnyModel, pp: int, limits: SpaceLimits
) -> Iterator[tuple[int, list[int]]]:
    """Yield each number of virtual stages with the schedules that can run it.

    More than one takes equal virtual stages, or equal ones when embedding and head count as a
    layer each, as Llama 3 405B was trained (126 layers; arXiv 2407.21783, section 3.3.2).
    """
    per_rank = model.num_layers // pp
    for vpp in range(1, per_rank + 1):
        if vpp > 1 and (pp == 1 or not _divides_into(model.num_layers, pp * vpp)):
            continue
        if not limits.allows("num_virtual_stages", vpp):
            continue
        schedules = [
            index
            for index, (name, schedule) in enumerate(SCHEDULES.items())
            if schedule.interleaves == (vpp > 1) and limits.allows("schedule", name)
        ]
        if schedules:
            yield vpp, schedules


def _divides_into(num_layers: int, num_stages: int) -> bool:
    return num_layers % num_stages == 0 or (num_layers + 2) % num_stages == 0


def _block(
    job: TrainingJob,
    stack: StackProfile,
    limits: SpaceLimits,
    fixed: dict[str, int],
    schedules: Sequence[int],
) -> NDArray[np.int64]:
    """Return the rows of one choice of degrees: the product of the fields that are left."""

    def numbers(field: PlanField) -> list[int]:
        if field.name in fixed:
            return [fixed[field.name]]
        if field.name == "schedule":
            return list(schedules)
        if field.name == "microbatch_size":
            return _microbatch_sizes(job, stack, limits, fixed, schedules)
        return _switches(job, stack, limits, field, fixed)

    axes = [np.array(numbers(field), np.int64) for field in SEARCHED_FIELDS]
    sizes = tuple(map(len, axes))
    places = np.unravel_index(np.arange(prod(sizes)), sizes)
    rows = np.stack([axis[place] for axis, place in zip(axes, places, strict=True)], axis=1)
    schedule, size = (rows[:, COLUMNS.index(name)] for name in ("schedule", "microbatch_size"))
    for pair in product(schedules, set(size.tolist())):
        if not _is_runnable(job, stack, fixed, *pair):
            kept = (schedule != pair[0]) | (size != pair[1])
            rows, schedule, size = rows[kept], schedule[kept], size[kept]
    return rows


def _microbatch_sizes(
    job: TrainingJob,
    stack: StackProfile,
    limits: SpaceLimits,
    fixed: dict[str, int],
    schedules: Sequence[int],
) -> list[int]:
    """Return the sizes that divide a rank's sequences and that some of the schedules can run."""
    return [
        size
        for size in divisors(job.global_batch_size // fixed["dp"])
        if limits.allows("microbatch_size", size)
        and any(_is_runnable(job, stack, fixed, schedule, size) for schedule in schedules)
    ]


def _is_runnable(
    job: TrainingJob, stack: StackProfile, fixed: dict[str, int], schedule: int, size: int
) -> bool:
    """Tell whether the stack's runtime of a schedule takes microbatches of *size* sequences."""
    known = tuple(RUNTIMES[stack.pipeline_runtime].values())
    num_microbatches = job.global_batch_size // fixed["dp"] // size
    counts = (fixed["pp"], num_microbatches, fixed["num_virtual_stages"])
    return known[schedule].refusal(*counts) is None


def _switches(
    job: TrainingJob,
    stack: StackProfile,
    limits: SpaceLimits,
    field: PlanField,
    fixed: dict[str, int],
) -> list[int]:
    """Return the values of a switch as numbers.

    On an axis of degree 1 it has no effect, one value is enough.
    """
    wanted = limits.values(field.name)
    values = _usual_values(job, stack, field) if wanted is None else wanted
    acts_on = field.declaration.acts_on
    if acts_on is not None and fixed[acts_on] == 1:
        values = values[:1]
    if field.name == "sequence_parallel" and job.seq_len % fixed["tp"]:
        values = tuple(value for value in values if not value)
    codes = [field.code(value) for value in values]
    return codes if acts_on is not None else sorted(codes)


def _usual_values(job: TrainingJob, stack: StackProfile, field: PlanField) -> tuple[object, ...]:
    """Return the values of a switch that are searched where none is asked for.

    A mode of one framework alone is searched on its stacks; asked for, a rule rejects it by name.
    """
    if field.name == "zero_stage":
        return tuple(sorted({0, 1, *stack.zero_stages}))
    known = known_values(field, job.model)
    alone = {Recompute.SELECTIVE_OP} - {*stack.recompute_modes}
    return tuple(each for each in (known or field.choices) if each not in alone)


def divisors(number: int) -> list[int]:
    """Return the divisors of *number* in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]
