"""Lower bounds of the memory of partial layouts, over all choices that they leave open.

A rank has its states, sharded as far as any choice shards them, and the activations of the passes
in flight there, each as small as any choice makes it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Recompute
from meshwright.planner.footprint.least import PassColumns, StateColumns, least_of_columns
from meshwright.planner.space import (
    OF_SHAPES,
    Column,
    Nodes,
    NodeShapes,
    PartialSpace,
    ShapeTable,
)
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.layout import PLAN_FIELDS

SEQUENCES = 1, 2, 4
FULL = PLAN_FIELDS["recompute"].code(Recompute.FULL)


class PartialMemory:
    """Lower bounds of the live bytes of the fullest rank of partial layouts."""

    def __init__(self, space: PartialSpace, blocks: BlockTable) -> None:
        self._space = space
        self._blocks = blocks

    def of(self, parts: Sequence[Nodes], most_bytes: int) -> list[Column]:
        """Return a lower bound of the live bytes of all layouts of each node.

        Args:
            parts: Nodes, family by family.
            most_bytes: Limit beyond which a bound is not raised further.
        """
        shapes = [
            NodeShapes.of(self._space, each, _saving_columns(each), _leanest(each), _of_one)
            for each in parts
        ]
        ones = dict.fromkeys(shape for each in shapes for shape in each.every)
        sized = [replace(shape, microbatch_size=size) for shape in ones for size in SEQUENCES]
        self._blocks.prepare(sized, self._space.space.kinds)
        pairs = zip(parts, shapes, strict=True)
        return [self._least_bytes(*each, most_bytes) for each in pairs]

    def _least_bytes(self, nodes: Nodes, shapes: NodeShapes, most_bytes: int) -> Column:
        """Return the bounds of *nodes* with such block shapes."""
        all_rows = np.arange(len(nodes.rows))
        example = nodes.examples(self._space, all_rows)
        saved = self._saved_bytes(shapes, nodes)
        passes = PassColumns.with_bytes(example, saved, all_rows, all_rows)
        table = ShapeTable(shapes.of_groups, shapes.group, example.kinds)

        def states_of(rows: Column) -> list[StateColumns]:
            own, spaces = replace(table, index=table.index[rows]), nodes.sharings(self._space, rows)
            return [StateColumns.of(each, own, np.arange(len(rows))) for each in spaces]

        return least_of_columns(passes, states_of, most_bytes=most_bytes)

    def _saved_bytes(self, shapes: NodeShapes, nodes: Nodes) -> NDArray[np.int64]:
        """Return the least activations of a pass for a block of each kind: ``[nodes, kinds]``."""
        one, two, more = np.moveaxis(shapes.least(self._saved_of), 1, 0)
        size = nodes.family.columns["microbatch_size"][nodes.rows, None]
        # Beyond one sequence activations grow linearly with their number.
        return np.asarray(np.where(size == 1, one, two + (more - two) // 2 * (size - 2)), np.int64)

    def _saved_of(self, shape: BlockShape) -> list[list[int]]:
        """Return the activations of one, two and four sequences for a block of each kind."""
        sized = [replace(shape, microbatch_size=size) for size in SEQUENCES]
        kinds = self._space.space.kinds
        return [[self._blocks.memory(each, kind).saved for kind in kinds] for each in sized]


def _saving_columns(nodes: Nodes) -> list[Column]:
    """Return the columns that are equal in nodes whose passes save equally much."""
    flags = [each > 1 for each in nodes.columns("pp", "dp")]
    return [*nodes.columns("tp", "cp", "ep", "etp"), *(flag.astype(np.int64) for flag in flags)]


def _of_one(shape: BlockShape) -> BlockShape:
    """Return *shape* for one sequence."""
    return replace(shape, microbatch_size=1)


def _leanest(nodes: Nodes) -> list[Column]:
    """Return the choices among which passes save least: full recomputation, where it is offered.

    With it the attention kernel does not matter.
    """
    modes, choices = nodes.family.choices["recompute"], nodes.choices
    full = choices[modes[choices] == FULL]
    if len(full) and nodes.have(full).all():
        return nodes.alike(full, ["sequence_parallel"])
    return nodes.alike(choices, OF_SHAPES)
