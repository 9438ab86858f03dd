"""Layouts and their ranks as columns: times of passes, messages and data parallelism."""

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Offload, Units
from meshwright.planner.bounds.data_parallel import DataParallelTimes, end_part
from meshwright.planner.bounds.ways import Counts, PathSegments
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
from meshwright.simulator.costs import expert_all_to_all_times
from meshwright.simulator.layout import MAX_ZERO_STAGE, Stage
from meshwright.simulator.ledger import StepSetting, deferred_sums
from meshwright.simulator.model import ENDS
from meshwright.simulator.step import HostSide, StageExchanges, rank_exchanges


class Replicas(NamedTuple):
    """Data-parallel times of layouts in one role, and the blocks that two stages reduce first."""

    times: DataParallelTimes
    first_end: Counts
    last_end: Counts


class KnownExchanges:
    """Data-parallel communication of a job's ranks, by the properties that decide it.

    ``shapes`` has one of all shapes that shard weights alike: parts of stages are computed once for
    it.
    """

    def __init__(self) -> None:
        self.shapes: dict[tuple[object, ...], BlockShape] = {}
        self.ranks: dict[tuple[object, ...], Replicas] = {}
        self.stages: dict[object, dict[Stage, StageExchanges]] = {}


def _exchanges_of_jobs() -> defaultdict[object, KnownExchanges]:
    """Return the empty table of known communication by job."""
    return defaultdict(KnownExchanges)


class Exchanges:
    """Data-parallel communication of ranks in each role of layouts, equal ones computed once."""

    def __init__(self, space: Space, table: ShapeTable, costs: CostModel) -> None:
        self._space, self._table, self._costs = space, table, costs
        self._deferred_sums = np.array([deferred_sums(shape) for shape in table.shapes], np.int64)
        self._known = costs.kept(_exchanges_of_jobs)[space.job, space.kinds]

    def of(self, indices: Column) -> tuple[list[list[Replicas]], Column]:
        """Return the times of some layouts by role, and which of these each of *indices* has."""
        space = self._space
        # A layout's other fields do not change these times.
        names = ("tp", "cp", "dp", "ep", "etp", "zero_stage", *SWITCHES)
        columns = [space.column(name)[indices] for name in names]
        # Recomputation decides the prefetches of Megatron-FSDP's units.
        is_sharded = space.column("zero_stage")[indices] == MAX_ZERO_STAGE
        is_flat = is_sharded & (space.stack.units is Units.FLAT)
        numbers = (
            self._deferred_sums[self._table.index[indices]],
            space.column("recompute")[indices] * is_flat,
            space.pipeline_numbers[indices],
        )
        first, member = distinct([*columns, *numbers])
        chosen = indices[first].tolist()
        plans = space.plans_without_stages(chosen)
        return [self._by_role(*each) for each in zip(chosen, plans, strict=True)], member

    def _by_role(self, index: int, plan: ResolvedPlan) -> list[Replicas]:
        """Return the times of layout *index*, which is *plan* but for its stages."""
        costs, space = self._costs, self._space
        shape = self._table.shapes[self._table.index[index]]
        is_flat = space.stack.units is Units.FLAT and plan.zero_stage == MAX_ZERO_STAGE
        recomputation = (shape.recompute, shape.modules) if is_flat else ()
        weights = (shape.weight_degrees, deferred_sums(shape), shape.is_unwrapped, recomputation)
        shape = self._known.shapes.setdefault(weights, shape)
        # Of one microbatch: with more of them a rank exchanges and copies no less.
        job = replace(space.job, global_batch_size=plan.dp * plan.microbatch_size)
        setting = StepSetting.without_stages(job, plan, shape, costs.cluster.devices_per_node)
        side = HostSide(costs, setting.wire, setting.state, setting.replication)
        key = (
            shape,
            (plan.cp, plan.dp),
            setting.wire,
            None if plan.offload is Offload.NONE else setting.state,
            setting.replication,
        )
        return [
            self._of_rank(setting, side, key, role.stages)
            for role in space.pipelines[space.pipeline_numbers[index]].roles
        ]

    def _of_rank(
        self, setting: StepSetting, side: HostSide, setting_key: object, stages: tuple[Stage, ...]
    ) -> Replicas:
        key = (setting_key, stages)
        if key not in self._known.ranks:
            rank = rank_exchanges(
                setting.of_stages(stages),
                side,
                stages,
                self._known.stages.setdefault(setting_key, {}),
            )
            ends = [end_part(stages[place], rank.virtual_stages[place]) for place in (0, -1)]
            blocks = (np.array(block_counts(self._space.kinds, [each])) for each in ends)
            times = DataParallelTimes.of(rank, side.replication, side.costs.stack)
            self._known.ranks[key] = Replicas(times, *blocks)
        return self._known.ranks[key]


class OverlapLimits:
    """Upper bounds of the time that overlapped passes hide, for the blocks of each shape.

    A pair splits its overlapped time by the all-to-all time of each pass, of which it is at most
    the stack's fraction: a pass takes no less than its blocks without that, whatever it overlaps
    with.
    """

    def __init__(self, table: ShapeTable, costs: CostModel) -> None:
        self._table = table
        self._costs = costs
        self._known: dict[int, list[int]] = {}

    def of(self, shapes: Column, overlaps: Column) -> NDArray[np.int64] | int:
        """Return picoseconds of layouts by their *shapes*, 0 where nothing *overlaps*.

        Returns:
            Columns for forward and backward of each kind of block, as `ShapeTimes.blocks` has them;
            0 where nothing overlaps at all.
        """
        if not overlaps.any():
            return 0
        overlapped = np.zeros((len(shapes), 2 * len(self._table.kinds)), np.int64)
        for number in np.unique(shapes[overlaps > 0]).tolist():
            if number not in self._known:
                self._known[number] = self._overlap_limits_ps(self._table.shapes[number])
            overlapped[(shapes == number) & (overlaps > 0)] = self._known[number]
        return overlapped

    def _overlap_limits_ps(self, shape: BlockShape) -> list[int]:
        most = [0] * (2 * len(self._table.kinds))
        for place, kind in enumerate(self._table.kinds[: -len(ENDS)]):
            for phase, times in enumerate(expert_all_to_all_times(self._costs, shape, kind)):
                share = self._costs.stack.ep_overlap_fraction * sum(times)
                # Rounded up, so that the bound stays one.
                most[2 * place + phase] = int(share) + 1 if times else 0
        return most


class Layouts(NamedTuple):
    """Layouts with the times of their blocks and messages as columns.

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
    segments: PathSegments
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
        """Return the time of backward passes through *blocks*."""
        return time_of(self.layouts.backward, blocks)

    def travel(self, senders: Counts) -> Column:
        """Return the time of consecutive messages."""
        return time_of(self.layouts.travelled, senders)

    def occupy(self, senders: Counts) -> Column:
        """Return the time that messages occupy their senders, where sending blocks."""
        return time_of(self.layouts.occupied, senders)


def time_of(times: NDArray[np.int64], counts: Counts) -> Column:
    """Return the sum of the *times* of so many blocks of each kind."""
    return np.asarray(np.einsum("lk,lk->l", times, counts), np.int64)
