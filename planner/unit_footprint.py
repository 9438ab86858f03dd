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
from simulator import Phase, Schedule
from simulator.data_parallel import Replication, Stage, Wire, sum_layers
from simulator.fp8_casts import weight_copy_bytes
from simulator.memory import (
    RankMemory,
    Shards,
    StateBytes,
    with_copies,
)
from simulator.mesh import GroupSpan
from simulator.unit_memory import PassBytes, unit_rank_memory


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
    _passes: dict[int, PassBytes] = field(default_factory=dict)
    _memory: dict[tuple[int, int, tuple[Stage, ...], Replication], RankMemory] = field(
        default_factory=dict
    )
    _known: dict[tuple[int, int, int, Role, int, str], int] = field(default_factory=dict)

    def of_layouts(
        self, indices: Column, roles: list[Role], pp: int, schedule: Schedule, to: Replication
    ) -> Column:
        """Return the live bytes of the fullest rank of layouts with one pipeline.

        Layouts that the stack does not offer, replicas of whole parameters, need nothing.
        """
        columns = zip(
            self.table.index[indices].tolist(),
            self.space.column("dp")[indices].tolist(),
            self.space.num_microbatches[indices].tolist(),
            strict=True,
        )
        peaks = [
            0
            if dp > 1 and to.zero_stage < 3
            else max(self._peak(_Rank(shape, dp, count, role, pp, schedule), to) for role in roles)
            for shape, dp, count in columns
        ]
        return np.array(peaks, np.int64)

    def _peak(self, rank: _Rank, to: Replication) -> int:
        key = (*rank[:-1], rank.schedule.name)
        if key not in self._known:
            memory = self._rank_memory(rank, to)
            buffers = rank.num_microbatches * memory.message_buffers_bytes
            moving = _walked(memory, rank) if len(rank.role.stages) > 1 else _closed(memory, rank)
            self._known[key] = memory.static_bytes + buffers + moving
        return self._known[key]

    def _rank_memory(self, rank: _Rank, to: Replication) -> RankMemory:
        """Return the memory of a rank but for how many microbatches it runs."""
        whole = to.keeps_units or not to.reduces_each_microbatch
        split = rank.dp if to.zero_stage >= 3 else 1
        to = to._replace(
            span=GroupSpan(rank.dp, 1, rank.dp), shards=Shards(split, 1 if whole else split, split)
        )
        key = (rank.shape, rank.dp, rank.role.stages, to)
        if key not in self._memory:
            shape, stages = self.table.shapes[rank.shape], rank.role.stages
            if rank.shape not in self._passes:
                self._passes[rank.shape] = PassBytes.of(shape)
            wire = Wire.of(self.space.stack, self.space.job.precision)
            sizes = (self.state, wire.reduce_bytes)
            memory = unit_rank_memory(shape, self._passes[rank.shape], stages, to, sizes)
            copies = weight_copy_bytes(shape, sum_layers(stages))
            self._memory[key] = with_copies(memory, copies)
        return self._memory[key]


def _closed(memory: RankMemory, rank: _Rank) -> int:
    """Return the most that moves on a rank with one virtual stage.

    Its passes in flight are most before its first backward pass, when no gradient is there, and,
    if microbatches are left, as many again after it.
    """
    (chunk,) = memory.chunks
    assert chunk.first_backward is not None
    most = rank.schedule.in_flight(rank.role.first, rank.pp, rank.num_microbatches, 1)
    refills = rank.num_microbatches > most
    saved = chunk.saved_bytes
    moments = [
        most * saved + chunk.forward_workspace_bytes - chunk.late_gradients_bytes,
        most * saved + chunk.first_backward.total_bytes,
        chunk.after_backward_bytes + (most - 1) * saved,
        memory.update_temporary_bytes,
    ]
    if refills:
        moments.append(most * saved + chunk.forward_workspace_bytes)
    if refills or most > 1:
        moments.append((most - 1 + refills) * saved + chunk.backward_workspace_bytes)
    return max(moments)


def _walked(memory: RankMemory, rank: _Rank) -> int:
    """Return the most that moves on a rank with several virtual stages, action by action.

    The bytes are those of `simulator.memory.memory_timeline`, kept as running sums.
    """
    # An interleaved order repeats itself once its warm-up is over.
    count = min(rank.num_microbatches, PERIODS * rank.pp)
    chunks = memory.chunks
    gathered = [0] * len(chunks)
    late = [chunk.late_gradients_bytes for chunk in chunks]
    most = live = elsewhere = 0
    absent = sum(late)
    for phase, index, _ in rank.schedule.rank_actions(rank.role.first, rank.pp, count, len(chunks)):
        chunk = chunks[index]
        elsewhere -= gathered[index]
        if phase is Phase.FORWARD:
            live += chunk.saved_bytes
            needs, stays = chunk.forward_workspace_bytes, chunk.after_forward_bytes
        else:
            needs, stays = chunk.backward_workspace_bytes, chunk.after_backward_bytes
            if late[index] and chunk.first_backward is not None:
                absent -= late[index]
                late[index] = 0
                needs = chunk.first_backward.total_bytes
        most = max(most, live + needs + elsewhere - absent)
        if phase is Phase.BACKWARD:
            live -= chunk.saved_bytes
        gathered[index] = stays
        elsewhere += stays
        most = max(most, live + elsewhere - absent)
    return max(most, memory.update_temporary_bytes)
