"""Times of blocks as columns: operators of equal sizes are priced once."""

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
from meshwright.simulator.layout import ExpertAxis, GroupSpan, MeshAxis
from meshwright.simulator.model import BlockKind, LayerGroup


class Prices:
    """Times of operators, each computed once for the sizes that decide it."""

    def __init__(self) -> None:
        self._times_ps: dict[tuple[object, ...], dict[tuple[int, ...], int]] = {}
        self._spans: dict[GroupSpan, int] = {}
        self._blocks: dict[BlockKind, dict[BlockShape, list[int]]] = {}

    def block_times(
        self, costs: CostModel, shapes: Sequence[BlockShape], kind: BlockKind
    ) -> NDArray[np.int64]:
        """Return forward and backward picoseconds, with recomputation, of blocks of *shapes*.

        They are those of `CostModel.block_cost`: one row for each shape.
        """
        # Partial layouts and layouts have most shapes in common.
        known = self._blocks.setdefault(kind, {})
        new = [shape for shape in dict.fromkeys(shapes) if shape not in known]
        known.update(zip(new, self._block_times(costs, new, kind).tolist(), strict=True))
        return np.array([known[shape] for shape in shapes], np.int64).reshape(-1, 2)

    def _block_times(
        self, costs: CostModel, shapes: Sequence[BlockShape], kind: BlockKind
    ) -> NDArray[np.int64]:
        if isinstance(kind, LayerGroup):
            each = [self.block_times(costs, shapes, layer) for layer in kind.layers]
            return np.asarray(np.sum(each, axis=0), np.int64)
        times = np.zeros((len(shapes), 2), np.int64)
        for operators, rows, places in costs.blocks.columns(shapes, kind):
            # Of shapes with one row all but what decides how groups lie is the same.
            numbers = np.array(rows, np.int64)
            found = _Rows(numbers, [shapes[place] for place in places], self, costs)
            times[places] = found.times(operators)
        return times

    def known(self, operator: Operator, shape: BlockShape) -> dict[tuple[int, ...], int]:
        """Return the known picoseconds of operators that differ from *operator* in sizes alone.

        Blocks of other structure have many operators in common.
        """
        key: tuple[object, ...] = type(operator), _structure(operator), shape.precision
        # All-to-alls of tokens depend on routing, too, not on their size alone.
        if isinstance(operator, Collective) and operator.axis is ExpertAxis.EP:
            key = *key, shape.dispatcher, shape.trained.experts
        return self._times_ps.setdefault(key, {})

    def span_numbers(
        self, costs: CostModel, axis: MeshAxis, shapes: Sequence[BlockShape]
    ) -> Column:
        """Return the number of the group span of an axis for each of *shapes*."""
        spans, of = self._spans, costs.spans.of_block
        each = [spans.setdefault(of(axis, shape), len(spans)) for shape in shapes]
        return np.array(each, np.int64)


class _Rows(NamedTuple):
    """Rows of a block's columns to price, with the shape of each."""

    numbers: Column
    shapes: list[BlockShape]
    prices: Prices
    costs: CostModel

    def times(self, operators: BlockOperators) -> NDArray[np.int64]:
        """Return the forward and backward picoseconds of each row."""
        spans: dict[MeshAxis, Column] = {}
        forward, backward, again = (self._phase(phase, spans) for phase in operators)
        return np.stack([forward, backward + again], axis=1)

    def _phase(self, operators: tuple[Operator, ...], spans: dict[MeshAxis, Column]) -> Column:
        """Return the picoseconds of *operators* in sequence, or of the host if it is slower."""
        total = np.zeros(len(self.numbers), np.int64)
        for operator in operators:
            total += self._operator(operator, spans)
        # The host launches ahead of the device: the slower of both decides.
        return np.maximum(total, self._issue([each for each in operators if _is_host(each)]))

    def _operator(self, operator: Operator, spans: dict[MeshAxis, Column]) -> Column:
        """Return the picoseconds of an operator in each row."""
        columns = [column[self.numbers] for column in _columns(operator)]
        if isinstance(operator, Collective | RingMessages):
            if operator.axis not in spans:
                spans[operator.axis] = self.prices.span_numbers(
                    self.costs, operator.axis, self.shapes
                )
            columns.append(spans[operator.axis])
        columns = columns or [np.zeros(len(self.numbers), np.int64)]
        first, member = distinct(columns)
        sizes = np.stack(columns)[:, first].T.tolist()
        times_by_size, times_ps = self.prices.known(operator, self.shapes[0]), []
        for row, size in zip(first.tolist(), map(tuple, sizes), strict=True):
            if size not in times_by_size:
                one = _in_row(operator, int(self.numbers[row]))
                _, cost = self.costs.operator_cost(one, self.shapes[row])
                times_by_size[size] = cost.time_ps
            times_ps.append(times_by_size[size])
        return np.array(times_ps, np.int64)[member]

    def _issue(self, passes: Sequence[Operator]) -> Column:
        """Return the picoseconds in which the host launches a phase with such *passes*."""
        zeros = np.zeros(len(self.numbers), np.int64)
        columns = [column[self.numbers] for each in passes for column in _columns(each)]
        first, member = distinct(columns or [zeros])
        rows, costs = self.numbers[first].tolist(), self.costs
        times_ps = [
            issue_ps([_in_row(each, row) for each in passes], costs.stack, costs.cluster)
            for row in rows
        ]
        return np.array(times_ps, np.int64)[member]


def _is_host(operator: Operator) -> bool:
    return isinstance(operator, HostPasses)


def _structure(operator: tuple[object, ...]) -> tuple[object, ...]:
    """Return *operator* without its columns, nor those of operators that overlap with it."""
    return tuple(
        None
        if isinstance(each, np.ndarray)
        else (type(each), _structure(each))
        if isinstance(each, tuple)
        else each
        for each in operator
    )


def _columns(operator: tuple[object, ...]) -> Iterator[Column]:
    """Yield the columns among the sizes of *operator*, and of operators that overlap with it."""
    for each in operator:
        if isinstance(each, np.ndarray):
            yield each
        elif isinstance(each, tuple):
            yield from _columns(each)


def _in_row(operator: Operator, row: int) -> Operator:
    """Return *operator* with the sizes of one row."""
    return cast("Operator", _sizes(operator, row))


def _sizes(operator: tuple[object, ...], row: int) -> tuple[object, ...]:
    """Return the fields of *operator* with the sizes of one row."""
    found = (
        int(each[row])
        if isinstance(each, np.ndarray)
        else _sizes(each, row)
        if isinstance(each, tuple)
        else each
        for each in operator
    )
    return cast("tuple[object, ...]", cast("Any", type(operator))._make(found))
