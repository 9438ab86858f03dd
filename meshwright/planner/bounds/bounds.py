"""Lower bounds of the step time of whole spaces; no bound may exceed the simulated time.

Each is a chain of things that the engine must do one after the other:

- *work*: a microbatch reaches a rank, the rank does all its work, and the last gradient goes
  back to the first rank;
- *fill*: the first microbatch goes all the way and back to a rank, which then has all its
  backward work and the forward work that it could not do before;
- *reduction*: gradient buckets go out one after the other once the first is ready.

Then come the shared embedding, the gradient norm for which all ranks meet, and the update; sums
over tensor-parallel ranks come before or after what is reduced last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.bounds.data_parallel import DataParallelCosts, DataParallelTimes
from meshwright.planner.footprint import PipelineGroup, pipeline_groups
from meshwright.planner.space import (
    BASIC,
    SWITCHES,
    Column,
    Role,
    ShapeTable,
    ShapeTimes,
    Space,
    block_counts,
    distinct,
)
from meshwright.simulator import CostModel, Phase
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Mesh, Stage, join_stages
from meshwright.simulator.ledger import left_sums, price, tied_table
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import Replication, WireBytes, replication_of
from meshwright.simulator.step import PPM, overhead_per_million

LONGEST_PS = 2**62


class _Replicas(NamedTuple):
    """The data-parallel sides that a pipeline's layouts have, and which one each has.

    ``shared_embedding`` is the all-reduce of a tied table in each layout.
    """

    kinds: list[tuple[BlockShape, Replication, WireBytes]]
    member: Column
    shared_embedding: Column


_NO_REPLICAS = _Replicas([], *np.zeros((2, 1), np.int64))


@dataclass(frozen=True, slots=True)
class _GroupColumns:
    """Layouts with the same pipeline, their times as columns.

    ``blocks`` are those of passes through a block of each of ``kinds``; ``occupied`` and
    ``travelled`` those of what such a block sends; ``passes`` keeps those through a stage.
    """

    pp: int
    vpp: int
    stages: tuple[Stage, ...]
    kinds: tuple[BlockKind, ...]
    blocking: bool
    num_microbatches: Column
    blocks: NDArray[np.int64]
    occupied: NDArray[np.int64]
    travelled: NDArray[np.int64]
    replicas: _Replicas
    passes: dict[Stage, tuple[Column, Column]] = field(default_factory=dict)

    def forward(self, stage: Stage) -> Column:
        """Return the time of one forward pass through *stage*."""
        return self._times(stage)[0]

    def backward(self, stage: Stage) -> Column:
        """Return the time of one backward pass through *stage*."""
        return self._times(stage)[1]

    def _times(self, stage: Stage) -> tuple[Column, Column]:
        if stage not in self.passes:
            counts = np.array(block_counts(self.kinds, [stage]), np.int64)
            self.passes[stage] = self.blocks[:, 0::2] @ counts, self.blocks[:, 1::2] @ counts
        return self.passes[stage]

    def ahead(self, role: Role) -> tuple[Stage, ...]:
        """Return the stages ahead of the first one of the role's last rank."""
        return self.stages[: role.last]

    def behind(self, role: Role) -> tuple[Stage, ...]:
        """Return the stages behind the last one of the role's last rank."""
        return self.stages[len(self.stages) - self.pp + role.last + 1 :]

    def travel(self, senders: Sequence[Stage]) -> Column:
        """Return the time of a message from each of *senders* to the stage behind it, or back."""
        return self._sent(self.travelled, senders)

    def occupy(self, senders: Sequence[Stage]) -> Column:
        """Return the time that such messages keep their senders, where sending blocks."""
        return self._sent(self.occupied, senders) * np.int64(self.blocking)

    def _sent(self, times: NDArray[np.int64], senders: Sequence[Stage]) -> Column:
        counts = [0] * len(self.kinds)
        for stage in senders:
            counts[self.kinds.index(stage.blocks[-1].kind)] += 1
        return np.asarray(times @ np.array(counts, np.int64), np.int64)

    def sent_last(self, role: Role) -> Column:
        """Return the time a rank's last message keeps it, where sending blocks."""
        return self.occupy(self.ahead(role)[-1:])


class StepBounds:
    """Lower bounds for the layouts of a space."""

    def __init__(self, space: Space, table: ShapeTable, costs: CostModel) -> None:
        self._space = space
        self._table = table
        self._costs = costs
        self._times = ShapeTimes.empty(table)
        self._data_parallel = DataParallelCosts(costs)
        self._left_sums = np.array([left_sums(shape) for shape in table.shapes], np.int64)

    def rough_bounds_ps(self, indices: NDArray[np.int64]) -> Column:
        """Return bounds of the layouts among *indices* as if replicas exchanged nothing.

        Those that differ in their switches alone have one.
        """
        shapes = self._table.index[indices]
        first, member = distinct([shapes, *(self._space.column(name)[indices] for name in BASIC)])
        return self.lower_bounds_ps(indices[first], is_rough=True)[member]

    def lower_bounds_ps(self, indices: NDArray[np.int64], *, is_rough: bool = False) -> Column:
        """Return a lower bound of the step time of each layout among *indices*."""
        bounds = np.zeros(len(self._space), np.int64)
        self._times.price(self._table, np.unique(self._table.index[indices]), self._costs)
        for group in pipeline_groups(self._space, indices):
            columns = self._columns(group, is_rough=is_rough)
            bounds[group.indices] = self._group_bounds(group, columns)
        return _with_overhead(bounds[indices], overhead_per_million(self._costs.stack))

    def _columns(self, group: PipelineGroup, *, is_rough: bool) -> _GroupColumns:
        times, shapes = self._times, self._table.index[group.indices]
        # Neighbours on the pipeline axis are tp x dp ranks apart.  From a node's size on, messages
        # leave their node; below, some do not, and the lesser of both times holds for all.
        per_stage = self._space.column("tp") * self._space.column("dp")
        is_far = per_stage[group.indices, None] >= self._costs.cluster.devices_per_node
        messages = times.messages[shapes]
        return _GroupColumns(
            pp=group.pp,
            vpp=len(group.roles[0].stages),
            stages=group.stages,
            kinds=self._table.kinds,
            blocking=not self._costs.stack.overlap_p2p,
            num_microbatches=self._countable(group, times.blocks[shapes]),
            blocks=times.blocks[shapes],
            occupied=np.where(is_far, messages[:, :, 0], messages[:, :, 2]),
            travelled=np.where(is_far, messages[:, :, 1], messages[:, :, 3]),
            replicas=_NO_REPLICAS if is_rough else self._replicas(group),
        )

    def _countable(self, group: PipelineGroup, blocks: NDArray[np.int64]) -> Column:
        """Return microbatches, cut where their work would overflow 64 bits (50 days).

        Fewer microbatches take less time, so the bound stays one.
        """
        whole = np.repeat(block_counts(self._table.kinds, group.stages), 2)
        most = LONGEST_PS // np.maximum(blocks @ whole, 1)
        count = self._space.num_microbatches[group.indices]
        return np.asarray(np.minimum(count, np.maximum(most, group.pp)), np.int64)

    def _group_bounds(self, group: PipelineGroup, columns: _GroupColumns) -> Column:
        data_parallel_by_role = [
            self._data_parallel_columns(columns.replicas, role) for role in group.roles
        ]
        first, first_data_parallel = group.roles[0], data_parallel_by_role[0]
        # Every rank's work hangs on the first forward pass, and that on the first rank's gathers.
        delay = _gather_delay(columns, first, first_data_parallel)
        total = np.zeros(len(group.indices), np.int64)
        norm, update = (np.zeros(len(group.indices), np.int64) for _ in range(2))
        for role, data_parallel in zip(group.roles, data_parallel_by_role, strict=True):
            in_flight = self._in_flight(group, role, columns.num_microbatches)
            end = _rank_end(columns, role, data_parallel, delay, in_flight)
            # The first rank's own work may be short; its last pass waits for this rank's gradient.
            at_first = end + _way_back(columns, role)
            at_first = _largest(at_first, *_way_back_of_later_stages(columns, role, delay))
            total = _largest(
                total,
                _reduced(columns, role, data_parallel, end - columns.sent_last(role)),
                _reductions_alone(columns, role, data_parallel, delay),
                _port_alone(columns, role, data_parallel),
                _reduced(columns, first, first_data_parallel, at_first),
            )
            norm = np.maximum(norm, data_parallel.norm)
            update = np.maximum(update, data_parallel.update)
        # All ranks meet between reductions and updates: the longest of each may be added, even of
        # different ranks.
        return np.asarray(total + norm + update, np.int64)

    def _in_flight(self, group: PipelineGroup, role: Role, num_microbatches: Column) -> Column:
        numbers, member = np.unique(num_microbatches, return_inverse=True)
        vpp = len(role.stages)
        passes = [group.schedule.in_flight(role.last, group.pp, m, vpp) for m in numbers.tolist()]
        return np.array(passes, np.int64)[member.reshape(-1)]

    def _replicas(self, group: PipelineGroup) -> _Replicas:
        # Of a layout's other choices none moves these times: layouts that share them share a row.
        names = ("tp", "dp", "zero_stage", *SWITCHES)
        columns = [self._space.column(name)[group.indices] for name in names]
        left_sums_of = self._left_sums[self._table.index[group.indices]]
        first, member = distinct([*columns, left_sums_of])
        kinds, shared_ps = [], []
        for index in group.indices[first].tolist():
            shape = self._table.shapes[self._table.index[index]]
            plan = self._space.plan_without_stages(index)
            mesh = Mesh.of(plan, self._costs.cluster.devices_per_node)
            wire = WireBytes.of(self._space.stack, self._space.job.precision, plan)
            kinds.append((shape, replication_of(plan, self._costs.stack, mesh), wire))
            tied = tied_table(shape, wire, mesh, plan.num_shards)
            shared_ps.append(price(self._costs, tied).time_ps)
        return _Replicas(kinds, member, np.array(shared_ps, np.int64)[member])

    def _data_parallel_columns(self, replicas: _Replicas, role: Role) -> DataParallelTimes:
        if replicas is _NO_REPLICAS:
            return DataParallelTimes()
        rows = [
            self._data_parallel.times(shape, role, replication, wire)
            for shape, replication, wire in replicas.kinds
        ]
        return DataParallelTimes(*np.array(rows, np.int64)[replicas.member].T)


def _rank_end(
    columns: _GroupColumns,
    role: Role,
    data_parallel: DataParallelTimes,
    delay: Column,
    in_flight: Column,
) -> Column:
    """Return the least time at which the role's last rank has done and sent everything."""
    count = columns.num_microbatches
    forward = sum((columns.forward(stage) for stage in role.stages), start=np.int64(0))
    backward = sum((columns.backward(stage) for stage in role.stages), start=np.int64(0))
    # A message that blocks is work of its sender; one that does not is only part of the way.
    sent_forward = columns.occupy([stage for stage in role.stages if not stage.has_head])
    # A gradient is as large as the activation that came from the stage before.
    own = range(role.last, len(columns.stages), columns.pp)
    sent_backward = columns.occupy([columns.stages[index - 1] for index in own if index > 0])
    arrives = delay + _arrival(columns, role)
    waits = data_parallel.forward_wait + data_parallel.backward_wait
    work = arrives + count * (forward + backward + waits + sent_forward + sent_backward)
    # What a gradient passes before it reaches the rank's last stage: the stages behind that.
    behind = columns.behind(role)
    there = columns.forward(join_stages(columns.stages)) + columns.travel(columns.stages[:-1])
    back = columns.backward(join_stages(behind)) + columns.travel(
        columns.stages[-1 - len(behind) : -1]
    )
    returns = delay + there + back
    # Until then the schedule lets a rank run no more than *in_flight* forward passes, none longer
    # than that of its longest stage: all others are still to come, and so are all backward passes.
    longest = np.maximum.reduce([columns.forward(stage) for stage in role.stages])
    left = np.maximum(count * forward - in_flight * longest, 0)
    fill = returns + left + count * (backward + data_parallel.backward_wait + sent_backward)
    return _largest(work, fill)


def _way_back_of_later_stages(
    columns: _GroupColumns, role: Role, delay: Column
) -> Iterator[Column]:
    """Yield the least times at which the first rank has what the role's later virtual stages gave.

    With fewer microbatches than ranks a rank idles between its virtual stages: all passes of a
    stage and of those behind it on the rank wait for the first activation, and the last of them is
    a backward pass, whose gradient goes back to the model's first stage.

    Args:
        columns: Layouts of a pipeline.
        role: Whose last rank.
        delay: By how much gathers put off the first forward pass.
    """
    if (columns.num_microbatches >= columns.pp).all():
        return
    places = range(role.last, len(columns.stages), columns.pp)
    for number, place in enumerate(places[1:], 1):
        ahead, later = columns.stages[:place], join_stages(role.stages[number:])
        passes = columns.forward(later) + columns.backward(later)
        way = columns.forward(join_stages(ahead)) + columns.backward(join_stages(ahead))
        way = way + 2 * columns.travel(ahead)
        yield np.asarray(delay + way + columns.num_microbatches * passes, np.int64)


def _arrival(columns: _GroupColumns, role: Role) -> Column:
    """Return the time of a microbatch's way to the role's last rank."""
    ahead = columns.ahead(role)
    return np.asarray(columns.forward(join_stages(ahead)) + columns.travel(ahead), np.int64)


def _way_back(columns: _GroupColumns, role: Role) -> Column:
    """Return the time from a rank's end to the end of the first rank's last pass."""
    # A blocking send counts as the rank's work already, and is part of the first hop back.
    ahead = columns.ahead(role)
    back = columns.backward(join_stages(ahead)) + columns.travel(ahead)
    return np.asarray(back - columns.sent_last(role), np.int64)


def _end_time(
    columns: _GroupColumns, stage: Stage, num_blocks: Column | int, phase: Phase
) -> Column:
    """Return the time of the last *num_blocks* blocks of *stage*."""
    total = np.zeros(1, np.int64)
    for number in np.unique(num_blocks).tolist():
        part = stage.part(stage.num_blocks - number, stage.num_blocks)
        of_part = columns.forward(part) if phase is Phase.FORWARD else columns.backward(part)
        total = np.where(num_blocks == number, of_part, total)
    return np.asarray(total, np.int64)


def _first_reduced(
    columns: _GroupColumns, stage: Stage, data_parallel: DataParallelTimes, phase: Phase
) -> Column:
    """Return the time of the part of a rank's first virtual stage that is reduced first."""
    return _end_time(columns, stage, data_parallel.first_virtual_stage_blocks, phase)


def _gather_delay(columns: _GroupColumns, role: Role, data_parallel: DataParallelTimes) -> Column:
    """Return by how much parameter gathers put off the end of the very first forward pass."""
    # Gathers run one after the other under the pass: the last part waits for all of them, and the
    # first part for the first one.
    stage = role.stages[0]
    final = _first_reduced(columns, stage, data_parallel, Phase.FORWARD)
    late = data_parallel.gather_all + final - columns.forward(stage)
    return np.asarray(np.maximum(data_parallel.gather_first, late), np.int64)


def _reduced(
    columns: _GroupColumns, role: Role, data_parallel: DataParallelTimes, end: Column
) -> Column:
    """Return the least time at which a rank has reduced, if its last pass ends at *end*."""
    # A rank's last pass is the backward of its first stage.  None of the stage's buckets can go out
    # before the pass has completed the first, and they go one after the other.
    stage = role.stages[0]
    ready = _first_reduced(columns, stage, data_parallel, Phase.BACKWARD)
    queued = end - columns.backward(stage) + ready + data_parallel.first_virtual_stage
    is_end = role.first == 0 or role.last == columns.pp - 1
    shared = columns.replicas.shared_embedding * np.int64(is_end)
    reduced = np.maximum(end + data_parallel.exposed, queued) + data_parallel.sums_last
    return np.asarray(reduced + shared, np.int64)


def _reductions_alone(
    columns: _GroupColumns, role: Role, data_parallel: DataParallelTimes, delay: Column
) -> Column:
    """Return the least time at which a rank has sent all its buckets.

    The first is ready in the last microbatch's pass through the last virtual stage, which
    follows all forward passes and, interleaved, all but p of the backward passes of each
    stage, with p - 1 of its own among them.
    """
    group = columns.pp if columns.vpp > 1 else 1  # microbatches that go through a stage in a row
    num_blocks = data_parallel.last_virtual_stage_blocks
    count, final = columns.num_microbatches, role.stages[-1]
    forward = sum((columns.forward(stage) for stage in role.stages), start=np.int64(0))
    backward = sum((columns.backward(stage) for stage in role.stages), start=np.int64(0))
    ready = (
        delay
        + _arrival(columns, role)
        + count * forward
        + (count - group) * backward
        + (group - 1) * columns.backward(final)
        + _end_time(columns, final, num_blocks, Phase.BACKWARD)
    )
    return np.asarray(ready + data_parallel.every_virtual_stage + data_parallel.sums_last, np.int64)


def _port_alone(columns: _GroupColumns, role: Role, data_parallel: DataParallelTimes) -> Column:
    """Return the least time at which collectives that every pass needs have left the port."""
    # None of them can start before the first microbatch is at the rank; a port sends one at a time.
    arrives = _arrival(columns, role)
    port = columns.num_microbatches * data_parallel.port_each + data_parallel.port_last
    return np.asarray(arrives + port, np.int64)


def _largest(*columns: Column) -> Column:
    return np.asarray(np.maximum.reduce(columns), np.int64)


def _with_overhead(times: Column, per_million: int) -> Column:
    """Return the engine's `with_overhead` of each time, without overflow of the product."""
    # The overhead grows with the time, so that what was a bound before it is one after.
    millions, rest = np.divmod(times, PPM)
    return np.asarray(times + millions * per_million + rest * per_million // PPM, np.int64)
