"""The few block shapes that a space has, with their times as columns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space.space import Column, Space
from meshwright.simulator import CostModel
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import sums_microbatches, syncs_by_default
from meshwright.simulator.model import Block
from meshwright.simulator.step import message_between

ENDS: tuple[Block, ...] = ("embedding", "head")
BLOCKS: tuple[Block, ...] = ("layer", *ENDS)


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """Distinct block shapes of a space, and which one each layout has."""

    shapes: tuple[BlockShape, ...]
    index: NDArray[np.int64]

    @classmethod
    def of(cls, space: Space) -> "ShapeTable":
        """Return the shapes of every layout of *space*."""
        names = ("tp", "microbatch_size", "sequence_parallel", "recompute")
        in_pipeline = (space.column("pp") > 1) & space.stack.keeps_stage_outputs
        flags = (in_pipeline, _defers_sums(space))
        columns = np.stack([*(space.column(name) for name in names), *flags], axis=1)
        _, first, index = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        return cls(_shapes(space, first), index.reshape(-1))


def _defers_sums(space: Space) -> Column:
    """Return `BlockShape.defers_sums` of every layout."""
    stack = space.stack
    each = syncs_by_default(stack, space.column("zero_stage"), space.column("pp"))
    once = sums_microbatches(each, space.column("pp"), space.num_microbatches)
    return np.asarray(once & stack.sums_norms_each_microbatch, np.int64)


def _shapes(space: Space, rows: NDArray[np.int64]) -> tuple[BlockShape, ...]:
    """Return the shapes of the layouts of *rows*."""
    plans = (space.plan(row) for row in rows.tolist())
    return tuple(BlockShape.of(space.job, plan, space.stack) for plan in plans)


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Picoseconds of each shape, one row a shape.

    ``blocks`` has a column for forward and backward of each of `BLOCKS`; ``messages`` the time
    on the port and in all of a message between nodes, then the least of any message.
    """

    blocks: NDArray[np.int64]
    messages: NDArray[np.int64]

    @classmethod
    def of(cls, table: ShapeTable, used: Column, costs: CostModel) -> "ShapeTimes":
        """Return the times of the shapes that *used* indexes; zeros for the others."""
        blocks = np.zeros((len(table.shapes), 2 * len(BLOCKS)), np.int64)
        messages = np.zeros((len(table.shapes), 4), np.int64)
        # Recomputation is of layers: shapes that differ in it share the ends and the messages.
        known: dict[tuple[int, int, bool, bool, bool], tuple[list[int], list[int]]] = {}
        for index in used.tolist():
            shape = table.shapes[index]
            flags = (shape.sequence_parallel, shape.in_pipeline, shape.defers_sums)
            key = (shape.tp, shape.microbatch_size, *flags)
            if key not in known:
                ends = _block_times(shape, costs, ENDS)
                known[key] = ends, _message_times(shape, costs)
            ends, messages[index] = known[key]
            blocks[index] = [*_block_times(shape, costs, ("layer",)), *ends]
        return cls(blocks, messages)


def _block_times(shape: BlockShape, costs: CostModel, blocks: tuple[Block, ...]) -> list[int]:
    priced = [costs.block_cost(shape, block) for block in blocks]
    return [part.time_ps for cost in priced for part in (cost.forward, cost.backward)]


def _message_times(shape: BlockShape, costs: CostModel) -> list[int]:
    far, near = (
        message_between(costs, shape, crosses_nodes=crosses)[0] for crosses in (True, False)
    )
    far_ps, near_ps = (each.occupy_ps + each.delay_ps for each in (far, near))
    return [far.occupy_ps, far_ps, min(far.occupy_ps, near.occupy_ps), min(far_ps, near_ps)]
