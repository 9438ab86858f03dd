"""Nodes of branch and bound: partial layouts of which some choices are left."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np

from meshwright.planner.space.choices import OPEN
from meshwright.planner.space.columns import Column, distinct
from meshwright.planner.space.partial import PartialLayouts, PartialSpace
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

    def differing(self, choices: Column, names: Collection[str]) -> Column:
        """Return the first of *choices* with each combination of numbers of some fields."""
        known = [row[choices] for name, row in self.family.choices.items() if name in names]
        return choices[distinct(known)[0]]

    def examples(self, space: PartialSpace, rows: Column) -> Space:
        """Return a layout of some of the rows each."""
        return self._layouts(space, rows, np.arange(self.family.exists.shape[1]))

    def shaped(self, space: PartialSpace, rows: Column, choice: int) -> Space:
        """Return a layout of some of the rows each, whose shapes are those of a choice."""
        names = [name for name in self.family.choices if name in OF_SHAPES]
        known = [self.family.choices[name] for name in names]
        alike = np.all([row == row[choice] for row in known], axis=0)
        return self._layouts(space, rows, np.flatnonzero(alike))

    def sharings(self, space: PartialSpace, rows: Column) -> Iterator[Space]:
        """Yield layouts of some of the rows, in every way in which they may share states."""
        for choice in self.differing(self.choices, ["zero_stage"]).tolist():
            for setting in range(self.family.exists.shape[2]):
                if self.family.exists[self.rows[rows], choice, setting].any():
                    yield self._layouts(space, rows, np.array([choice]), setting)

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
        by_choice: Those with each of some choices, of each group of nodes alike.
        group: The number of the group of each node.
    """

    by_choice: list[tuple[BlockShape, ...]]
    group: Column

    @classmethod
    def of(
        cls,
        space: PartialSpace,
        nodes: Nodes,
        alike: list[Column],
        choices: Column,
        change: Callable[[BlockShape], BlockShape],
    ) -> Self:
        """Return the shapes of nodes.

        Args:
            space: Of the nodes.
            nodes: Which.
            alike: Numbers that are equal in nodes of one group.
            choices: Those that may be made.
            change: What is changed of each shape.
        """
        first, group = distinct(alike)
        every = np.arange(len(first))
        by_choice = []
        for choice in choices.tolist():
            examples = nodes.shaped(space, first, choice)
            by_choice.append(tuple(map(change, block_shapes(examples, every))))
        return cls(by_choice, group)

    @property
    def every(self) -> Iterator[BlockShape]:
        """All of them."""
        return (shape for each in self.by_choice for shape in each)
