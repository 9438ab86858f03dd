"""Nodes of branch and bound: partial layouts of which some choices are left."""

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
    """Some rows of a family of partial layouts, of which the same choices are left."""

    family: PartialLayouts
    rows: Column
    choices: Column

    def columns(self, *names: str) -> list[Column]:
        """Return the numbers of fields of partial layouts."""
        return [self.family.columns[name][self.rows] for name in names]

    def alike(self, choices: Column, names: Collection[str]) -> list[Column]:
        """Return *choices* by their numbers of some fields: those with the same together."""
        known = [row[choices] for name, row in self.family.choices.items() if name in names]
        first, member = distinct(known)
        return [choices[member == number] for number in range(len(first))]

    def have(self, choices: Column) -> Mask:
        """Return which rows have a layout with one of some choices."""
        return np.asarray(self.family.offered[self.rows][:, choices].any(axis=(1, 2)))

    def examples(self, space: PartialSpace, rows: Column, choices: Column | None = None) -> Space:
        """Return a layout of some of the rows each, with one of some choices if there are any."""
        every = np.arange(self.family.exists.shape[1])
        return self._layouts(space, rows, every if choices is None else choices)

    def sharings(self, space: PartialSpace, rows: Column) -> Iterator[Space]:
        """Yield layouts of some of the rows, in every way in which they may share states."""
        for choices in self.alike(self.choices, ["zero_stage"]):
            for setting in range(self.family.exists.shape[2]):
                if self.family.exists[self.rows[rows]][:, choices, setting].any():
                    yield self._layouts(space, rows, choices, setting)

    def _layouts(
        self, space: PartialSpace, rows: Column, choices: Column, setting: int | None = None
    ) -> Space:
        """Return the first layout of some of the rows each that is of a kind, else the first."""
        family, own = self.family, self.rows[rows]
        exists = family.exists[own]
        wanted = np.zeros_like(exists)
        settings = slice(None) if setting is None else [setting]
        wanted[:, choices, settings] = exists[:, choices, settings]
        lacks = ~wanted.any(axis=(1, 2))
        wanted[lacks] = exists[lacks]
        first = wanted.reshape(len(own), -1).argmax(axis=1)
        cells = own, *np.unravel_index(first, exists.shape[1:])
        return replace(space.space, columns=family.layouts(cells)[0])


class NodeShapes(NamedTuple):
    """Block shapes that layouts of nodes may have.

    Args:
        shapes: Those with each of some choices.
        groups: Which groups of nodes alike have each of these.
        group: The number of the group of each node.
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
            space: Of the nodes.
            nodes: Which.
            alike: Numbers that are equal in nodes of one group.
            choices: Those that make other shapes.
            change: What is changed of each shape.
        """
        _, group = distinct(alike)
        shapes, groups = [], []
        for own in choices:
            rows = np.flatnonzero(nodes.have(own))
            if not len(rows):
                continue
            of_rows, first = np.unique(group[rows], return_index=True)
            examples = nodes.examples(space, rows[first], own)
            shapes.append(tuple(map(change, block_shapes(examples, np.arange(len(first))))))
            groups.append(of_rows)
        return cls(shapes, groups, group)

    @property
    def every(self) -> Iterator[BlockShape]:
        """All of them."""
        return (shape for each in self.shapes for shape in each)

    @property
    def of_groups(self) -> tuple[BlockShape, ...]:
        """One of each group."""
        known: dict[int, BlockShape] = {}
        for groups, shapes in zip(self.groups, self.shapes, strict=True):
            known |= zip(groups.tolist(), shapes, strict=True)
        return tuple(known[number] for number in range(len(known)))

    def least(self, number_of: Callable[[BlockShape], object]) -> NDArray[np.int64]:
        """Return the least numbers of any shape that each node may have.

        Args:
            number_of: Returns a number, or an array of them, of a shape.
        """
        each = [np.array([number_of(shape) for shape in own], np.int64) for own in self.shapes]
        found = np.full((self.group.max() + 1, *each[0].shape[1:]), np.iinfo(np.int64).max)
        for groups, numbers in zip(self.groups, each, strict=True):
            found[groups] = np.minimum(found[groups], numbers)
        return found[self.group]
