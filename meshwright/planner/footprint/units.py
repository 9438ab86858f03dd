"""The exact peak memory of layouts whose states are units of fully_shard, one by one.

What such a rank holds depends on which pass came before, so its actions are walked; layouts with
the same rank share the walk.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from meshwright.planner.footprint.pass_table import PassTable, representative_order
from meshwright.planner.footprint.replicas import Kind
from meshwright.planner.space import Column, Role, ShapeTable, Space
from meshwright.simulator import Schedule
from meshwright.simulator.blocks import BlockTable, weight_copy_bytes
from meshwright.simulator.layout import GroupSpan
from meshwright.simulator.memory import (
    RankMemory,
    Shards,
    pass_levels,
    update_level,
    with_copies,
)
from meshwright.simulator.replication import sum_layers
from meshwright.simulator.units import ParameterBytes, PassBytes, unit_rank_memory


class _UnitRank(NamedTuple):
    """What decides the memory of a rank."""

    shape: int
    num_shards: int
    num_microbatches: int
    role: Role
    pp: int
    schedule: Schedule


@dataclass(slots=True)
class UnitPeaks:
    """Peaks of ranks, found once for all layouts that share them."""

    space: Space
    table: ShapeTable
    blocks: BlockTable
    _passes: dict[int, PassBytes] = field(default_factory=dict)
    _memory: dict[tuple[object, ...], RankMemory] = field(default_factory=dict)
    _known: dict[tuple[object, ...], int] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], PassTable] = field(default_factory=dict)

    def of_layouts(
        self,
        indices: Column,
        roles: list[Role],
        pp: int,
        schedule: Schedule,
        kind: Kind,
    ) -> Column:
        """Return the live bytes of the fullest rank of layouts with one pipeline.

        Layouts that the stack does not offer, replicas of whole parameters, need nothing.
        """
        columns = zip(
            self.table.index[indices].tolist(),
            self.space.num_shards[indices].tolist(),
            self.space.num_microbatches[indices].tolist(),
            strict=True,
        )
        peaks = [
            0
            if kind.replication.dp > 1 and kind.replication.zero_stage < 3
            else max(
                self._peak(_UnitRank(shape, num_shards, count, role, pp, schedule), kind)
                for role in roles
            )
            for shape, num_shards, count in columns
        ]
        return np.array(peaks, np.int64)

    def _peak(self, rank: _UnitRank, kind: Kind) -> int:
        # A schedule holds functions: its name is what tells it from others.
        key = (*rank[:-1], rank.schedule.name, kind)
        if key not in self._known:
            memory = self._rank_memory(rank, kind)
            buffers = rank.num_microbatches * memory.message_buffers_bytes
            memory = replace(
                memory, message_buffers_bytes=buffers, holds_sent=rank.schedule.holds_sent
            )
            self._known[key] = memory.static_bytes + self._most_moving(memory, rank)
        return self._known[key]

    def _most_moving(self, memory: RankMemory, rank: _UnitRank) -> int:
        """Return the most that moves on a rank.

        It grows or shrinks from one rank of a role to the next, so it is most on the first or the
        last; on the first if no pass sends more than it keeps, as fewer are in flight on others.
        """
        if rank.pp == 1:
            return _plainly(memory, rank)
        ends = [rank.role.first]
        if any(
            each.kept_units is None or each.saved_bytes < sum(each.sent)
            for each in memory.virtual_stages
        ):
            ends.append(rank.role.last)
        moving = [
            self._table(rank, end, reshards=memory.reshards).most_moving(
                memory, rank.num_microbatches
            )
            for end in ends
        ]
        return max(*moving, update_level(memory).moving_bytes)

    def _table(self, rank: _UnitRank, pp_rank: int, *, reshards: bool) -> PassTable:
        """Return the moments of one rank of a role."""
        order = representative_order(
            rank.schedule,
            rank.pp,
            pp_rank,
            rank.num_microbatches,
            rank.role.stages,
            reshards=reshards,
        )
        key = (order.schedule.name, *order[1:])
        if key not in self._tables:
            self._tables[key] = PassTable.of(order)
        return self._tables[key]

    def _rank_memory(self, rank: _UnitRank, kind: Kind) -> RankMemory:
        """Return the memory of a rank but for how many microbatches it runs."""
        replication = kind.replication.in_steps_of(rank.num_microbatches)
        # Where the ranks lie is no matter to memory: one span stands for all of so many.
        split = rank.num_shards if replication.zero_stage >= 3 else 1
        shards = Shards(split, 1 if replication.keeps_whole_gradients else split, split)
        replication = replication._replace(span=GroupSpan(split, 1, split), shards=shards)
        key = (rank.shape, rank.role.stages, replication, kind.state, kind.wire.reduce_bytes)
        if key not in self._memory:
            shape, stages = self.table.shapes[rank.shape], rank.role.stages
            if rank.shape not in self._passes:
                self._passes[rank.shape] = PassBytes.of(self.blocks, shape)
            parameter = ParameterBytes(kind.state, kind.wire.reduce_bytes)
            memory = unit_rank_memory(
                shape, self._passes[rank.shape], stages, replication, parameter
            )
            copies = weight_copy_bytes(shape, sum_layers(stages))
            self._memory[key] = with_copies(memory, copies)
        return self._memory[key]


def _plainly(memory: RankMemory, rank: _UnitRank) -> int:
    """Return the most that moves on a rank that is a pipeline of its own.

    GPipe aside, its microbatches follow each other, and all but the first and last are alike.
    """
    count = rank.num_microbatches if rank.schedule.holds_sent else min(rank.num_microbatches, 3)
    levels = pass_levels(memory, rank.schedule.rank_actions(0, 1, count, 1))
    most = max(level.moving_bytes for pair in levels for level in pair)
    return max(most, update_level(memory).moving_bytes)
