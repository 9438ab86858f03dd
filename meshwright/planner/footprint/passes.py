"""Sizes of passes through virtual stages, in columns over the shapes of layouts."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.footprint.parameters import ParameterCounts
from meshwright.planner.footprint.pass_table import (
    RolePasses,
    joined,
    max_weighted_sums,
    pass_table,
)
from meshwright.planner.footprint.replicas import Kind, StageSharing
from meshwright.planner.space import Column, Pipeline, Role, ShapeTable, distinct, row_slices
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.graph import Size, largest
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import (
    DYNAMIC,
    DYNAMIC_WITHOUT_STATES,
    MODULE_TENSORS,
    NUM_SIZES,
    BlockMemory,
    PassSize,
    RankOrder,
    VirtualStageMemory,
    block_bytes,
    dynamic_upper_bound,
    max_live_messages,
    overlapped_pass_bytes,
    pairs_of,
    pass_sizes,
    virtual_stage_memory,
)

MOST_ROWS = 256  # at a time: few orders are theirs, and what is made of them stays in caches


def sizes_matrix(stage: VirtualStageMemory, num_rows: int) -> NDArray[np.int64]:
    """Return the `pass_sizes` of a virtual stage as a matrix, a row for each size."""
    found = np.empty((NUM_SIZES, num_rows), np.int64)
    for number, size in enumerate(pass_sizes(stage)):
        found[number] = size
    return found


class Layouts(NamedTuple):
    """Layouts with one pipeline: index of shape, microbatches, and index of sharding."""

    shapes: Column
    microbatches: Column
    sharing: Column

    def chosen(self, rows: Column) -> "Layouts":
        """Return the layouts in *rows*."""
        return Layouts(*(column[rows] for column in self))


class Sizes:
    """Sizes of blocks and parameters of layouts whose states are no FSDP units."""

    def __init__(self, table: ShapeTable, blocks: BlockTable) -> None:
        sizes = [block_bytes(blocks, shape, others=table.kinds) for shape in table.shapes]
        self.blocks = {
            kind: BlockMemory[Column](*np.array([each[kind] for each in sizes], np.int64).T)
            for kind in table.kinds
        }
        self.counts = ParameterCounts(table)
        self._shapes = table.shapes
        self._replicas = StageSharing(table, blocks, sizes)
        self._alone: dict[Stage, tuple[VirtualStageMemory, NDArray[np.int64]]] = {}
        self._pairs: dict[tuple[Stage, Stage], Column] = {}

    def alone(self, stage: Stage) -> tuple[VirtualStageMemory, NDArray[np.int64]]:
        """Return the memory of passes without data parallelism, and its sizes by shape."""
        if stage not in self._alone:
            memory = virtual_stage_memory(self._shapes[0], stage, self.blocks)
            self._alone[stage] = memory, sizes_matrix(memory, len(self._shapes))
        return self._alone[stage]

    def shared(
        self, stage: Stage, ways: Sequence[Kind | None], used: Column, devices: int
    ) -> NDArray[np.int64]:
        """Return the sizes of passes through *stage*, by way of sharding and shape.

        Args:
            stage: Virtual stage.
            ways: Ways of sharding that differ for passes; None for no data parallelism.
            used: Indices of shapes.
            devices: Devices of a stage: data- times tensor-parallel ranks.
        """
        memory, alone = self.alone(stage)
        sizes = np.repeat(alone[:, None], len(ways), axis=1)
        for way, kind in enumerate(ways):
            for index in used.tolist() if kind is not None else ():
                assert kind is not None
                own = self._replicas.memory(memory, kind, stage, index, devices)
                sizes[:, way, index] = pass_sizes(own)
        return sizes

    def pair(self, forward: Stage, backward: Stage) -> Column:
        """Return the bytes that two overlapped passes add, for each shape."""
        pair = forward, backward
        if pair not in self._pairs:
            self._pairs[pair] = np.asarray(overlapped_pass_bytes(self.blocks, forward, backward))
        return self._pairs[pair]

    def role_peaks(
        self,
        pipeline: Pipeline,
        role: Role,
        ways: Sequence[Kind | None],
        used: Column,
        devices: int,
    ) -> "RolePeaks":
        """Return the passes of a role's ranks; see `shared`."""
        stages = list(dict.fromkeys(role.stages))
        schedule, stack = pipeline.schedule, self._shapes[0].stack
        # P2p buffers kept alive are known of schedules without F/B overlap alone.
        holds = stack.holds_messages and pipeline.pp > 1 and not schedule.runs_beside
        is_late = any(kind is not None and kind.is_late for kind in ways)
        kinds = tuple(map(stages.index, role.stages))
        passes = RolePasses(schedule, pipeline.pp, RankOrder(kinds, moves_states=is_late), holds)
        sizes = [self.shared(stage, ways, used, devices) for stage in stages]
        pairs = pairs_of(len(stages)) if schedule.runs_beside else []
        added = [self.pair(stages[forward], stages[backward]) for forward, backward in pairs]
        return RolePeaks(role, passes, sizes, added)

    def shared_buffers(self, role: Role) -> Column:
        """Return the buffers that blocks of a rank share throughout the step, for each shape."""
        stages = dict.fromkeys(role.stages)
        return np.asarray(largest(self.alone(stage)[0].buffer_bytes for stage in stages), np.int64)


class RolePeaks:
    """Passes of ranks of a role, whatever parameters they hold.

    Args:
        role: Ranks of a pipeline with equal virtual stages.
        passes: Order of their passes.
        stages: Sizes of each different virtual stage, by way of sharding and shape, or by state.
        pairs: Bytes that two overlapped passes add, for each shape, if passes overlap.
    """

    def __init__(
        self,
        role: Role,
        passes: RolePasses,
        stages: Sequence[NDArray[np.int64]],
        pairs: Sequence[Column] = (),
    ) -> None:
        self._role, self._passes, self._stages, self._pairs = role, passes, stages, pairs

    @property
    def held_between_steps(self) -> Column:
        """P2p buffers that modules keep alive from step to step, one row for each shape."""
        gradients = [self._stages[kind][PassSize.GRADIENT, 0] for kind in self._passes.order.kinds]
        return np.asarray(MODULE_TENSORS * self._passes.holds_messages * sum(gradients))

    def upper_bound(self, own: Layouts) -> Column:
        """Return an upper bound of `bytes`, whatever the order of passes."""
        (schedule, pp, order, holds), kinds = self._passes, self._passes.order.kinds
        first, member = distinct([own.microbatches])
        bounds = []
        for num_microbatches in own.microbatches[first].tolist():
            in_flight = schedule.most_in_flight(self._role.first, pp, num_microbatches, len(kinds))
            larger_by = schedule.group(pp, num_microbatches) - pp
            held = max_live_messages(len(kinds), larger_by) if holds else 0
            bounds.append((*in_flight, held))
        passes, last, messages = np.array(bounds, np.int64)[member].T
        names = DYNAMIC if order.moves_states else DYNAMIC_WITHOUT_STATES
        sizes: list[dict[PassSize, Size]] = [
            {size: num_microbatches[size, own.sharing, own.shapes] for size in names}
            for num_microbatches in self._stages
        ]
        stages = [sizes[kind] for kind in kinds]
        most = dynamic_upper_bound(stages, (passes, last), messages)
        # Overlapped pairs add more than either pass alone: the largest pair on top.
        pairs = np.max(self._pairs, axis=0)[own.shapes] if self._pairs else 0
        return np.asarray(most + pairs, np.int64)

    def bytes(self, own: Layouts) -> Column:
        """Return the dynamic bytes at each layout's peak."""
        first, family = distinct([*own])
        distinct_layouts = own.chosen(first)
        peaks = np.empty(len(first), np.int64)
        numbers, member = distinct([distinct_layouts.microbatches])
        few = [self._orders(each) for each in distinct_layouts.microbatches[numbers].tolist()]
        places = {orders: place for place, orders in enumerate(dict.fromkeys(few))}
        place = np.array([places[orders] for orders in few])[member]
        # Sorted by orders, so that each slice of rows needs few tables.
        orders_by_place, by_place = [*places], np.argsort(place, kind="stable")
        for some in row_slices(len(first), MOST_ROWS):
            rows = by_place[some]
            begin, end = place[rows[0]], place[rows[-1]] + 1
            most = self._most(
                orders_by_place[begin:end], place[rows] - begin, distinct_layouts.chosen(rows)
            )
            peaks[rows] = most
        return peaks[family]

    def _most(
        self, ranks: Sequence[tuple[tuple[int, int], ...]], place: Column, own: Layouts
    ) -> Column:
        """Return the dynamic bytes of the fullest of the *ranks* at the *place* of each layout.

        A rank is an index, with as few microbatches as show its peak.
        """
        every = dict.fromkeys(chain.from_iterable(ranks))
        tables = {rank: pass_table(self._passes, *rank) for rank in every}
        columns, counts, starts = joined([*tables.values()])
        sizes = self._columns(columns, own)
        most = max_weighted_sums(sizes, counts, starts)
        for number, table in enumerate(tables.values()):
            if table.growth is not None:
                of_table = sizes[:, np.searchsorted(columns, table.columns)]
                most[:, number] = table.most_dynamic(of_table, own.microbatches)
        numbers = {rank: number for number, rank in enumerate(tables)}
        of_ranks = np.array([[numbers[rank] for rank in each] for each in ranks])
        return np.asarray(np.take_along_axis(most, of_ranks[place], axis=1).max(axis=1))

    def _columns(self, columns: Column, own: Layouts) -> NDArray[np.int64]:
        """Return the sizes of some columns of a `PassTable`, a row for each layout."""
        sizes = np.empty((len(own.shapes), len(columns)), np.int64)
        for number, column in enumerate(columns.tolist()):
            kind, size = divmod(column, NUM_SIZES)
            if kind < len(self._stages):
                sizes[:, number] = self._stages[kind][size, own.sharing, own.shapes]
            else:
                pair = column - len(self._stages) * NUM_SIZES
                sizes[:, number] = self._pairs[pair][own.shapes]
        return sizes

    def _orders(self, num_microbatches: int) -> tuple[tuple[int, int], ...]:
        """Return the ranks that may be the fullest, each with few microbatches that show it."""
        few = self._passes.few_microbatches
        ranks = self._ranks(num_microbatches)
        return tuple((rank, few(rank, num_microbatches)) for rank in ranks)

    def _ranks(self, num_microbatches: int) -> list[int]:
        """Return the ranks of the role that may be the fullest: the first has most in flight.

        Only a rank that runs a forward pass after a backward one keeps p2p buffers alive in forward
        passes.
        """
        role, passes, ranks = self._role, self._passes, [self._role.first]
        if passes.holds_messages and len(passes.order.kinds) == 1:
            alternates = passes.pp - num_microbatches + 1
            ranks.append(min(max(role.first, alternates), role.last))
        elif passes.order.keeps_units and not self._keeps_most:
            ranks.append(role.last)
        return ranks

    @cached_property
    def _keeps_most(self) -> bool:
        """Whether no pass sends more than it saves, so that fewer in flight are never fuller."""
        sent = PassSize.OUTPUT, PassSize.GRADIENT
        return all(
            (each[PassSize.SAVED] >= sum(each[size] for size in sent)).all()
            for each in self._stages
        )
