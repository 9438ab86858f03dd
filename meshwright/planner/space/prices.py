"""Times of blocks in columns: each operator of a walk is priced once for sizes that are alike."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space.columns import Column, distinct
from meshwright.simulator import CostModel
from meshwright.simulator.blocks import (
    BlockOperators,
    BlockShape,
    Collective,
    HostPasses,
    Operator,
    RingMessages,
)
from meshwright.simulator.costs import issue_ps
from meshwright.simulator.layout import MeshAxis
from meshwright.simulator.model import BlockKind, LayerGroup


def block_times(
    shapes: Sequence[BlockShape], kind: BlockKind, costs: CostModel
) -> NDArray[np.int64]:
    """Return picoseconds forward and backward, with what runs again, of blocks of *shapes*.

    They are those of `CostModel.block_cost`: one row a shape.
    """
    if isinstance(kind, LayerGroup):
        each = [block_times(shapes, layer, costs) for layer in kind.layers]
        return np.asarray(np.sum(each, axis=0), np.int64)
    times = np.zeros((len(shapes), 2), np.int64)
    for operators, rows, places in costs.blocks.columns(shapes, kind):
        # Of shapes with one row all but what decides how groups lie is the same.
        found = _Rows(np.array(rows, np.int64), [shapes[place] for place in places], costs)
        times[places] = found.times(operators)
    return times


class _Rows(NamedTuple):
    """Rows of a walk's columns that are asked for, the shape of each, and how work is priced."""

    numbers: Column
    shapes: list[BlockShape]
    costs: CostModel

    def times(self, operators: BlockOperators) -> NDArray[np.int64]:
        """Return the picoseconds forward and backward of each row."""
        spans: dict[MeshAxis, Column] = {}
        forward, backward, again = (self._phase(phase, spans) for phase in operators)
        return np.stack([forward, backward + again], axis=1)

    def _phase(self, operators: tuple[Operator, ...], spans: dict[MeshAxis, Column]) -> Column:
        """Return the picoseconds of *operators* one after the other, or of the host's."""
        total = np.zeros(len(self.numbers), np.int64)
        for operator in operators:
            total += self._operator(operator, spans)
        return np.maximum(total, self._issue([each for each in operators if _is_host(each)]))

    def _operator(self, operator: Operator, spans: dict[MeshAxis, Column]) -> Column:
        """Return the picoseconds of an operator in each row."""
        columns = [column[self.numbers] for column in _columns(operator)]
        if isinstance(operator, Collective | RingMessages):
            if operator.axis not in spans:
                spans[operator.axis] = self._spans(operator.axis)
            columns.append(spans[operator.axis])
        first, member = distinct(columns or [np.zeros(len(self.numbers), np.int64)])
        costs, shapes = self.costs, self.shapes
        rows = zip(first.tolist(), self.numbers[first].tolist(), strict=True)
        known = [costs.operator_cost(_in_row(operator, n), shapes[i])[1].time_ps for i, n in rows]
        return np.array(known, np.int64)[member]

    def _spans(self, axis: MeshAxis) -> Column:
        """Return the number of the span that groups of an axis have, in each row."""
        each = [self.costs.spans.of_block(axis, shape) for shape in self.shapes]
        numbers = {span: number for number, span in enumerate(dict.fromkeys(each))}
        return np.array([numbers[span] for span in each], np.int64)

    def _issue(self, passes: Sequence[Operator]) -> Column:
        """Return the picoseconds in which the host starts a phase with such *passes*."""
        nothing = np.zeros(len(self.numbers), np.int64)
        columns = [column[self.numbers] for each in passes for column in _columns(each)]
        first, member = distinct(columns or [nothing])
        rows = self.numbers[first].tolist()
        known = [
            issue_ps([_in_row(each, row) for each in passes], self.costs.stack, self.costs.cluster)
            for row in rows
        ]
        return np.array(known, np.int64)[member]


def _is_host(operator: Operator) -> bool:
    return isinstance(operator, HostPasses)


def _columns(operator: tuple[object, ...]) -> Iterator[Column]:
    """Yield the columns among the sizes of *operator*, and of what runs beside it."""
    for each in operator:
        if isinstance(each, np.ndarray):
            yield each
        elif isinstance(each, tuple):
            yield from _columns(each)


def _in_row(operator: Operator, row: int) -> Operator:
    """Return *operator* with the sizes that its columns have in a row."""
    return cast("Operator", _sizes(operator, row))


def _sizes(operator: tuple[object, ...], row: int) -> tuple[object, ...]:
    found = (
        int(each[row])
        if isinstance(each, np.ndarray)
        else _sizes(each, row)
        if isinstance(each, tuple)
        else each
        for each in operator
    )
    return cast("tuple[object, ...]", cast("Any", type(operator))._make(found))
