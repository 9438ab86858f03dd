"""The exact peak memory of layouts whose states are units of fully_shard, one by one.

What such a rank holds depends on which pass came before, so its actions are walked; layouts with
the same rank share the walk.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planner.roles import PERIODS, Role
from planner.shapes import ShapeTable
from planner.space import Column, Space
from simulator import Schedule
from simulator.data_parallel import Replication, Wire, sum_layers
from simulator.fp8_casts import weight_copy_bytes
from simulator.memory import (
    Shards,
    StateBytes,
    memory_peak,
    memory_timeline,
    with_copies,
)
from simulator.mesh import GroupSpan
from simulator.unit_memory import unit_rank_memory


class _Rank(NamedTuple):
    """What decides the memory of a rank."""

    shape: int
    dp: int
    num_microbatches: int
    role: Role
    pp: int
    schedule: Schedule


@dataclass(slots=True)
class UnitPeaks:
    """Peaks of ranks, found once for all layouts that share them."""

    space: Space
    table: ShapeTable
    state: StateBytes
    _known: dict[tuple[int, int, int, Role, int, str, int], int] = field(default_factory=dict)

    def of_layouts(
        self, indices: Column, roles: list[Role], pp: int, schedule: Schedule, to: Replication
    ) -> Column:
        """Return the live bytes of the fullest rank of layouts with one pipeline."""
        columns = zip(
            self.table.index[indices].tolist(),
            self.space.column("dp")[indices].tolist(),
            self.space.num_microbatches[indices].tolist(),
            strict=True,
        )
        peaks = [
            max(self._peak(_Rank(*layout, role, pp, schedule), to) for role in roles)
            for layout in columns
        ]
        return np.array(peaks, np.int64)

    def _peak(self, rank: _Rank, to: Replication) -> int:
        key = (*rank[:-1], rank.schedule.name, to.zero_stage)
        if key not in self._known:
            self._known[key] = self._walk(rank, to)
        return self._known[key]

    def _walk(self, rank: _Rank, to: Replication) -> int:
        shape, stages = self.table.shapes[rank.shape], rank.role.stages
        whole = to.keeps_units or not to.reduces_each_microbatch
        split = rank.dp if to.zero_stage >= 3 else 1
        to = to._replace(
            span=GroupSpan(rank.dp, 1, rank.dp),
            shards=Shards(split, 1 if whole else split, split),
        )
        wire = Wire.of(self.space.stack, self.space.job.precision)
        sizes = (self.state, wire.reduce_bytes)
        memory = unit_rank_memory(shape, stages, to, sizes, rank.num_microbatches)
        memory = with_copies(memory, weight_copy_bytes(shape, sum_layers(stages)))
        # A pipeline that alternates repeats itself once its warm-up is over.
        few = rank.num_microbatches
        if rank.schedule.in_flight(rank.role.first, rank.pp, few, len(stages)) < few * len(stages):
            few = min(few, PERIODS * rank.pp)
        actions = rank.schedule.rank_actions(rank.role.first, rank.pp, few, len(stages))
        events = memory_timeline(memory, ((action, 0, 0) for action in actions), 0)
        return memory_peak(memory, events).total_bytes
