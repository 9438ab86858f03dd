"""Pipelines of a space: their stages, the blocks ahead of each, and roles of ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import StackProfile, StageSplit
from meshwright.planner.space.columns import Column
from meshwright.planner.space.limits import SpaceLimits
from meshwright.planner.space.switches import divisors
from meshwright.simulator import RUNTIMES, Schedule, TrainingJob, resolve_stages
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import (
    ENDS,
    AnyModel,
    BlockKind,
    layer_kinds,
    mtp_kinds,
)


def block_kinds(model: AnyModel, stages: Iterable[Stage] = ()) -> tuple[BlockKind, ...]:
    """Return the kinds of blocks of *model* in column order: layers, then embedding and head.

    Kinds that plans derive follow the model's layers.
    """
    own = layer_kinds(model)
    # Only plans of a space derive kinds: of recomputed or offloaded layers.
    made = dict.fromkeys(kind for stage in stages for kind, _ in stage.passes)
    own += mtp_kinds(model)
    return (*own, *(kind for kind in made if kind not in {*own, *ENDS}), *ENDS)


def block_counts(kinds: Sequence[BlockKind], stages: Iterable[Stage]) -> list[int]:
    """Return the number of blocks of each of *kinds* in a pass through *stages*."""
    counts = dict.fromkeys(kinds, 0)
    for stage in stages:
        for kind, count in stage.passes:
            counts[kind] += count
    return list(counts.values())


def stage_layers(job: TrainingJob, num_stages: int, rule: object) -> tuple[int, ...]:
    """Return the layers of each of *num_stages* virtual stages by a *rule*."""
    return resolve_stages(job.model, job.seq_len, num_stages, cast("StageSplit", rule))


def lays_out_unequal(num_layers: int, num_gpus: int, limits: SpaceLimits) -> bool:
    """Return True if virtual stages of unequal layers are searched where stacks offer them.

    Limits of virtual stages ask for them, as does F/B overlap, which needs virtual stages. By
    default they would make 2.6 times as many layouts of GPT-3 on 3,072 GPUs, and the search three
    times as long, whose best takes 0.7 % less time.
    """
    is_asked = any(map(limits.asks_for, ("expert_overlap", "num_virtual_stages")))
    return is_asked or not _divides(num_layers, num_gpus)


@lru_cache(maxsize=64)
def _divides(num_layers: int, num_gpus: int) -> bool:
    """Return True if layers divide into equal virtual stages of some pipeline of *num_gpus*."""
    pipelines = (pp for pp in divisors(num_gpus) if 1 < pp <= num_layers)
    numbers = (pp * vpp for pp in pipelines for vpp in range(2, num_layers // pp + 1))
    return any(are_equal(num_layers, each) for each in numbers)


def are_equal(num_layers: int, num_stages: int) -> bool:
    """Return True if stages have equal layers, or do when embedding and head count as one each.

    >>> [are_equal(126, num_stages) for num_stages in (63, 64, 32, 48)]
    [True, True, True, False]
    """
    return num_layers % num_stages == 0 or (num_layers + 2) % num_stages == 0


class Role(NamedTuple):
    """Ranks with the same virtual stages: the first and the last of them."""

    stages: tuple[Stage, ...]
    first: int
    last: int


@dataclass(frozen=True)
class Pipeline:
    """Pipeline of layouts with the same degree, schedule and virtual stages.

    Args:
        pp: Number of ranks.
        schedule: Schedule of their passes.
        stages: Virtual stages in model order.
        kinds: Kinds of blocks in the order of columns.
    """

    pp: int
    schedule: Schedule
    stages: tuple[Stage, ...]
    kinds: tuple[BlockKind, ...]
    _passes: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return len(self.stages) - 1

    def places(self, role: Role) -> range:
        """Return the indices of the stages of the role's last rank."""
        return range(role.last, len(self.stages), self.pp)

    @cached_property
    def roles(self) -> list[Role]:
        """Roles of its ranks."""
        return pipeline_roles(self.stages, self.pp)

    @cached_property
    def through(self) -> NDArray[np.int64]:
        """Blocks of each kind ahead of each stage, and behind the last one."""
        return np.concatenate(
            [np.zeros_like(self._stage_counts[:1]), self._stage_counts.cumsum(axis=0)]
        )

    @cached_property
    def _stage_counts(self) -> NDArray[np.int64]:
        by_stage = {stage: block_counts(self.kinds, [stage]) for stage in {*self.stages}}
        return np.array([by_stage[stage] for stage in self.stages], np.int64)

    @cached_property
    def ways(self) -> tuple[Column, Column]:
        """Blocks of each role's last rank, and ahead of it: ``[roles, kinds]``."""
        own = [self.own_blocks(role).sum(axis=0) for role in self.roles]
        return np.array(own), np.array([self.between(0, role.last) for role in self.roles])

    @cached_property
    def stage_blocks(self) -> list[Column]:
        """Blocks of each different virtual stage, for each role."""
        return [
            np.array([block_counts(self.kinds, [each]) for each in dict.fromkeys(role.stages)])
            for role in self.roles
        ]

    def between(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the blocks of each kind from stage *first* to before stage *end*."""
        return np.asarray(self.through[end] - self.through[first], np.int64)

    def passes(self, role: Role, num_microbatches: int) -> tuple[int, ...]:
        """Return the passes in flight of a role's last rank, and its blocks around the last stage.

        The latter are passes through blocks of each kind, forward and backward, from the first to
        the last pass of its last stage (`Schedule.around_last`).
        """
        key = role.last, num_microbatches
        if key not in self._passes:
            size = role.last, self.pp, num_microbatches, len(role.stages)
            around = np.array(self.schedule.around_last(*size)).T @ self.own_blocks(role)
            self._passes[key] = self.schedule.in_flight(*size), *around.ravel().tolist()
        return self._passes[key]

    def own_blocks(self, role: Role) -> NDArray[np.int64]:
        """Return the blocks of each kind in each virtual stage of the role's last rank."""
        return self._stage_counts[role.last :: self.pp]

    @cached_property
    def senders(self) -> NDArray[np.int64]:
        """One-hot rows of the kind of block that sends each stage's output."""
        kinds = [self.kinds.index(stage.passes[-1].kind) for stage in self.stages]
        return np.eye(len(self.kinds), dtype=np.int64)[kinds]


def pipeline_roles(stages: Sequence[Stage], pp: int) -> list[Role]:
    """Return the roles of a pipeline with the virtual *stages*, in rank order.

    >>> from meshwright.simulator import load_model
    >>> from meshwright.simulator.layout import model_stages
    >>> stages = model_stages(load_model("gpt2"), (3, 3, 3, 3))
    >>> [(role.first, role.last) for role in pipeline_roles(stages, 4)]
    [(0, 0), (1, 2), (3, 3)]
    """
    # Ranks with equal virtual stages cost and hold the same: few roles stand for many ranks.
    members: dict[tuple[Stage, ...], list[int]] = {}
    for rank in range(pp):
        members.setdefault(tuple(stages[rank::pp]), []).append(rank)
    return [Role(rank_stages, ranks[0], ranks[-1]) for rank_stages, ranks in members.items()]


def is_runnable(
    job: TrainingJob, stack: StackProfile, fixed: dict[str, int], schedule: int, size: int
) -> bool:
    """Tell whether a schedule of the stack's runtime takes microbatches of *size* sequences."""
    schedules = tuple(RUNTIMES[stack.pipeline_runtime].values())
    num_microbatches = job.global_batch_size // fixed["dp"] // size
    counts = (fixed["pp"], num_microbatches, fixed["num_virtual_stages"])
    return schedules[schedule].refusal(*counts) is None
