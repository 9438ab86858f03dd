"""The space of layouts: every combination that divisibility allows, as columns of integers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import cast

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import (
    Recompute,
    StackProfile,
    StageSplit,
)
from meshwright.planner.space.experts import expert_degrees, slices_shards
from meshwright.planner.space.limits import COLUMNS, SpaceLimits
from meshwright.planner.space.pipelines import Pipeline, block_kinds, is_runnable
from meshwright.planner.space.switches import (
    SWITCHES,
    Column,
    Place,
    Setting,
    distinct,
    divisors,
    settings,
)
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
    DP_CP,
    EXPERT_SHARDS,
    JOINT_AXES,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    SHARDS,
    Axis,
    PlanField,
    attention_kernels,
    divides,
    known_values,
    model_refusal,
    model_stages,
    stack_gaps,
    usual_zero_stages,
)
from meshwright.simulator.model import AnyModel

# Fields but for switches: layouts that are alike in them differ in what replicas exchange and keep.
BASIC_FIELDS = tuple(each for each in SEARCHED_FIELDS if each.name not in SWITCHES)
BASIC = tuple(each.name for each in BASIC_FIELDS)
LONG_SEQUENCE = 8192  # tokens from which a search cuts sequences unasked


@dataclass(frozen=True)
class Space:
    """Layouts of a job on a number of GPUs, one row each, with what they share.

    ``rows`` has a column for each of `COLUMNS`; of a field with few values it holds the index of
    one (`PlanField.choices`).
    """

    job: TrainingJob
    stack: StackProfile
    num_gpus: int
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(self.rows)

    def column(self, name: str) -> Column:
        """Return the numbers of one field, or of the ranks that share parameters."""
        if name in JOINT_AXES:
            return self._joint[name]
        if name in {SHARDS, EXPERT_SHARDS}:
            return self.num_shards if name == SHARDS else self.expert_shards
        return self.rows[:, COLUMNS.index(name)]

    @cached_property
    def _joint(self) -> dict[str, Column]:
        return {name: _product(map(self.column, axes)) for name, axes in JOINT_AXES.items()}

    @cached_property
    def num_microbatches(self) -> Column:
        """Microbatches of each layout's data-parallel ranks."""
        sequences = self.job.global_batch_size // self.column("dp")
        return sequences // self.column("microbatch_size")

    @cached_property
    def num_shards(self) -> Column:
        """Ranks of each layout that share one set of shards; see `ParallelPlan.num_shards`."""
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
        names = ("pp", "num_virtual_stages", "schedule", "stages")
        return distinct([self.column(name) for name in names])

    @property
    def pipeline_numbers(self) -> Column:
        """The place in `pipelines` of each layout's."""
        return self._pipeline_columns[1]

    @cached_property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines that layouts have."""
        kinds = block_kinds(self.job.model)
        plans = map(self.plan, self._pipeline_columns[0].tolist())
        runtime = RUNTIMES[self.stack.pipeline_runtime]
        return [
            Pipeline(
                plan.pp, runtime[plan.schedule], model_stages(self.job.model, plan.stages), kinds
            )
            for plan in plans
        ]

    def plan(self, index: int) -> ParallelPlan:
        """Return layout *index* as a plan."""
        plan = self.plan_without_stages(index)
        rule = PLAN_FIELDS["stages"].value(int(self.column("stages")[index]))
        return replace(plan, stages=_layers(self.job, plan.num_stages, rule))

    def plan_without_stages(self, index: int) -> ParallelPlan:
        """Return layout *index* as a plan that leaves the layers of its stages open."""
        codes = self.rows[index].tolist()
        values = {
            field.name: field.value(code)
            for field, code in zip(SEARCHED_FIELDS, codes, strict=True)
            if field.name != "stages"
        }
        return ParallelPlan.of(values)


def _layers(job: TrainingJob, num_stages: int, rule: object) -> tuple[int, ...]:
    return resolve_stages(job.model, job.seq_len, num_stages, cast("StageSplit", rule))


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
        for degrees in _degrees(job, stack, num_gpus, limits)
        for vpp, schedules in _virtual_stages(job.model, stack, degrees["pp"], limits)
    ]
    rows = np.concatenate([*blocks, np.empty((0, len(BASIC)), np.int64)])
    rows = _with_switches(job, stack, limits, rows)
    space = Space(job=job, stack=stack, num_gpus=num_gpus, rows=rows)
    kept = slices_shards(space.column)
    return space if kept.all() else replace(space, rows=np.asfortranarray(rows[kept]))


def is_searched(axis: Axis, job: TrainingJob, stack: StackProfile, limits: SpaceLimits) -> bool:
    """Return whether degrees of *axis* are laid out: of a rare one if it is asked for.

    Sequences are cut unasked where they are long and the stack does so: of GPT-3 on 3,072 GPUs it
    makes 6.6 times as many layouts, and the search 3.6 times as long, whose best has cp = 1.
    """
    known = AXES[axis]
    if not known.is_rare or limits.values(axis) is not None:
        return True
    said = (each for each in SEARCHED_FIELDS if axis in {each.name, each.declaration.acts_on})
    is_asked = any(limits.asks_for(each.name) for each in said)
    is_offered = bool(getattr(stack, known.offered_by or "", False))
    return is_offered and (is_asked or job.seq_len >= LONG_SEQUENCE)


def _with_switches(
    job: TrainingJob, stack: StackProfile, limits: SpaceLimits, basic: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return *basic* rows with every setting of the switches that has an effect there."""
    columns = dict(zip(BASIC, basic.T, strict=True))
    joint = {name: names for name, names in JOINT_AXES.items() if {*names} <= columns.keys()}
    columns |= {name: _product(columns[each] for each in names) for name, names in joint.items()}
    count = job.global_batch_size // columns["dp"] // columns["microbatch_size"]
    lacks = np.zeros(len(basic), np.bool_)
    for gap in stack_gaps(stack, job):
        if {condition.field for condition in gap.conditions} <= columns.keys():
            lacks |= gap.lacks(columns.__getitem__)
    names = ("pp", "cp", "dp", "zero_stage")
    places = [*(columns[name] for name in names), count > 1, lacks]
    places = [np.asarray(each, np.int64) for each in places]
    first, member = distinct(places)
    wanted = {name: values for name in SWITCHES if (values := limits.values(name)) is not None}
    tables = [
        _codes(settings(job, stack, Place(*row), wanted))
        for row in np.stack(places, axis=1)[first].tolist()
    ]
    sizes = np.array([len(table) for table in tables], np.int64)
    num_settings = sizes[member]
    family = np.repeat(np.arange(len(basic)), num_settings)
    number = np.arange(len(family)) - np.repeat(
        np.cumsum(num_settings) - num_settings, num_settings
    )
    start = (np.cumsum(sizes) - sizes)[member[family]]
    switches = np.concatenate([*tables, _codes([])])[start + number]
    rows = np.empty((len(family), len(COLUMNS)), np.int64, order="F")  # it is read by column
    rows[:, [COLUMNS.index(name) for name in BASIC]] = basic[family]
    rows[:, [COLUMNS.index(name) for name in SWITCHES]] = switches
    return rows


def _codes(known: Sequence[Setting]) -> NDArray[np.int64]:
    """Return settings as rows of numbers."""
    fields = [PLAN_FIELDS[name] for name in SWITCHES]
    rows = [[field.code(each[field.name]) for field in fields] for each in known]
    return np.array(rows, np.int64).reshape(-1, len(SWITCHES))


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
    model: AnyModel, stack: StackProfile, pp: int, limits: SpaceLimits
) -> Iterator[tuple[int, list[int]]]:
    """Yield each number of virtual stages with the schedules that can run it.

    More than one takes equal virtual stages, or equal ones when embedding and head count as a
    layer each, as Llama 3 405B was trained (126 layers; arXiv 2407.21783, section 3.3.2).
    """
    per_rank, known = model.num_layers // pp, tuple(SCHEDULES)
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
        if pp == 1:  # no pipeline: all are one, which is called as usual where the stack has it
            usual = PLAN_FIELDS["schedule"].default
            names = sorted(stack.schedules, key=lambda name: name != usual)
            offered = [index for name in names for index in schedules if known[index] == name]
            schedules = (offered or schedules)[:1]
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
        if field.name == "stages":
            return _stage_rules(job, stack, limits, fixed["pp"] * fixed["num_virtual_stages"])
        if field.divides_experts:
            return sorted({pair[field.name == "etp"] for pair in experts})
        return _switches(job, stack, limits, field, fixed)

    experts = expert_degrees(job, stack, limits, fixed)
    axes = [np.array(numbers(field), np.int64) for field in BASIC_FIELDS]
    sizes = tuple(map(len, axes))
    places = np.unravel_index(np.arange(prod(sizes)), sizes)
    rows = np.stack([axis[place] for axis, place in zip(axes, places, strict=True)], axis=1)
    schedule, size = (rows[:, BASIC.index(name)] for name in ("schedule", "microbatch_size"))
    for pair in product(schedules, set(size.tolist())):
        if not is_runnable(job, stack, fixed, *pair):
            kept = (schedule != pair[0]) | (size != pair[1])
            rows, schedule, size = rows[kept], schedule[kept], size[kept]
    ep, etp = (rows[:, BASIC.index(name)].tolist() for name in ("ep", "etp"))
    return rows[[pair in experts for pair in zip(ep, etp, strict=True)]]


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
        by_layers.setdefault(_layers(job, num_stages, rule), PLAN_FIELDS["stages"].code(rule))
    return list(by_layers.values())


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
    axes = () if acts_on is None else JOINT_AXES.get(acts_on) or (Axis(acts_on),)
    if axes and prod(fixed[axis] for axis in axes) == 1:
        values = values[:1]
    if field.name == "sequence_parallel" and job.seq_len % (fixed["tp"] * fixed["cp"]):
        values = tuple(value for value in values if not value)
    codes = [field.code(value) for value in values]
    return codes if acts_on is not None else sorted(codes)


def _product(columns: Iterable[Column]) -> Column:
    return np.asarray(np.prod([*columns], axis=0), np.int64)


def _usual_values(job: TrainingJob, stack: StackProfile, field: PlanField) -> tuple[object, ...]:
    """Return the values of a switch that are searched where none is asked for.

    A mode of one framework alone is searched on its stacks; asked for, a rule rejects it by name.
    """
    if field.name == "zero_stage":
        return tuple(sorted({0, 1, *usual_zero_stages(stack)}))
    if field.name == "attention":
        return attention_kernels(job.model, stack)
    alone = {Recompute.SELECTIVE_OP} - {*stack.recompute_modes}
    return tuple(
        each for each in known_values(field, job.model) or field.choices if each not in alone
    )
