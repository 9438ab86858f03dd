"""The space of layouts: every combination that divisibility allows, as columns of integers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from math import prod
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Recompute, StackProfile, StageSplit
from meshwright.planner.space.columns import Column, chosen_rows, combinations, distinct
from meshwright.planner.space.experts import expert_degrees, slices_shards
from meshwright.planner.space.limits import (
    Launcher,
    SpaceLimits,
    is_searched,
    launcher_of,
    stages_of_one_rank,
)
from meshwright.planner.space.pipelines import (
    Pipeline,
    are_equal,
    block_kinds,
    is_runnable,
    lays_out_unequal,
    stage_layers,
)
from meshwright.planner.space.settings import product_of, with_switches
from meshwright.planner.space.switches import BASIC, BASIC_FIELDS, SWITCHES, divisors
from meshwright.simulator import SCHEDULES, PlanError, ResolvedPlan, TrainingJob
from meshwright.simulator.layout import (
    ALL_ALONE,
    AXES,
    DP_CP,
    EXPERT_SHARDS,
    JOINT_AXES,
    NO_OFFLOAD,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    SHARDS,
    Axis,
    PlanField,
    Stage,
    attention_kernels,
    divides,
    known_values,
    model_refusal,
    offers,
    plan_stages,
    resolve,
    usual_zero_stages,
)
from meshwright.simulator.model import BlockKind

# Fields that decide which stages a pipeline has, and what its ranks run.
OF_PIPELINES = (
    "pp",
    "num_virtual_stages",
    "schedule",
    "microbatch_group_size",
    "stages",
    "recompute_layers",
    "recompute_method",
    "expert_overlap",
    "offload_layers",
    "offload_modules",
)
# Fields whose values depend on the virtual stages, too.
OF_VIRTUAL_STAGES = ("num_virtual_stages", "schedule", "microbatch_size", "stages")


@dataclass(frozen=True)
class Space:
    """Layouts of a job on a number of GPUs, with what they share.

    ``columns`` has the number of each field in every layout; of a field with few values that is the
    index of one (`PlanField.choices`).
    """

    job: TrainingJob
    stack: StackProfile
    num_gpus: int
    columns: Mapping[str, Column]
    launcher: Launcher | None = None

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(next(iter(self.columns.values())))

    def chosen(self, rows: Column) -> Self:
        """Return the space of the layouts in *rows*, some of them as often as asked for."""
        columns = {name: chosen_rows(column, rows) for name, column in self.columns.items()}
        return replace(self, columns=columns)

    def column(self, name: str) -> Column:
        """Return the numbers of one field, or of the ranks that share parameters."""
        if name in JOINT_AXES:
            return self._joint[name]
        if name in {SHARDS, EXPERT_SHARDS}:
            return self.num_shards if name == SHARDS else self.expert_shards
        if name not in self.columns:  # a field that no search varies, which a stack's rule may read
            field = PLAN_FIELDS[name]
            return np.broadcast_to(np.int64(field.code(field.default)), len(self))
        return self.columns[name]

    @cached_property
    def _joint(self) -> dict[str, Column]:
        return {name: product_of(map(self.column, axes)) for name, axes in JOINT_AXES.items()}

    @cached_property
    def num_microbatches(self) -> Column:
        """Microbatches of each layout's data-parallel ranks."""
        sequences = self.job.global_batch_size // self.column("dp")
        return sequences // self.column("microbatch_size")

    @cached_property
    def num_shards(self) -> Column:
        """Ranks of each layout that share one set of shards; see `ResolvedPlan.num_shards`."""
        shards = self.column("dp_shard")
        return self.column("cp") * np.where(shards, shards, self.column("dp"))

    @cached_property
    def expert_shards(self) -> Column:
        """Ranks of each layout that share the optimizer's states of the same routed experts."""
        tp, etp, ep = (self.column(name) for name in ("tp", "etp", "ep"))
        ranks = tp * self.num_shards // (ep * np.where(etp, etp, tp))
        return np.where(self.column("zero_stage"), ranks, 1)

    @cached_property
    def sharing(self) -> Column:
        """Number of each layout's setting of its switches, however many ranks share a shard."""
        has_sets = np.asarray(self.num_shards < self.column(DP_CP), np.int64)
        others = [self.column(name) for name in SWITCHES if name != "dp_shard"]
        return distinct([has_sets, *others])[1]

    @cached_property
    def _pipeline_columns(self) -> tuple[Column, Column]:
        return distinct([self.column(name) for name in OF_PIPELINES])

    @property
    def pipeline_numbers(self) -> Column:
        """The place in `pipelines` of each layout's."""
        return self._pipeline_columns[1]

    @cached_property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines that layouts have."""
        runtime, kinds = self.stack.pipeline_runtime, self.kinds
        return [
            Pipeline(plan.pp, plan.schedule_of(runtime), stages, kinds)
            for plan, stages in zip(self._plans, self._stages, strict=True)
        ]

    @cached_property
    def _plans(self) -> list[ResolvedPlan]:
        """The first plan with each of the pipelines."""
        return self.plans(self._pipeline_columns[0].tolist())

    @cached_property
    def _stages(self) -> list[tuple[Stage, ...]]:
        return [plan_stages(self.job.model, plan) for plan in self._plans]

    @cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The kinds of blocks that passes go through, in the order of columns."""
        made = any(
            stages[0].checkpoints != ALL_ALONE
            or stages[0].offload != NO_OFFLOAD
            or stages[-1].copies
            for stages in self._stages
        )
        return block_kinds(self.job.model, chain(*self._stages) if made else ())

    def plan(self, index: int) -> ResolvedPlan:
        """Return layout *index* as a plan."""
        return self.plans([index])[0]

    def plans(self, indices: Sequence[int]) -> list[ResolvedPlan]:
        """Return layouts as plans."""
        rules = PLAN_FIELDS["stages"].values(self.column("stages")[indices].tolist())
        return [
            resolve(self.job, None, self.stack, self._said(values, rule))
            for values, rule in zip(self._values(indices), rules, strict=True)
        ]

    def plans_without_stages(self, indices: Sequence[int]) -> list[ResolvedPlan]:
        """Return layouts as plans that leave the layers of their stages open."""
        return [ResolvedPlan.of(values) for values in self._values(indices)]

    def _said(self, values: Mapping[str, object], rule: object) -> dict[str, object]:
        """Return what a layout with *values* says: of one rank no stage that the stack lacks."""
        pp, vpp = (cast("int", values[name]) for name in ("pp", "num_virtual_stages"))
        said = {**values, "stages": stage_layers(self.job, pp * vpp, rule)}
        if values["dp"] == values["cp"] == 1 and said["zero_stage"] not in self.stack.zero_stages:
            del said["zero_stage"]
        return said

    def _values(self, indices: Sequence[int]) -> list[dict[str, object]]:
        """Return the fields of layouts but for their stages; None is what the stack does."""
        fields = [field for field in SEARCHED_FIELDS if field.name != "stages"]
        names = [field.name for field in fields]
        columns = [field.values(self.columns[field.name][indices].tolist()) for field in fields]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


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
        _block(job, stack, limits, {**degrees, "num_virtual_stages": vpp}, schedules, choices)
        for degrees in _degrees(job, stack, num_gpus, limits)
        for choices in [_choices(job, stack, limits, degrees)]
        for vpp, schedules in _virtual_stages(job, stack, degrees, limits)
    ]
    basic = np.concatenate([*blocks, np.empty((len(BASIC), 0), np.int64)], axis=1)
    columns = with_switches(job, stack, limits, basic)
    launcher, _ = launcher_of(job, stack, limits)
    space = Space(job=job, stack=stack, num_gpus=num_gpus, columns=columns, launcher=launcher)
    kept = slices_shards(space.column)
    return space if kept.all() else space.chosen(np.flatnonzero(kept))


def _degrees(
    job: TrainingJob, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> Iterator[dict[str, int]]:
    """Yield the degrees of all axes, in the order of a plan's fields; one takes what is left."""
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


def _virtual_stages(
    job: TrainingJob, stack: StackProfile, degrees: dict[str, int], limits: SpaceLimits
) -> Iterator[tuple[int, list[int]]]:
    """Yield each number of virtual stages with the schedules that can run it.

    More than one takes equal virtual stages, or equal ones when embedding and head count as a
    layer each, as Llama 3 405B was trained (126 layers; arXiv 2407.21783, section 3.3.2).  Where
    the layers divide into none whatever the ranks of a pipeline, as the 61 of DeepSeek-V3 on powers
    of two, they may be unequal, and where they are asked for: `lays_out_unequal`.
    """
    pp, model, known = degrees["pp"], job.model, tuple(SCHEDULES)
    is_needed = lays_out_unequal(model.num_layers, prod(degrees.values()), limits)
    divides_all = pp > 1 and is_needed and offers(stack, job, degrees)
    for vpp in range(1, model.num_layers // pp + 1):
        is_laid_out = divides_all or are_equal(model.num_layers, pp * vpp)
        if vpp > 1 and (pp == 1 or not is_laid_out):
            continue
        if not limits.allows("num_virtual_stages", vpp):
            continue
        schedules = [
            index
            for index, (name, schedule) in enumerate(SCHEDULES.items())
            if schedule.interleaves == (vpp > 1) and limits.allows("schedule", name)
        ]
        if pp == 1:  # no pipeline: all are one, which is called as usual where the stack has it
            usual = PLAN_FIELDS["schedule"].default
            names = sorted(stack.schedules, key=lambda name: name != usual)
            offered = [index for name in names for index in schedules if known[index] == name]
            schedules = (offered or schedules)[:1]
        if schedules:
            yield vpp, schedules


@dataclass(frozen=True, slots=True)
class _Choices:
    """What is chosen by degrees alone: numbers of fields by name, and degrees of experts."""

    numbers: dict[str, list[int]]
    experts: list[tuple[int, int]]


def _choices(
    job: TrainingJob, stack: StackProfile, limits: SpaceLimits, degrees: dict[str, int]
) -> _Choices:
    """Return what is left to choose at *degrees*, whatever the virtual stages."""
    experts = expert_degrees(job, stack, limits, degrees)
    numbers = {name: [degree] for name, degree in degrees.items()}
    for field in BASIC_FIELDS:
        if field.divides_experts:
            numbers[field.name] = sorted({pair[field.name == "etp"] for pair in experts})
        elif field.name not in {*degrees, *OF_VIRTUAL_STAGES}:
            numbers[field.name] = _switches(job, stack, limits, field, degrees)
    return _Choices(numbers, experts)


def _block(
    job: TrainingJob,
    stack: StackProfile,
    limits: SpaceLimits,
    fixed: dict[str, int],
    schedules: list[int],
    choices: _Choices,
) -> NDArray[np.int64]:
    """Return the layouts of one choice of degrees: the product of the fields that are left."""
    vpp, experts = fixed["num_virtual_stages"], choices.experts
    sizes = _microbatch_sizes(job, stack, limits, fixed, schedules)
    rules = _stage_rules(job, stack, limits, fixed["pp"] * vpp)
    own = dict(zip(OF_VIRTUAL_STAGES, ([vpp], schedules, sizes, rules), strict=True))
    codes = combinations([(choices.numbers | own)[field.name] for field in BASIC_FIELDS])
    schedule, size, ep, etp = map(BASIC.index, ("schedule", "microbatch_size", "ep", "etp"))
    for pair in product(schedules, sizes):
        if not is_runnable(job, stack, fixed, *pair):
            codes = codes[:, (codes[schedule] != pair[0]) | (codes[size] != pair[1])]
    if len(experts) > 1:
        base = 1 + max(number for _, number in experts)
        known = [base * one + other for one, other in experts]
        codes = codes[:, np.isin(base * codes[ep] + codes[etp], known)]
    return codes


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
        and any(is_runnable(job, stack, fixed, schedule, size) for schedule in schedules)
    ]


def _stage_rules(
    job: TrainingJob, stack: StackProfile, limits: SpaceLimits, num_stages: int
) -> list[int]:
    """Return the rules for stages that give different layers, the stack's first."""
    rules = limits.values("stages") or (stack.stage_split, *StageSplit)
    by_layers: dict[tuple[int, ...], int] = {}
    for rule in rules:
        by_layers.setdefault(stage_layers(job, num_stages, rule), PLAN_FIELDS["stages"].code(rule))
    return list(by_layers.values())


def _switches(
    job: TrainingJob,
    stack: StackProfile,
    limits: SpaceLimits,
    field: PlanField,
    fixed: dict[str, int],
) -> list[int]:
    """Return the values of a switch as numbers, one where its axis has degree 1: no effect."""
    wanted = limits.values(field.name)
    values = _usual_values(job, stack, field) if wanted is None else wanted
    acts_on = field.declaration.acts_on
    axes = () if acts_on is None else JOINT_AXES.get(acts_on) or (Axis(acts_on),)
    if axes and prod(fixed[axis] for axis in axes) == 1:
        values = values[: stages_of_one_rank(limits) if field.name == "zero_stage" else 1]
    if field.name == "sequence_parallel" and job.seq_len % (fixed["tp"] * fixed["cp"]):
        values = tuple(value for value in values if not value)
    codes = [field.code(value) for value in values]
    return codes if acts_on is not None else sorted(codes)


def _usual_values(job: TrainingJob, stack: StackProfile, field: PlanField) -> tuple[object, ...]:
    """Return the values of a switch that are searched where none is asked for.

    A mode of one framework alone is searched on its stacks; asked for, a rule rejects it by name.
    """
    if field.name == "zero_stage":
        return tuple(sorted({0, 1, *usual_zero_stages(stack)}))
    if field.name == "attention":
        return attention_kernels(job, stack)
    alone = {Recompute.SELECTIVE_OP} - {*stack.recompute_modes}
    return tuple(
        each for each in known_values(field, job.model) or field.choices if each not in alone
    )
