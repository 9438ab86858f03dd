"""What passes of two microbatches beside each other hide at most of each other's exchanges."""

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import Column, ShapeTable
from meshwright.simulator import CostModel
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import exchange_times
from meshwright.simulator.model import ENDS


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
