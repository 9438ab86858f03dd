"""Values of the fields of layouts: degrees, virtual stages, schedules, microbatches and others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import gcd, prod
from typing import NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Recompute, StackProfile, StageSplit
from meshwright.planner.space.columns import Column, distinct
from meshwright.planner.space.limits import SpaceLimits, is_searched, stages_of_one_rank
from meshwright.planner.space.pipelines import (
    are_equal,
    is_runnable,
    lays_out_unequal,
    stage_layers,
)
from meshwright.planner.space.switches import (
    ACTIVATIONS,
    BASIC_FIELDS,
    SWITCHES,
    USUAL,
    Place,
    Setting,
    Wanted,
    divisors,
    settings,
)
from meshwright.simulator import SCHEDULES, TrainingJob
from meshwright.simulator.layout import (
    AXES,
    JOINT_AXES,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    Axis,
    PlanField,
    applicable_values,
    attention_kernels,
    divides,
    experts_refusal,
    offers,
    searched_zero_stages,
)

# Fields whose values depend on the virtual stages, too, in the order in which they vary.
OF_VIRTUAL_STAGES = ("num_virtual_stages", "microbatch_size", "schedule", "stages")
# Fields of a partial layout, and those that it leaves open.
PARTIAL = tuple(
    each.name
    for each in BASIC_FIELDS
    if each.declaration.axis or each.divides_experts or each.name in OF_VIRTUAL_STAGES
)
OPEN = tuple(each.name for each in BASIC_FIELDS if each.name not in PARTIAL)
Values = tuple[tuple[int, ...], ...]
PASSES = (
    *("recompute_modules", "recompute_layers", "recompute_method", "microbatch_group_size"),
    *ACTIVATIONS,
)
"""Fields of recomputation, offloading and groups, searched where a user asks for them."""
READ_BY = {
    "recompute": {"recompute_modules", "recompute_layers", "expert_overlap", *ACTIVATIONS},
    "schedule": {"microbatch_group_size", "expert_overlap"},
    "num_microbatches": {"microbatch_group_size"},
    "most_layers": {"recompute_layers"},
    "common_layers": {"recompute_layers"},
    "ep": {"expert_overlap"},
}
"""Fields whose settings depend on a number of a `Place`, by that number."""


class Settings(NamedTuple):
    """Settings of fields: codes of each field, and the rows of each place.

    The first place is that of layouts that the stack lacks, which have one setting.
    """

    codes: NDArray[np.int64]
    starts: Column
    counts: Column

    @classmethod
    def of(cls, tables: Sequence[Sequence[Setting]]) -> Self:
        """Return the settings of the places that have *tables*."""
        fields = [PLAN_FIELDS[name] for name in SWITCHES]
        known = [each for table in tables for each in table]
        codes = [[field.code(each[field.name]) for each in known] for field in fields]
        counts = [*map(len, tables)]
        starts = [0, *accumulate(counts)][:-1]
        return cls(
            np.array(codes, np.int64).reshape(len(SWITCHES), -1), np.array(starts), np.array(counts)
        )


class Places:
    """Places of layouts among a stack's rules for settings of fields."""

    def __init__(self, job: TrainingJob, stack: StackProfile, limits: SpaceLimits) -> None:
        self._job, self._stack, self._wanted = job, stack, _wanted(limits)

    def settings(
        self, columns: Mapping[str, Column], count: Column, choices: Mapping[str, Column]
    ) -> tuple[Column, Settings]:
        """Return the place number of partial layouts and choices, and the settings there.

        Args:
            columns: Numbers of fields of partial layouts.
            count: Microbatches of each.
            choices: Numbers of the fields in `OPEN`.

        Returns:
            Numbers of 32 bits, as there may be millions: ``[partial layouts, choices]``.
        """
        own, open_ = self._columns(columns, count), [choices["zero_stage"]]
        if self._asks("recompute"):
            open_.append(choices["recompute"])
        (first, member), (first_open, member_open) = distinct(own), distinct(open_)
        rows = np.stack(own, axis=1)[first].tolist()
        open_rows = np.stack(open_, axis=1)[first_open].tolist()
        tables = [
            settings(self._job, self._stack, _place(row, open_row), self._wanted)
            for row in rows
            for open_row in open_rows
        ]
        numbers = 1 + member[:, None] * len(open_rows) + member_open[None, :]
        return numbers.astype(np.int32), Settings.of([[USUAL], *tables])

    def _columns(self, columns: Mapping[str, Column], count: Column) -> list[Column]:
        """Return the numbers of a `Place` of partial layouts."""
        zeros, numbers = np.zeros_like(count), {**columns, "num_microbatches": count}
        if self._asks("most_layers"):
            numbers["most_layers"] = self._of_stages(columns, max)
            numbers["common_layers"] = self._of_stages(columns, gcd)
        names = [name for name in READ_BY if name != "recompute"]
        selected = [numbers[name] if self._asks(name) else zeros for name in names]
        has_several = np.asarray(count > 1, np.int64)
        return [columns["pp"], columns["cp"], columns["dp"], has_several, *selected]

    def _of_stages(self, columns: Mapping[str, Column], number: Callable[..., int]) -> Column:
        """Return a *number* of the layers of each partial layout's virtual stages."""
        columns_of_stages = [columns[name] for name in ("pp", "num_virtual_stages", "stages")]
        first, member = distinct(columns_of_stages)
        rule = PLAN_FIELDS["stages"].value
        numbers = [
            number(*stage_layers(self._job, pp * vpp, rule(code)), 0)
            for pp, vpp, code in np.stack(columns_of_stages, axis=1)[first].tolist()
        ]
        return np.array(numbers, np.int64)[member]

    def _asks(self, number: str) -> bool:
        """Return True if a user asks for a field whose settings depend on a *number* of a `Place`.

        At its default a field has an effect everywhere, or nowhere.
        """
        wanted = self._wanted
        return any(wanted.get(name, (USUAL[name],)) != (USUAL[name],) for name in READ_BY[number])


def _wanted(limits: SpaceLimits) -> Wanted:
    """Return the values of fields that a user asks for; a largest value stands for a range."""
    wanted = {name: values for name in SWITCHES if (values := limits.values(name)) is not None}
    for name in SWITCHES:
        most = limits.most(name) if PLAN_FIELDS[name].declaration.is_limited else None
        if most is not None and name not in wanted:
            wanted[name] = (None, *range(1, most + 1))
    zero_stages = limits.values("zero_stage")
    return wanted if zero_stages is None else wanted | {"zero_stage": zero_stages}


def _place(row: Sequence[int], open_row: Sequence[int]) -> Place:
    """Return the place of a partial layout and a choice with such numbers."""
    pp, cp, dp, several, schedule, count, most, common, ep = row
    stage, recompute = (*open_row, 0)[:2]
    return Place(pp, cp, dp, stage, several, 0, recompute, schedule, count, most, common, ep)


@dataclass
class Choices:
    """Values of the fields of a job's layouts, as numbers.

    Args:
        job: Model, sequence length and batch.
        stack: Software stack.
        limits: Limits of the search.
    """

    job: TrainingJob
    stack: StackProfile
    limits: SpaceLimits
    _passes: dict[tuple[int, int, int], NDArray[np.int64]] = field(default_factory=dict)
    _rules: dict[int, list[int]] = field(default_factory=dict)

    def degrees(self, num_gpus: int) -> Iterator[dict[str, int]]:
        """Yield degrees of all axes, in the order of a plan's fields; one axis takes the rest."""
        job, stack, limits = self.job, self.stack, self.limits
        names = [each.name for each in SEARCHED_FIELDS if each.declaration.axis]
        free = [Axis(name) for name in names if not AXES[Axis(name)].takes_rest]
        (rest,) = (axis for axis, known in AXES.items() if known.takes_rest)

        def chosen(left: int, known: dict[str, int]) -> Iterator[dict[str, int]]:
            if len(known) < len(free):
                axis = free[len(known)]
                for degree in divisors(left) if is_searched(axis, job, stack, limits) else (1,):
                    if divides(job, axis, degree) and limits.allows(axis, degree):
                        yield from chosen(left // degree, {**known, axis: degree})
            elif divides(job, rest, left) and limits.allows(rest, left):
                yield {name: left if name == rest else known[name] for name in names}

        yield from chosen(num_gpus, {})

    def virtual_stages(self, degrees: dict[str, int]) -> Iterator[tuple[int, list[int]]]:
        """Yield each number of virtual stages with the schedules that can run it.

        More than one takes stages of equal layers, or equal ones when embedding and head count as a
        layer each, as Llama 3 405B was trained (126 layers; arXiv 2407.21783, section 3.3.2). Where
        the layers divide evenly for no pipeline, as the 61 of DeepSeek-V3 on powers of two, or
        where a user asks for it, they may be unequal: `lays_out_unequal`.
        """
        pp, limits, num_layers = degrees["pp"], self.limits, self.job.model.num_layers
        is_needed = pp > 1 and lays_out_unequal(num_layers, prod(degrees.values()), limits)
        divides_all = is_needed and offers(self.stack, self.job, degrees)
        for vpp in range(1, num_layers // pp + 1 if pp > 1 else 2):
            if vpp > 1 and not (divides_all or are_equal(num_layers, pp * vpp)):
                continue
            if limits.allows("num_virtual_stages", vpp):
                schedules = self._schedules(pp, vpp)
                if schedules:
                    yield vpp, schedules

    def _schedules(self, pp: int, vpp: int) -> list[int]:
        """Return the schedules that run *vpp* virtual stages a rank."""
        known = tuple(SCHEDULES)
        schedules = [
            index
            for index, (name, schedule) in enumerate(SCHEDULES.items())
            if schedule.interleaves == (vpp > 1) and self.limits.allows("schedule", name)
        ]
        if pp > 1:
            return schedules
        usual = PLAN_FIELDS["schedule"].default
        names = sorted(self.stack.schedules, key=lambda name: name != usual)
        offered = [index for name in names for index in schedules if known[index] == name]
        return (offered or schedules)[:1]

    def passes(self, degrees: dict[str, int], vpp: int, schedules: list[int]) -> NDArray[np.int64]:
        """Return the combinations of microbatch size, schedule and rule for stages.

        Returns:
            Rows of `OF_VIRTUAL_STAGES`, the first constant, in the order of layouts.
        """
        key = degrees["pp"], degrees["dp"], vpp
        if key not in self._passes:
            rules = self._stage_rules(degrees["pp"] * vpp)
            fixed = {**degrees, "num_virtual_stages": vpp}
            rows = [
                (vpp, size, schedule, rule)
                for size in divisors(self.job.global_batch_size // degrees["dp"])
                if self.limits.allows("microbatch_size", size)
                for schedule in schedules
                if is_runnable(self.job, self.stack, fixed, schedule, size)
                for rule in rules
            ]
            self._passes[key] = np.array(rows, np.int64).reshape(-1, len(OF_VIRTUAL_STAGES)).T
        return self._passes[key]

    def _stage_rules(self, num_stages: int) -> list[int]:
        """Return the rules for stages that give different layers, the stack's first."""
        if num_stages not in self._rules:
            rules = self.limits.values("stages") or (self.stack.stage_split, *StageSplit)
            code, by_layers = PLAN_FIELDS["stages"].code, dict[tuple[int, ...], int]()
            for rule in rules:
                # Rules that give the same layers are one layout: the first stands for it.
                by_layers.setdefault(stage_layers(self.job, num_stages, rule), code(rule))
            self._rules[num_stages] = [*by_layers.values()]
        return self._rules[num_stages]

    def experts(self, degrees: dict[str, int]) -> list[tuple[int, int]]:
        """Return the pairs of ``ep`` and ``etp`` that the ranks of a stage can have."""
        model, limits = self.job.model, self.limits
        ranks, tp = degrees["tp"] * degrees["cp"] * degrees["dp"], degrees["tp"]
        usual = (None,) if tp == 1 else (None, 1)
        is_divided = model.experts is not None and self.stack.expert_parallel
        expert_degrees = limits.values("ep") or (divisors(ranks) if is_divided else (1,))
        return sorted(
            (ep, PLAN_FIELDS["etp"].code(etp))
            for ep in cast("Sequence[int]", expert_degrees)
            for etp in cast("tuple[int | None, ...]", limits.values("etp") or usual)
            if limits.allows("ep", ep)
            and ranks % (ep * (etp or tp)) == 0
            # Without expert parallelism another etp than tp would be no layout of experts.
            and (ep > 1 or etp in {None, tp})
            and experts_refusal(model, ep, etp or tp) is None
        )

    def open_values(self, degrees: dict[str, int]) -> Values:
        """Return the values of the fields in `OPEN`."""
        return tuple(tuple(self._values(PLAN_FIELDS[name], degrees)) for name in OPEN)

    def _values(self, field: PlanField, degrees: dict[str, int]) -> list[int]:
        """Return the values of a field, one where its axis has degree 1: no effect."""
        wanted = self.limits.values(field.name)
        values = self._usual_values(field) if wanted is None else wanted
        acts_on = field.declaration.acts_on
        axes = () if acts_on is None else JOINT_AXES.get(acts_on) or (Axis(acts_on),)
        if axes and prod(degrees[axis] for axis in axes) == 1:
            is_stage = field.name == "zero_stage"
            values = values[: stages_of_one_rank(self.limits) if is_stage else 1]
        tokens = degrees["tp"] * degrees["cp"]
        if field.name == "sequence_parallel" and self.job.seq_len % tokens:
            values = tuple(value for value in values if not value)
        codes = [field.code(value) for value in values]
        return codes if acts_on is not None else sorted(codes)

    def _usual_values(self, field: PlanField) -> tuple[object, ...]:
        """Return the values of a field that are searched by default.

        A mode of one framework alone is searched on its stacks; asked for, a rule rejects it by
        name.
        """
        stack = self.stack
        if field.name == "zero_stage":
            return tuple(sorted({0, 1, *searched_zero_stages(stack)}))
        if field.name == "attention":
            return attention_kernels(self.job, stack)
        alone = {Recompute.SELECTIVE_OP} - {*stack.recompute_modes}
        known = applicable_values(field, self.job.model) or field.choices
        return tuple(each for each in known if each not in alone)
