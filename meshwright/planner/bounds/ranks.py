"""Layouts and their ranks as columns: what their passes, messages and replicas take."""

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Offload, Units
from meshwright.planner.bounds.data_parallel import DataParallelTimes, end_part
from meshwright.planner.bounds.ways import Counts, Ways
from meshwright.planner.space import (
    SWITCHES,
    Column,
    ShapeTable,
    Space,
    block_counts,
    distinct,
)
from meshwright.simulator import CostModel, ResolvedPlan
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import exchange_times
from meshwright.simulator.layout import MAX_ZERO_STAGE, Stage
from meshwright.simulator.ledger import StepSetting, left_sums
from meshwright.simulator.model import ENDS
from meshwright.simulator.step import HostSide, StageExchanges, rank_exchanges


class Replicas(NamedTuple):
    """Data-parallel times of layouts in one role, and blocks reduced first of two stages."""

    times: DataParallelTimes
    first_end: Counts
    last_end: Counts


class KnownExchanges:
    """Exchanges of a job's ranks that are known, by what decides them.

    ``shapes`` has one of all shapes that divide weights alike: what stages are made of is found
    once for it.
    """

    def __init__(self) -> None:
        self.shapes: dict[tuple[object, ...], BlockShape] = {}
        self.ranks: dict[tuple[object, ...], Replicas] = {}
        self.stages: dict[object, dict[Stage, StageExchanges]] = {}


def _exchanges_of_jobs() -> defaultdict[object, KnownExchanges]:
    """Return the exchanges that are known of each job: none yet."""
    return defaultdict(KnownExchanges)


class Exchanges:
    """The exchanges of ranks in each role of layouts; those that are alike are found once."""

    def __init__(self, space: Space, table: ShapeTable, costs: CostModel) -> None:
        self._space, self._table, self._costs = space, table, costs
        self._left_sums = np.array([left_sums(shape) for shape in table.shapes], np.int64)
        self._known = costs.kept(_exchanges_of_jobs)[space.job, space.kinds]

    def of(self, indices: Column) -> tuple[list[list[Replicas]], Column]:
        """Return them by role, of some layouts, and whose each of *indices* has."""
        space = self._space
        # Of a layout's other choices none moves these times.
        names = ("tp", "cp", "dp", "ep", "etp", "zero_stage", *SWITCHES)
        columns = [space.column(name)[indices] for name in names]
        # Units of Megatron-FSDP are gathered ahead of layers by what runs again.
        is_sharded = space.column("zero_stage")[indices] == MAX_ZERO_STAGE
        is_flat = is_sharded & (space.stack.units is Units.FLAT)
        numbers = (
            self._left_sums[self._table.index[indices]],
            space.column("recompute")[indices] * is_flat,
            space.pipeline_numbers[indices],
        )
        first, member = distinct([*columns, *numbers])
        chosen = indices[first].tolist()
        plans = space.plans_without_stages(chosen)
        return [self._by_role(*each) for each in zip(chosen, plans, strict=True)], member

    def _by_role(self, index: int, plan: ResolvedPlan) -> list[Replicas]:
        """Return those of layout *index*, which is *plan* but for its stages."""
        costs, space = self._costs, self._space
        shape = self._table.shapes[self._table.index[index]]
        is_flat = space.stack.units is Units.FLAT and plan.zero_stage == MAX_ZERO_STAGE
        again = (shape.recompute, shape.modules) if is_flat else ()
        weights = (shape.weight_degrees, left_sums(shape), shape.is_unwrapped, again)
        shape = self._known.shapes.setdefault(weights, shape)
        # Of one microbatch: with more of them a rank exchanges and copies no less.
        job = replace(space.job, global_batch_size=plan.dp * plan.microbatch_size)
        setting = StepSetting.without_stages(job, plan, shape, costs.cluster.devices_per_node)
        side = HostSide(costs, setting.wire, setting.state, setting.replication)
        alike = (
            shape,
            (plan.cp, plan.dp),
            setting.wire,
            None if plan.offload is Offload.NONE else setting.state,
            setting.replication,
        )
        return [
            self._of_rank(setting, side, alike, role.stages)
            for role in space.pipelines[space.pipeline_numbers[index]].roles
        ]

    def _of_rank(
        self, setting: StepSetting, side: HostSide, alike: object, stages: tuple[Stage, ...]
    ) -> Replicas:
        key = (alike, stages)
        if key not in self._known.ranks:
            rank = rank_exchanges(
                setting.of_stages(stages), side, stages, self._known.stages.setdefault(alike, {})
            )
            ends = [end_part(stages[place], rank.virtual_stages[place]) for place in (0, -1)]
            blocks = (np.array(block_counts(self._space.kinds, [each])) for each in ends)
            times = DataParallelTimes.of(rank, side.replication, side.costs.stack)
            self._known.ranks[key] = Replicas(times, *blocks)
        return self._known.ranks[key]


class HiddenTimes:
    """The most that a pass beside another takes less than alone, of the blocks of each shape.

    A pair shares what it hides by what each of its passes exchanges, of which it is no more than
    the stack's share: a pass takes no less than its blocks without that, whatever is beside it.
    """

    def __init__(self, table: ShapeTable, costs: CostModel) -> None:
        self._table = table
        self._costs = costs
        self._known: dict[int, list[int]] = {}

    def of(self, shapes: Column, overlaps: Column) -> NDArray[np.int64] | int:
        """Return picoseconds of layouts by their *shapes*, none where nothing *overlaps*.

        Returns:
            Columns for forward and backward of each kind of block, as `ShapeTimes.blocks` has them;
            0 where nothing overlaps at all.
        """
        if not overlaps.any():
            return 0
        hidden = np.zeros((len(shapes), 2 * len(self._table.kinds)), np.int64)
        for number in np.unique(shapes[overlaps > 0]).tolist():
            if number not in self._known:
                self._known[number] = self._most_ps(self._table.shapes[number])
            hidden[(shapes == number) & (overlaps > 0)] = self._known[number]
        return hidden

    def _most_ps(self, shape: BlockShape) -> list[int]:
        most = [0] * (2 * len(self._table.kinds))
        for place, kind in enumerate(self._table.kinds[: -len(ENDS)]):
            for phase, times in enumerate(exchange_times(self._costs, shape, kind)):
                share = self._costs.stack.ep_overlap_fraction * sum(times)
                most[2 * place + phase] = int(share) + 1 if times else 0
        return most


class Layouts(NamedTuple):
    """Layouts with their times as columns.

    ``forward`` and ``backward`` are the times of passes through a block of each kind, ``occupied``
    and ``travelled`` those of what such a block sends: ``[layouts, kinds]``.
    """

    pipeline: Column
    num_microbatches: Column
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    occupied: NDArray[np.int64]
    travelled: NDArray[np.int64]
    sharing: Column

    def of(self, rows: Column) -> "Layouts":
        """Return the layouts at *rows*."""
        return Layouts(*(each[rows] for each in self))


class Ranks(NamedTuple):
    """Layouts in one role each: of its last rank."""

    layouts: Layouts
    ways: Ways
    num_ranks: Column
    """Ranks of the layout's pipeline."""
    in_flight: Column
    around_forward: Counts
    """Passes through blocks from the first to the last pass of its last stage."""
    around_backward: Counts
    replicas: Replicas

    def forward(self, blocks: Counts) -> Column:
        """Return the time of forward passes through *blocks*."""
        return time_of(self.layouts.forward, blocks)

    def backward(self, blocks: Counts) -> Column:
        """Return the time of backward passes through them."""
        return time_of(self.layouts.backward, blocks)

    def travel(self, senders: Counts) -> Column:
        """Return the time of messages that follow each other."""
        return time_of(self.layouts.travelled, senders)

    def occupy(self, senders: Counts) -> Column:
        """Return the time that messages keep their senders, where sending blocks."""
        return time_of(self.layouts.occupied, senders)


def time_of(times: NDArray[np.int64], counts: Counts) -> Column:
    """Return the sum of the *times* of so many blocks of each kind."""
    return np.asarray(np.einsum("lk,lk->l", times, counts), np.int64)
