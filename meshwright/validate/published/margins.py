"""Memory that allocators reserved beyond live tensors, as printed; stacks' fractions fit it."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from meshwright.validate.published.rows import (
    Note,
    OptionalPositive,
    Positive,
    Row,
    Text,
    load_rows,
)

RESERVES_FILE = "published_reserves.csv"


class PublishedReserve(Row):
    """The allocated and the reserved memory of one run, on its fullest rank.

    Args:
        source: Publication that printed it.
        series: Runs of the source that are alike; one is left out as a whole.
        is_fitted: Whether the fractions that stacks have are fitted on it.
        allocated_gib: Most memory of live tensors (``max_memory_allocated``).
        reserved_gib: Most memory that the allocator held (``max_memory_reserved``).
        state_gib: Part of it that lives from step to step, as computed, if its run is known.
        note: Description of the run.
    """

    source: Text
    series: Text
    is_fitted: bool
    allocated_gib: Positive
    reserved_gib: Positive
    state_gib: OptionalPositive
    note: Note

    @property
    def fraction(self) -> float:
        """Reserved over allocated memory, less 1."""
        return self.reserved_gib / self.allocated_gib - 1


def load_published_reserves(path: Path | None = None) -> tuple[PublishedReserve, ...]:
    """Return the runs that print allocated and reserved memory.

    Args:
        path: A table with the same columns, by default the built-in one.

    Raises:
        ProfileError: Naming file, line, column and value of the first mistake.

    >>> round(load_published_reserves()[0].fraction, 3)
    0.065
    """
    return load_rows(PublishedReserve, path, RESERVES_FILE)


class AllocatorFractions(NamedTuple):
    """Fractions that allocators reserve beyond tensors: of transient ones, and of states."""

    passing: float
    state: float


def allocator_fractions(rows: Iterable[PublishedReserve]) -> AllocatorFractions:
    """Return the least-squares fractions of the rows that are fitted.

    What is squared is a part of what a row had allocated, so that each counts alike: with a share
    ``s`` of states, ``passing * (1 - s) + state * s``.
    """
    points = [
        (1 - row.state_gib / row.allocated_gib, row.state_gib / row.allocated_gib, row.fraction)
        for row in rows
        if row.is_fitted and row.state_gib
    ]
    passing = sum(first * first for first, _, _ in points)
    state = sum(second * second for _, second, _ in points)
    both = sum(first * second for first, second, _ in points)
    of_passing = sum(first * reserve for first, _, reserve in points)
    of_state = sum(second * reserve for _, second, reserve in points)
    # Normal equations of two unknowns, by Cramer's rule.
    determinant = passing * state - both**2
    return AllocatorFractions(
        (of_passing * state - of_state * both) / determinant,
        (of_state * passing - of_passing * both) / determinant,
    )
