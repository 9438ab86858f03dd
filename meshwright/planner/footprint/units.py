"""Exact peak memory of layouts whose states are units of fully_shard.

Sizes are columns: those of a virtual stage are computed at once for all layouts with that stage
that are alike in structure, and so is the peak of all ranks that run passes in one order.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import product
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.footprint.groups import LargestPeaks, PipelineGroup, pipeline_groups
from meshwright.planner.footprint.parameters import BesideWeights
from meshwright.planner.footprint.pass_table import RolePasses
from meshwright.planner.footprint.passes import Layouts, RolePeaks
from meshwright.planner.footprint.replicas import Kind, sharding_kinds
from meshwright.planner.space import (
    Column,
    Pipeline,
    Role,
    ShapeTable,
    Space,
    distinct,
)
from meshwright.simulator.blocks import (
    BlockShape,
    BlockTable,
)
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import Fragmentation, PassSize, RankOrder, batch_bytes, pass_sizes
from meshwright.simulator.model import ENDS, KeptLayer
from meshwright.simulator.replication import fills_rows
from meshwright.simulator.units import (
    ENDINGS,
    Padding,
    ParameterBytes,
    PassBytes,
    Sharding,
    StagePass,
    StageUnits,
    StageWeights,
    UnitBytes,
    unit_states,
)

Record = TypeVar("Record")
Part: TypeAlias = tuple[Stage, bool]
"""A virtual stage, and whether it is alone on its rank."""


def shardings_of(kinds: Sequence[Kind]) -> list[Sharding]:
    """Return the shardings of steps of one microbatch, and of several, kind by kind."""
    return [
        Sharding.of(
            kind.replication.in_steps_of(count), ParameterBytes(kind.state, kind.wire.reduce_bytes)
        )
        for kind in kinds
        for count in (1, 2)
    ]


class UnitStates(NamedTuple):
    """Distinct states of ranks, apart from their stages: of each layout, and as columns."""

    of_layout: Column
    shapes: Column
    num_ranks: Column
    num_expert_ranks: Column
    kinds: Column
    shardings: list[Sharding]
    columns: Sharding

    @classmethod
    def of(
        cls, space: Space, table: ShapeTable, indices: Column, kinds: list[Kind], member: Column
    ) -> "UnitStates":
        """Return the states of *indices*, each of which has one of *kinds*."""
        # A step of one microbatch reduces at once.
        steps = np.minimum(space.num_microbatches[indices], 2) - 1
        group_sizes, is_divided = space.num_shards[indices], space.column("ep")[indices] > 1
        of_experts = np.where(is_divided, space.expert_shards[indices], 1)
        # Ranks, shape and kind decide all sizes: equal ones are computed once.
        columns = [table.index[indices], group_sizes, of_experts, 2 * member + steps]
        first, state = distinct(columns)
        of_layout = np.full(len(space), -1)
        of_layout[indices] = state
        shardings = shardings_of(kinds)
        shapes, num_ranks, num_experts, numbers = (column[first] for column in columns)
        degrees = num_ranks, num_experts
        return cls(of_layout, shapes, *degrees, numbers, shardings, columns_of(shardings))

    def sharding(self, states: Column) -> Sharding:
        """Return the shardings of *states* as columns."""
        shardings = taken(self.columns, self.kinds[states])
        ranks = self.num_ranks[states], self.num_expert_ranks[states]
        return shardings._replace(num_ranks=ranks[0], num_expert_ranks=ranks[1])

    def alike(self, states: Column) -> Iterator[tuple[NDArray[np.bool_], Sharding]]:
        """Yield the masks of *states* that are alike in structure, with their sharding."""
        kinds = self.kinds[states]
        members: dict[Sharding, list[int]] = defaultdict(list)
        # Kinds with equal flags are sized as one: their ranks are columns.
        for kind in sorted(set(kinds.tolist())):
            members[self.shardings[kind].with_ranks(0, 0, 0)].append(kind)
        for structure, alike in members.items():
            chosen = np.isin(kinds, alike)
            columns = self.sharding(states[chosen])
            yield (
                chosen,
                structure.with_ranks(
                    columns.num_ranks, columns.num_replicas, columns.num_expert_ranks
                ),
            )


class PartSizes(NamedTuple):
    """Sizes by state: parameters and experts, `Padding`, then `StageUnits` from its surplus on."""

    row_of: Column
    rows: NDArray[np.int64]


NUM_STATIC = 7  # columns before those of passes


class UnitPeaks:
    """Peaks of ranks, computed once for all layouts that share them."""

    def __init__(self, space: Space, table: ShapeTable, blocks: BlockTable) -> None:
        self._space = space
        self._table = table
        for ending in ENDINGS[1:]:  # the first one is as usual
            blocks.prepare(table.shapes, table.kinds[: -len(ENDS)], ending)
        keeps = any(isinstance(kind, KeptLayer) for kind in table.kinds)
        passes = [PassBytes.of(blocks, shape, keeps_layers=keeps) for shape in table.shapes]
        self._passes = columns_of(passes)
        self._beside = BesideWeights(table)
        self._shapes, self._member = table.by_degrees()

    def add_to(
        self, peaks: LargestPeaks, indices: Column, tell: Callable[[int, int], None]
    ) -> None:
        """Add the largest peaks of *indices* to *peaks*, those of all layouts.

        Of layouts that need too much one such rank is added, of those that the stack does not
        offer, replicas of whole parameters, none. *tell* is called with the progress.
        """
        kinds, member = sharding_kinds(self._space, indices)
        is_offered = [
            each.replication.dp_cp == 1 or each.replication.zero_stage == 3 for each in kinds
        ]
        offered = np.array(is_offered, np.bool_)[member]
        indices, member = indices[offered], member[offered]
        states = UnitStates.of(self._space, self._table, indices, kinds, member)
        groups = list(pipeline_groups(self._space, indices))
        used: dict[Part, list[Column]] = defaultdict(list)
        for group in groups:
            own = np.unique(states.of_layout[group.indices])
            for part in dict.fromkeys(
                part for role in group.pipeline.roles for part in _parts(role)
            ):
                used[part].append(own)
        sizes: dict[Part, PartSizes] = {}
        for part, each in used.items():
            tell(len(sizes), len(used) + len(groups))
            sizes[part] = self._part_sizes(part, states, np.unique(np.concatenate(each)))
        for done, group in enumerate(groups, len(used)):
            tell(done, len(used) + len(groups))
            for role in group.pipeline.roles:
                left = group.indices[peaks.left(group.indices)]
                if not len(left):
                    break
                parts = [sizes[each] for each in _parts(role)]
                found = self._role_peaks(group._replace(indices=left), role, states, parts)
                peaks.add(left, *found)

    def _part_sizes(self, part: Part, states: UnitStates, used: Column) -> PartSizes:
        """Return the sizes of a virtual stage in the states that are *used*."""
        (stage, is_alone), shapes = part, states.shapes[used]
        columns = self._member[shapes], states.num_ranks[used], states.num_expert_ranks[used]
        weights_of, weight_rows = _weights(stage, self._shapes, columns)
        rows = np.empty((len(used), 0), np.int64)
        for is_chosen, sharding in states.alike(used):
            shape = self._table.shapes[shapes[is_chosen][0]]
            weights = taken(weights_of, weight_rows[is_chosen])
            passes = taken(self._passes, shapes[is_chosen])
            units = UnitBytes.of(shape, stage, weights, sharding)
            unit_sizes = StageUnits.of(
                shape, StagePass(passes, stage, sharding, units), weights, is_alone=is_alone
            )
            static = (
                weights.total,
                weights.experts,
                *weights.padding,
                unit_sizes.surplus,
                unit_sizes.copied,
            )
            sizes = (*static, unit_sizes.buffers, *pass_sizes(unit_sizes.memory))
            if not rows.size:
                rows = np.empty((len(used), len(sizes)), np.int64)
            for number, column in enumerate(sizes):
                rows[is_chosen, number] = column
        row_of = np.zeros(len(states.shapes), np.int64)
        row_of[used] = np.arange(len(used))
        return PartSizes(row_of, rows)

    def _role_peaks(
        self, group: PipelineGroup, role: Role, states: UnitStates, sizes: list[PartSizes]
    ) -> tuple[Column, Column]:
        """Return the live bytes of the fullest of the role's ranks, and of its states."""
        own = states.of_layout[group.indices]
        first, member = distinct([own])
        used = own[first]
        parts = [each.rows[each.row_of[used]] for each in sizes]
        counts = [role.stages.count(stage) for stage, _ in _parts(role)]
        total = sum(rows * count for rows, count in zip(parts, counts, strict=True))
        weights, experts, most, of_experts, surplus, copied, buffers, *passes = np.asarray(total).T
        sharding, shapes = states.sharding(used), states.shapes[used]
        held = unit_states(weights, experts, Padding(most, of_experts), sharding)
        lasting = held.weights_bytes + self._beside.of_rank(shapes, role.stages)
        gradients, tables = (
            held.gradients_bytes + surplus,
            self._beside.angle_tables(shapes, role.stages),
        )
        updating = held.update_temporary_bytes + copied * (1 - sharding.on_host)
        updating = updating - passes[PassSize.REDUCED]
        microbatches = self._space.num_microbatches[group.indices]
        pass_parts = [rows.T[NUM_STATIC:, None] for rows in parts]
        sums = np.asarray(sharding.sums, np.int64)
        dynamic = _most_dynamic(group.pipeline, role, pass_parts, sums, (member, microbatches))
        live = (lasting + gradients + tables)[member] + np.maximum(dynamic, updating[member])
        # Pipelines of PyTorch hold buffers of all microbatches of a step.
        live = live + microbatches * (buffers[member] + self._batch_bytes(group))
        kept = Fragmentation.of(self._space.stack).state_bytes(lasting, gradients)[member]
        return np.asarray(live, np.int64), np.asarray(kept, np.int64)

    def _batch_bytes(self, group: PipelineGroup) -> Column:
        """Return the bytes of the batch on a rank, for each microbatch of each layout."""
        job, stack = self._space.job, self._space.stack
        size, cp = (self._space.column(name)[group.indices] for name in ("microbatch_size", "cp"))
        is_held = group.pipeline.pp > 1 and stack.keeps_stage_outputs
        return np.asarray(batch_bytes(size * job.seq_len // cp, cp) * is_held, np.int64)


def _most_dynamic(
    pipeline: Pipeline,
    role: Role,
    parts: list[NDArray[np.int64]],
    sums: Column,
    layouts: tuple[Column, Column],
) -> Column:
    """Return the largest dynamic bytes in the passes of the role's ranks, of each layout.

    They are monotonic over the ranks of a role, so that the first or the last has most.

    Args:
        pipeline: Pipeline of the layouts.
        role: Ranks of it with equal virtual stages.
        parts: Sizes of each different virtual stage, by state.
        sums: Whether gradients are accumulated whole until the last microbatch, by state.
        layouts: State of each layout, and its microbatches.
    """
    stages = list(dict.fromkeys(role.stages))
    kinds = tuple(map(stages.index, role.stages))
    keeps = RankOrder(kinds, moves_states=True, keeps_units=pipeline.pp > 1)
    frees = [part[PassSize.AFTER_FORWARD] < part[PassSize.AFTER_BACKWARD] for part in parts]
    reshards = np.any(frees, axis=0)[0]
    states, microbatches = layouts
    dynamic = np.zeros(len(states), np.int64)
    for reshard, summed in product((False, True), repeat=2):
        rows = np.flatnonzero(((reshards == reshard) & (sums == summed))[states])
        if len(rows):
            order = keeps._replace(reshards=reshard, sums=summed)
            passes = RolePasses(pipeline.schedule, pipeline.pp, order)
            own = Layouts(states[rows], microbatches[rows], np.zeros_like(rows))
            dynamic[rows] = RolePeaks(role, passes, parts).bytes(own)
    return dynamic


def _weights(
    stage: Stage, shapes: Sequence[BlockShape], columns: tuple[Column, Column, Column]
) -> tuple[StageWeights, Column]:
    """Return distinct weights of a *stage* as columns, and the index of each state's.

    *columns* are of states: index in *shapes*, and ranks of both shard groups.
    """
    first, own = distinct([*columns] if fills_rows(shapes[0]) else [columns[0]])
    keys = np.stack(columns, axis=1)[first].tolist()
    each = [StageWeights.of(shapes[member], stage, *ranks) for member, *ranks in keys]
    return columns_of(each), own


def _parts(role: Role) -> list[Part]:
    """Return the different virtual stages of a rank, in the order of its passes."""
    return [(stage, len(role.stages) == 1) for stage in dict.fromkeys(role.stages)]


def mapped(function: Callable[[Sequence[object]], Column], records: Sequence[Record]) -> Record:
    """Return a record of *function* applied to the same field of each of *records*.

    >>> mapped(np.array, [(1, (2, 3)), (4, (5, 6))])[1][0].tolist()
    [2, 5]
    """
    first = records[0]
    if is_dataclass(first) and not isinstance(first, type):
        parts = [[getattr(each, one.name) for each in records] for one in fields(first)]
    elif isinstance(first, tuple):
        parts = [list(each) for each in zip(*cast("Sequence[tuple[object]]", records), strict=True)]
    else:
        return cast("Record", function(records))
    columns = [mapped(function, each) for each in parts]
    return cast("Record", tuple(columns) if type(first) is tuple else type(first)(*columns))


def columns_of(records: Sequence[Record]) -> Record:
    """Return *records* as one record of columns."""
    return mapped(lambda numbers: np.array(numbers, np.int64), records)


def taken(columns: Record, rows: Column) -> Record:
    """Return *rows* of a record of columns."""
    return mapped(lambda column: cast("Column", column[0])[rows], [columns])
