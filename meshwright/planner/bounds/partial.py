"""Lower bounds of the step time of partial layouts, over all choices that they leave open.

A microbatch goes through the blocks ahead of a rank, which then has all its own passes to do. Each
kind of block counts with the least time of all its choices: recomputation only adds, so that it is
priced only where nothing else is offered.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Recompute
from meshwright.planner.bounds.bounds import LONGEST_PS, with_overhead
from meshwright.planner.space import (
    OF_SHAPES,
    Column,
    Nodes,
    NodeShapes,
    PartialSpace,
    Prices,
    distinct,
)
from meshwright.simulator import CostModel
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import PLAN_FIELDS
from meshwright.simulator.step import overhead_per_million

# Where one of these is asked for, blocks differ from the default.
OTHER_BLOCKS = ("cp_type", "cp_inner", "dispatcher", "gradient_precision")
NO_RECOMPUTE = PLAN_FIELDS["recompute"].code(Recompute.NONE)
DEGREES = ("tp", "cp", "ep", "etp", "microbatch_size")
PIPELINE = ("pp", "num_virtual_stages", "schedule", "stages")


class PartialBounds:
    """Lower bounds of the step time of partial layouts of a space."""

    def __init__(self, space: PartialSpace, costs: CostModel) -> None:
        self._space = space
        self._costs = costs

    def of(self, parts: Sequence[Nodes]) -> list[Column]:
        """Return lower bounds, in picoseconds, of the layouts of each of some nodes.

        Args:
            parts: Nodes, family by family.
        """
        shapes = [
            NodeShapes.of(self._space, each, each.columns(*DEGREES), _fastest(each), _deferred)
            for each in parts
        ]
        every = [*dict.fromkeys(shape for each in shapes for shape in each.every)]
        kinds, prices = self._space.space.kinds, self._costs.kept(Prices)
        self._costs.blocks.prepare(every, kinds)
        known = [prices.block_times(self._costs, every, kind).sum(axis=1) for kind in kinds]
        times = dict(zip(every, np.stack(known, axis=1), strict=True))
        pairs = zip(parts, shapes, strict=True)
        return [self._of(nodes, each.least(times.__getitem__)) for nodes, each in pairs]

    def _of(self, nodes: Nodes, times: NDArray[np.int64]) -> Column:
        """Return the bounds of *nodes* from the *times* of their blocks: ``[nodes, kinds]``."""
        family, rows = nodes.family, nodes.rows
        longest = np.zeros(len(rows), np.int64)
        # Bounds of default blocks would not hold for these: zero holds for all.
        if any(map(family.limits.asks_for, OTHER_BLOCKS)):
            return longest
        first, pipeline = distinct(nodes.columns(*PIPELINE))
        examples = nodes.examples(self._space, first)
        number = examples.pipeline_numbers[pipeline]
        count = family.num_microbatches[rows]
        for role in range(max(len(each.roles) for each in examples.pipelines)):
            blocks_of_roles = [each.ways for each in examples.pipelines]
            passes, ahead = (
                np.einsum(
                    "nk,nk->n",
                    times,
                    np.array(
                        [each[way][min(role, len(each[way]) - 1)] for each in blocks_of_roles]
                    )[number],
                )
                for way in (0, 1)
            )
            # Fewer microbatches take less time: so many do not overflow.
            most = np.minimum(count, LONGEST_PS // np.maximum(passes, 1))
            longest = np.maximum(longest, most * passes + ahead)
        return with_overhead(longest, overhead_per_million(self._costs.stack))


def _deferred(shape: BlockShape) -> BlockShape:
    """Return *shape* with tensor-parallel sums deferred to the step's end, not in its blocks."""
    return replace(shape, defers_norm_all_reduce=True)


def _fastest(nodes: Nodes) -> list[Column]:
    """Return the choices with the fastest blocks: without recomputation, if it is offered."""
    modes, choices = nodes.family.choices["recompute"], nodes.choices
    plain = choices[modes[choices] == NO_RECOMPUTE]
    is_open = len(plain) and nodes.have(plain).all()
    return nodes.alike(plain if is_open else choices, OF_SHAPES)
