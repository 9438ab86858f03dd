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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.bounds.replicas import ReplicaCosts, ReplicaTimes, layout_replication
from meshwright.planner.footprint import Group, pipeline_groups
from meshwright.planner.space import Column, Role, ShapeTable, ShapeTimes, Space
from meshwright.simulator import CostModel
from meshwright.simulator.replication import Stage, leaves_sums, norm_cost
from meshwright.simulator.step import PPM, overhead_per_million

LONGEST_PS = 2**62


@dataclass(frozen=True, slots=True)
class _Group:
    """Layouts with the same pipeline, their times as columns."""

    pp: int
    vpp: int
    num_layers: int
    blocking: bool
    num_microbatches: Column
    blocks: NDArray[np.int64]
    occupy: Column
    travel: Column

    def forward(self, stage: Stage) -> Column:
        """Return the time of one forward pass through *stage*."""
        return self._times(stage, 0)

    def backward(self, stage: Stage) -> Column:
        """Return the time of one backward pass through *stage*."""
        return self._times(stage, 1)

    def _times(self, stage: Stage, phase: int) -> Column:
        counts = np.array([stage.num_layers, stage.has_embedding, stage.has_head], dtype=np.int64)
        return np.asarray(self.blocks[:, phase::2] @ counts, np.int64)

    def sent_last(self, role: Role) -> Column:
        """Return the time a rank's last message keeps it, where sending blocks."""
        return self.occupy * (self.blocking and role.last > 0)


class StepBounds:
    """Lower bounds for the layouts of a space."""

    def __init__(self, space: Space, table: ShapeTable, costs: CostModel) -> None:
        self._space = space
        self._table = table
        self._costs = costs
        self._replicas = ReplicaCosts(space, costs)
        self._leaves_sums = np.array([leaves_sums(shape) for shape in table.shapes], np.int64)
        self._norm_ps = norm_cost(costs).time_ps

    def lower_bounds_ps(self, indices: NDArray[np.int64]) -> Column:
        """Return a lower bound of the step time of each layout among *indices*."""
        bounds = np.zeros(len(self._space), np.int64)
        times = ShapeTimes.of(self._table, np.unique(self._table.index[indices]), self._costs)
        for group in pipeline_groups(self._space, indices):
            columns = self._columns(group, times)
            bounds[group.indices] = self._group_bounds(group, columns)
        return _with_overhead(bounds[indices], overhead_per_million(self._costs.stack))

    def _columns(self, group: Group, times: ShapeTimes) -> _Group:
        shapes = self._table.index[group.indices]
        per_stage = self._space.column("tp") * self._space.column("dp")
        is_far = per_stage[group.indices] >= self._costs.cluster.devices_per_node
        messages = times.messages[shapes]
        return _Group(
            pp=group.pp,
            vpp=len(group.roles[0].stages),
            num_layers=self._space.job.model.num_layers,
            blocking=not self._costs.stack.overlap_p2p,
            num_microbatches=self._countable(group, times.blocks[shapes]),
            blocks=times.blocks[shapes],
            occupy=np.where(is_far, messages[:, 0], messages[:, 2]),
            travel=np.where(is_far, messages[:, 1], messages[:, 3]),
        )

    def _countable(self, group: Group, blocks: NDArray[np.int64]) -> Column:
        """Return microbatches, cut where their work would overflow 64 bits (50 days).

        Fewer microbatches take less time, so the bound stays one.
        """
        whole = np.array([self._space.job.model.num_layers] * 2 + [1] * 4, np.int64)
        most = LONGEST_PS // np.maximum(blocks @ whole, 1)
        count = self._space.num_microbatches[group.indices]
        return np.asarray(np.minimum(count, np.maximum(most, group.pp)), np.int64)

    def _group_bounds(self, group: Group, columns: _Group) -> Column:
        replicas = [self._replica_columns(group, role) for role in group.roles]
        first, first_replica = group.roles[0], replicas[0]
        delay = _gather_delay(columns, first, first_replica)
        total = np.zeros(len(group.indices), np.int64)
        update = np.zeros(len(group.indices), np.int64)
        for role, replica in zip(group.roles, replicas, strict=True):
            in_flight = self._in_flight(group, role, columns.num_microbatches)
            end = _rank_end(columns, role, replica, delay, in_flight)
            at_first = end + _way_back(columns, role)
            total = _largest(
                total,
                _reduced(columns, role, replica, end - columns.sent_last(role)),
                _reductions_alone(columns, role, replica, delay),
                _port_alone(columns, role, replica),
                _reduced(columns, first, first_replica, at_first),
            )
            update = np.maximum(update, replica.update)
        return np.asarray(total + self._norm_ps + update, np.int64)

    def _in_flight(self, group: Group, role: Role, num_microbatches: Column) -> Column:
        numbers, member = np.unique(num_microbatches, return_inverse=True)
        vpp = len(role.stages)
        passes = [group.schedule.in_flight(role.last, group.pp, m, vpp) for m in numbers.tolist()]
        return np.array(passes, np.int64)[member.reshape(-1)]

    def _replica_columns(self, group: Group, role: Role) -> ReplicaTimes:
        names = ("tp", "dp", "zero_stage")
        columns = [self._space.column(name)[group.indices] for name in names]
        columns.append(self._leaves_sums[self._table.index[group.indices]])
        keys = np.stack(columns, axis=1)
        distinct, first, member = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        rows = []
        for (tp, dp, zero_stage, _), index in zip(distinct.tolist(), first.tolist(), strict=True):
            shape = self._table.shapes[self._table.index[group.indices[index]]]
            to = layout_replication(self._costs, tp=tp, pp=group.pp, dp=dp, zero_stage=zero_stage)
            rows.append(self._replicas.times(shape, role, group.pp, to))
        values = np.array(rows, np.int64)[member.reshape(-1)]
        return ReplicaTimes(*values.T)


def _rank_end(
    columns: _Group, role: Role, replica: ReplicaTimes, delay: Column, in_flight: Column
) -> Column:
    """Return the least time at which the role's last rank has done and sent everything."""
    count = columns.num_microbatches
    forward = sum((columns.forward(stage) for stage in role.stages), start=np.int64(0))
    backward = sum((columns.backward(stage) for stage in role.stages), start=np.int64(0))
    sent_forward = columns.vpp - sum(stage.has_head for stage in role.stages)
    sent_backward = columns.vpp - sum(stage.has_embedding for stage in role.stages)
    sends = columns.occupy * columns.blocking
    arrives = delay + columns.forward(_before(role)) + role.last * columns.travel
    waits = replica.forward_wait + replica.backward_wait
    work = arrives + count * (forward + backward + waits + sends * (sent_forward + sent_backward))
    stages = columns.pp * columns.vpp
    whole = Stage(columns.num_layers, has_embedding=True, has_head=True)
    behind = Stage(role.layers_after, has_embedding=False, has_head=role.last < columns.pp - 1)
    hops = stages - 1 + columns.pp - 1 - role.last
    returns = delay + columns.forward(whole) + columns.backward(behind) + hops * columns.travel
    longest = np.maximum.reduce([columns.forward(stage) for stage in role.stages])
    left = np.maximum(count * forward - in_flight * longest, 0)
    fill = returns + left + count * (backward + replica.backward_wait + sends * sent_backward)
    return _largest(work, fill)


def _before(role: Role) -> Stage:
    return Stage(role.layers_before, has_embedding=role.last > 0, has_head=False)


def _way_back(columns: _Group, role: Role) -> Column:
    """Return the time from a rank's end to the end of the first rank's last pass."""
    back = columns.backward(_before(role)) + role.last * columns.travel
    return np.asarray(back - columns.sent_last(role), np.int64)


def _end_time(
    columns: _Group, stage: Stage, layers: Column, embedding: Column, phase: int
) -> Column:
    """Return the time of the last *layers* layers of *stage*, its head, and its *embedding*."""
    blocks = columns.blocks
    total = layers * blocks[:, phase] + stage.has_head * blocks[:, 4 + phase]
    return np.asarray(total + embedding * blocks[:, 2 + phase], np.int64)


def _first_reduced(columns: _Group, stage: Stage, replica: ReplicaTimes, phase: int) -> Column:
    """Return the time of the part of a rank's first virtual stage that is reduced first."""
    layers = np.asarray(replica.first_chunk_layers)
    return _end_time(columns, stage, layers, np.asarray(replica.first_chunk_embedding), phase)


def _gather_delay(columns: _Group, role: Role, replica: ReplicaTimes) -> Column:
    """Return by how much parameter gathers put off the end of the very first forward pass."""
    stage = role.stages[0]
    final = _first_reduced(columns, stage, replica, 0)
    late = replica.gather_all + final - columns.forward(stage)
    return np.asarray(np.maximum(replica.gather_first, late), np.int64)


def _reduced(columns: _Group, role: Role, replica: ReplicaTimes, end: Column) -> Column:
    """Return the least time at which a rank has reduced, if its last pass ends at *end*."""
    stage = role.stages[0]
    ready = _first_reduced(columns, stage, replica, 1)
    queued = end - columns.backward(stage) + ready + replica.first_chunk
    is_end = role.first == 0 or role.last == columns.pp - 1
    shared = replica.shared_embedding * np.int64(is_end)
    reduced = np.maximum(end + replica.exposed, queued) + replica.sums_last
    return np.asarray(reduced + shared, np.int64)


def _reductions_alone(columns: _Group, role: Role, replica: ReplicaTimes, delay: Column) -> Column:
    """Return the least time at which a rank has sent all its buckets.

    The first is ready in the last microbatch's pass through the last virtual stage, which
    follows all forward passes and, interleaved, all but p of the backward passes of each
    stage, with p - 1 of its own among them.
    """
    group = columns.pp if columns.vpp > 1 else 1
    layers, embedding = replica.last_chunk_layers, replica.last_chunk_embedding
    count, final = columns.num_microbatches, role.stages[-1]
    forward = sum((columns.forward(stage) for stage in role.stages), start=np.int64(0))
    backward = sum((columns.backward(stage) for stage in role.stages), start=np.int64(0))
    ready = (
        delay
        + columns.forward(_before(role))
        + role.last * columns.travel
        + count * forward
        + (count - group) * backward
        + (group - 1) * columns.backward(final)
        + _end_time(columns, final, np.asarray(layers), np.asarray(embedding), 1)
    )
    return np.asarray(ready + replica.every_chunk + replica.sums_last, np.int64)


def _port_alone(columns: _Group, role: Role, replica: ReplicaTimes) -> Column:
    """Return the least time at which collectives that every pass needs have left the port."""
    arrives = columns.forward(_before(role)) + role.last * columns.travel
    port = columns.num_microbatches * replica.port_each + replica.port_last
    return np.asarray(arrives + port, np.int64)


def _largest(*columns: Column) -> Column:
    return np.asarray(np.maximum.reduce(columns), np.int64)


def _with_overhead(times: Column, per_million: int) -> Column:
    """Return the engine's `with_overhead` of each time, without overflow of the product."""
    millions, rest = np.divmod(times, PPM)
    return np.asarray(times + millions * per_million + rest * per_million // PPM, np.int64)
