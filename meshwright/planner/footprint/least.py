"""What layouts need at least, found at once for all: most of those that never fit go no further."""

import numpy as np

from meshwright.planner.space import Column, Pipeline, ShapeTable, Space, block_counts, distinct
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.model import BlockKind

MOST_BYTES = 2**62
"""More than any device has."""


def least_bytes(space: Space, table: ShapeTable, blocks: BlockTable, indices: Column) -> Column:
    """Return no more bytes than the live ones of each layout's fullest rank.

    They are what the first rank keeps of the passes that are in flight there, all of them through
    the virtual stage with the fewest blocks: when the last of them is done nothing has been freed.

    Args:
        space: The layouts.
        table: Their shapes.
        blocks: Where what blocks hold is kept.
        indices: Which layouts.
    """
    blocks.prepare(table.shapes, table.kinds)
    saved = [[blocks.memory(shape, kind).saved for kind in table.kinds] for shape in table.shapes]
    by_shape = np.array(saved, np.int64).reshape(len(table.shapes), len(table.kinds))
    numbers, microbatches = space.pipeline_numbers[indices], space.num_microbatches[indices]
    first, member = distinct([numbers, microbatches])
    kept = [
        _kept_blocks(space.pipelines[number], count, table.kinds)
        for number, count in zip(numbers[first].tolist(), microbatches[first].tolist(), strict=True)
    ]
    by_pipeline = np.array(kept, np.int64).reshape(len(kept), len(table.kinds))
    # Column by column: rows of all layouts would take ten times the memory.
    own = table.index[indices]
    return sum(
        (by_shape[own, place] * by_pipeline[member, place] for place in range(len(table.kinds))),
        start=np.zeros(len(indices), np.int64),
    )


def _kept_blocks(pipeline: Pipeline, count: int, kinds: tuple[BlockKind, ...]) -> list[int]:
    """Return through how many blocks of each kind the first rank keeps passes, at least."""
    stages = pipeline.roles[0].stages
    size = 0, pipeline.pp, count, len(stages)
    # Of two passes beside each other one frees what the other keeps.
    in_flight = pipeline.schedule.in_flight(*size) - bool(pipeline.schedule.pairs(*size))
    each = [block_counts(kinds, [stage]) for stage in stages]
    return [in_flight * min(counts) for counts in zip(*each, strict=True)]
