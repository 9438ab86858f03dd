"""Nodes of branch and bound: partial layouts with some of their choices."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space.choices import OPEN
from meshwright.planner.space.columns import Column, distinct
from meshwright.planner.space.partial import PartialLayouts, PartialSpace
from meshwright.planner.space.rules import Mask
from meshwright.planner.space.shapes import block_shapes
from meshwright.planner.space.space import Space
from meshwright.simulator.blocks import BlockShape

OF_SHAPES = frozenset(OPEN) - {"zero_stage"}
"""Choices on which the shapes of blocks depend."""


class Nodes(NamedTuple):
    """Some rows of a family of partial layouts, with the same choices open."""

    family: PartialLayouts
    rows: Column
    choices: Column

    def columns(self, *names: str) -> list[Column]:
        """Return the numbers of fields of the partial layouts."""
        return [self.family.columns[name][self.rows] for name in names]

    def alike(self, choices: Column, names: Collection[str]) -> list[Column]:
        """Return *choices* grouped by their numbers of some fields."""
        known = [row[choices] for name, row in self.family.choices.items() if name in names]
        first, member = distinct(known)
        return [choices[member == number] for number in range(len(first))]

    def have(self, choices: Column) -> Mask:
        """Return the mask of rows that have a layout with one of some choices."""
        return np.asarray(self.family.offered[self.rows][:, choices].any(axis=(1, 2)))

    def examples(self, space: PartialSpace, rows: Column, choices: Column | None = None) -> Space:
        """Return one layout of each of some rows, with one of some choices if there are any."""
        every = np.arange(self.family.exists.shape[1])
        return self._layouts(space, rows, every if choices is None else choices)

    def sharings(self, space: PartialSpace, rows: Column) -> Iterator[Space]:
        """Yield layouts of some of the rows, in all ways of sharding their states."""
        for choices in self.alike(self.choices, ["zero_stage"]):
            for setting in range(self.family.exists.shape[2]):
                if self.family.exists[self.rows[rows]][:, choices, setting].any():
                    yield self._layouts(space, rows, choices, setting)

    def _layouts(
        self, space: PartialSpace, rows: Column, choices: Column, setting: int | None = None
    ) -> Space:
        """Return the first layout of each of some rows with such choices, else the first of all."""
        family, family_rows = self.family, self.rows[rows]
        exists = family.exists[family_rows]
        wanted = np.zeros_like(exists)
        settings = slice(None) if setting is None else [setting]
        wanted[:, choices, settings] = exists[:, choices, settings]
        has_none = ~wanted.any(axis=(1, 2))
        # Rows without such a layout still need one, so that columns keep their length.
        wanted[has_none] = exists[has_none]
        first = wanted.reshape(len(family_rows), -1).argmax(axis=1)
        cells = family_rows, *np.unravel_index(first, exists.shape[1:])
        return replace(space.space, columns=family.layouts(cells)[0])


class NodeShapes(NamedTuple):
    """Block shapes that layouts of nodes may have.

    Args:
        shapes: Shapes for each set of choices.
        groups: Numbers of the groups of nodes that have each of these shapes.
        group: Number of the group of each node.
    """

    shapes: list[tuple[BlockShape, ...]]
    groups: list[Column]
    group: Column

    @classmethod
    def of(
        cls,
        space: PartialSpace,
        nodes: Nodes,
        alike: list[Column],
        choices: list[Column],
        change: Callable[[BlockShape], BlockShape],
    ) -> Self:
        """Return the shapes of nodes.

        Args:
            space: Space of the nodes.
            nodes: Nodes.
            alike: Columns that are equal in nodes of one group.
            choices: Sets of choices that make different shapes.
            change: Change applied to each shape.
        """
        _, group = distinct(alike)
        shapes, groups = [], []
        for own in choices:
            rows = np.flatnonzero(nodes.have(own))
            # No node of these has a layout with such choices.
            if not len(rows):
                continue
            of_rows, first = np.unique(group[rows], return_index=True)
            examples = nodes.examples(space, rows[first], own)
            shapes.append(tuple(map(change, block_shapes(examples, np.arange(len(first))))))
            groups.append(of_rows)
        return cls(shapes, groups, group)

    @property
    def every(self) -> Iterator[BlockShape]:
        """All shapes."""
        return (shape for each in self.shapes for shape in each)

    @property
    def of_groups(self) -> tuple[BlockShape, ...]:
        """One shape of each group."""
        known: dict[int, BlockShape] = {}
        for groups, shapes in zip(self.groups, self.shapes, strict=True):
            known |= zip(groups.tolist(), shapes, strict=True)
        return tuple(known[number] for number in range(len(known)))

    def least(self, number_of: Callable[[BlockShape], object]) -> NDArray[np.int64]:
        """Return the elementwise minimum over all shapes that each node may have.

        Args:
            number_of: Returns a number, or an array of numbers, of a shape.
        """
        each = [np.array([number_of(shape) for shape in own], np.int64) for own in self.shapes]
        found = np.full((self.group.max() + 1, *each[0].shape[1:]), np.iinfo(np.int64).max)
        for groups, numbers in zip(self.groups, each, strict=True):
            found[groups] = np.minimum(found[groups], numbers)
        return found[self.group]
