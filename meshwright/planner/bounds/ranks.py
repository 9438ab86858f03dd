"""Layouts and their ranks as columns: what their passes, messages and replicas take."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.bounds.data_parallel import DataParallelTimes
from meshwright.planner.bounds.ways import Counts, Ways
from meshwright.planner.space import Column, ShapeTable, Space
from meshwright.simulator import CostModel, ResolvedPlan
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Mesh
from meshwright.simulator.ledger import price, tied_table
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.replication import replication_of, wire_bytes
from meshwright.simulator.step import HostSide


class Sharing(NamedTuple):
    """How the replicas of some layouts share states: those of one pipeline, degrees, switches."""

    pipeline: int
    shape: BlockShape
    side: HostSide
    shared_ps: int
    """The all-reduce of a tied table."""

    @classmethod
    def of(
        cls, space: Space, table: ShapeTable, costs: CostModel, index: int, plan: ResolvedPlan
    ) -> "Sharing":
        """Return that of layout *index* of a space, which is *plan* but for its stages."""
        stack, precision, shape = space.stack, space.job.precision, table.shapes[table.index[index]]
        mesh = Mesh.of(plan, costs.cluster.devices_per_node)
        wire = wire_bytes(shape, plan)
        state = StateBytes.of(stack, precision, plan.gradient_formats, plan.moment_precision)
        return cls(
            int(space.pipeline_numbers[index]),
            shape,
            HostSide(costs, wire, state, replication_of(plan, stack, mesh)),
            price(costs, tied_table(shape, wire, mesh, plan)).time_ps,
        )


class Replicas(NamedTuple):
    """Data-parallel times of layouts in one role, and blocks reduced first of two stages."""

    times: DataParallelTimes
    shared_ps: Column
    first_end: Counts
    last_end: Counts


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
