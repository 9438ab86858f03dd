"""The few block shapes that a space has, with their bytes and times as columns."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space.space import RECOMPUTES, Column, Space
from meshwright.simulator import CostModel
from meshwright.simulator.blocks import BlockParameters, BlockShape
from meshwright.simulator.liveness import saved_embedding_bytes, saved_head_bytes, saved_layer_bytes
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
        distinct, index = np.unique(columns, axis=0, return_inverse=True)
        return cls(_shapes(space, distinct), index.reshape(-1))


def _defers_sums(space: Space) -> Column:
    """Return `BlockShape.defers_sums` of every layout."""
    stack, zero_stages = space.stack, space.column("zero_stage")
    each = (zero_stages >= 2) & stack.reduces_each_microbatch
    once = (space.column("pp") > 1) | ((space.num_microbatches > 1) & ~each)
    return np.asarray(once & stack.sums_norms_each_microbatch, np.int64)


def _shapes(space: Space, distinct: NDArray[np.int64]) -> tuple[BlockShape, ...]:
    shapes: dict[int, BlockShape] = {}
    table = []
    for tp, microbatch_size, sequence_parallel, recompute, *flags in distinct.tolist():
        if tp not in shapes:
            shapes[tp] = BlockShape(
                model=space.job.model,
                seq_len=space.job.seq_len,
                precision=space.job.precision,
                microbatch_size=1,
                tp=tp,
                sequence_parallel=False,
                recompute=RECOMPUTES[0],
                attention=space.attention,
                stack=space.stack,
                parameters=BlockParameters.of(space.job.model, tp),
            )
        table.append(
            replace(
                shapes[tp],
                microbatch_size=microbatch_size,
                sequence_parallel=bool(sequence_parallel) and tp > 1,
                recompute=RECOMPUTES[recompute],
                in_pipeline=bool(flags[0]),
                defers_sums=bool(flags[1]),
            )
        )
    return tuple(table)


@dataclass(frozen=True, slots=True)
class ShapeBytes:
    """Bytes of each shape: what blocks keep for one microbatch."""

    saved_layer: Column
    saved_embedding: Column
    saved_head: Column

    @classmethod
    def of(cls, table: ShapeTable) -> "ShapeBytes":
        """Return the bytes of every shape of *table*."""
        return cls(
            _column(table, saved_layer_bytes),
            _column(table, saved_embedding_bytes),
            _column(table, saved_head_bytes),
        )


def _column(table: ShapeTable, of: Callable[[BlockShape], int]) -> Column:
    return np.array([of(shape) for shape in table.shapes], np.int64)


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
