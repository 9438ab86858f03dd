"""The space of layouts: every combination that divisibility allows, as columns of integers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Attention, Recompute, StackProfile, StageSplit
from meshwright.simulator import (
    SCHEDULES,
    ModelSpec,
    ParallelPlan,
    PlanError,
    TrainingJob,
    resolve_stages,
)

Column = NDArray[np.int64]

RECOMPUTES = tuple(Recompute)
COLUMNS = (
    "tp",
    "pp",
    "dp",
    "num_virtual_stages",
    "microbatch_size",
    "zero_stage",
    "sequence_parallel",
    "recompute",
    "schedule",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpaceLimits:
    """What of the space is searched: allowed values of an axis (None: all), and largest values.

    ``attention`` and ``stages`` are not searched: they default to the stack's.
    """

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    num_virtual_stages: tuple[int, ...] | None = None
    microbatch_size: tuple[int, ...] | None = None
    zero_stage: tuple[int, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    schedule: tuple[str, ...] | None = None
    max_tp: int | None = None
    max_pp: int | None = None
    max_dp: int | None = None
    max_virtual_stages: int | None = None
    max_microbatch_size: int | None = None
    attention: Attention | None = None
    stages: StageSplit | None = None

    def __post_init__(self) -> None:
        """Refuse limits that leave nothing of an axis."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value < 1:
                raise PlanError(f"{each.name}={value} leaves nothing; allowed: at least 1")

    def allows(self, axis: str, value: object, largest: int | None = None) -> bool:
        """Return whether *value* of *axis* may be searched."""
        allowed = getattr(self, axis)
        if allowed is not None and value not in allowed:
            return False
        return largest is None or not isinstance(value, int) or value <= largest


@dataclass(frozen=True)
class Space:
    """Layouts of a job on a number of GPUs, one row each, with what they share.

    ``rows`` has a column for each of `COLUMNS`; recompute and schedule are indices into
    `RECOMPUTES` and ``schedules``.
    """

    job: TrainingJob
    stack: StackProfile
    num_gpus: int
    attention: Attention
    stages: StageSplit
    rows: NDArray[np.int64]
    schedules: tuple[str, ...] = field(default=tuple(SCHEDULES))

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(self.rows)

    def column(self, name: str) -> Column:
        """Return the values of one axis."""
        return self.rows[:, COLUMNS.index(name)]

    @cached_property
    def num_microbatches(self) -> Column:
        """Microbatches of each layout's replicas."""
        per_replica = self.job.global_batch_size // self.column("dp")
        return per_replica // self.column("microbatch_size")

    def layers(self, pp: int, num_virtual_stages: int) -> tuple[int, ...]:
        """Return the layers of each virtual stage."""
        return resolve_stages(
            self.job.model, self.job.seq_len, pp * num_virtual_stages, self.stages
        )

    def plan(self, index: int) -> ParallelPlan:
        """Return layout *index* as a plan."""
        tp, pp, dp, vpp, microbatch, zero, sequence, recompute, schedule = (
            int(value) for value in self.rows[index]
        )
        return ParallelPlan(
            tp=tp,
            pp=pp,
            dp=dp,
            num_virtual_stages=vpp,
            microbatch_size=microbatch,
            zero_stage=zero,
            sequence_parallel=bool(sequence),
            recompute=RECOMPUTES[recompute],
            attention=self.attention,
            schedule=self.schedules[schedule],
            stages=self.layers(pp, vpp),
        )


def enumerate_space(
    job: TrainingJob, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> Space:
    """Return every layout of *job* on *num_gpus* that divisibility and *limits* allow."""
    limits = _with_recomputes(limits, stack)
    zero_stages = tuple(sorted({0, 1, *stack.zero_stages}))
    blocks = [
        _block(job, limits, (tp, pp, dp, vpp), schedules, zero_stages)
        for tp, pp, dp in _degrees(job, num_gpus, limits)
        for vpp, schedules in _virtual_stages(job.model, pp, limits)
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


def _with_recomputes(limits: SpaceLimits, stack: StackProfile) -> SpaceLimits:
    """Return *limits* without a mode of one framework alone where *stack* is another.

    It is there where it is asked for, and then a rule rejects it by its name.
    """
    if limits.recompute is not None or Recompute.SELECTIVE_OP in stack.recompute_modes:
        return limits
    others = tuple(mode for mode in RECOMPUTES if mode is not Recompute.SELECTIVE_OP)
    return replace(limits, recompute=others)


def _degrees(
    job: TrainingJob, num_gpus: int, limits: SpaceLimits
) -> Iterator[tuple[int, int, int]]:
    for tp in divisors(num_gpus):
        if not (tp_divides(job.model, tp) and limits.allows("tp", tp, limits.max_tp)):
            continue
        for pp in divisors(num_gpus // tp):
            dp = num_gpus // tp // pp
            if (
                pp <= job.model.num_layers
                and job.global_batch_size % dp == 0
                and limits.allows("pp", pp, limits.max_pp)
                and limits.allows("dp", dp, limits.max_dp)
            ):
                yield tp, pp, dp


def tp_divides(model: ModelSpec, tp: int) -> bool:
    """Return whether heads, key-value heads and MLP width can be split *tp* ways."""
    whole = (model.num_heads, model.ffn_hidden_size, model.hidden_size)
    kv_heads = model.num_kv_heads
    return all(size % tp == 0 for size in whole) and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _virtual_stages(
    model: ModelSpec, pp: int, limits: SpaceLimits
) -> Iterator[tuple[int, list[int]]]:
    """Yield each number of virtual stages with the schedules that can run it.

    More than one takes equal virtual stages, or equal ones when embedding and head count as a
    layer each, as Llama 3 405B was trained (126 layers; arXiv 2407.21783, section 3.3.2).
    """
    per_rank = model.num_layers // pp
    for vpp in range(1, per_rank + 1):
        if vpp > 1 and (pp == 1 or not _divides_into(model.num_layers, pp * vpp)):
            continue
        if not limits.allows("num_virtual_stages", vpp, limits.max_virtual_stages):
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
    limits: SpaceLimits,
    degrees: tuple[int, int, int, int],
    schedules: Sequence[int],
    zero_stages: tuple[int, ...],
) -> NDArray[np.int64]:
    """Return the rows of one choice of degrees: the product of the axes that are left."""
    tp, pp, dp, vpp = degrees
    per_replica = job.global_batch_size // dp
    axes = (
        [
            size
            for size in divisors(per_replica)
            if limits.allows("microbatch_size", size, limits.max_microbatch_size)
            and _schedulable(schedules, pp, per_replica // size, vpp)
        ],
        list(_effective(limits.zero_stage, zero_stages, dp)),
        [
            int(value)
            for value in _effective(limits.sequence_parallel, (False, True), tp)
            if not value or job.seq_len % tp == 0
        ],
        [index for index, mode in enumerate(RECOMPUTES) if limits.allows("recompute", mode)],
        list(schedules),
    )
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    head = np.tile(np.array(degrees, np.int64), (len(grid), 1))
    return np.concatenate([head, grid.astype(np.int64)], axis=1)


def _effective(
    wanted: tuple[int, ...] | None, every: tuple[int, ...], degree: int
) -> tuple[int, ...]:
    """Return the values of a switch; on an axis of degree 1 it has no effect, one is enough."""
    values = every if wanted is None else wanted
    return values if degree > 1 else values[:1]


def _schedulable(schedules: Sequence[int], pp: int, num_microbatches: int, vpp: int) -> bool:
    """Return whether every schedule of this kind can run so many microbatches."""
    known = tuple(SCHEDULES.values())
    return all(known[index].refusal(pp, num_microbatches, vpp) is None for index in schedules)


def divisors(number: int) -> list[int]:
    """Return the divisors of *number* in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]
