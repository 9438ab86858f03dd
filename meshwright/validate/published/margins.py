"""What allocators were printed to hold beyond live tensors; stacks take their fraction from it."""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from meshwright.validate.published.rows import Note, Positive, Row, Text, load_rows

RESERVES_FILE = "published_reserves.csv"


class PublishedReserve(Row):
    """The allocated and the reserved memory of one run, on its fullest rank.

    Args:
        source: Who printed it.
        series: Runs of the source that are alike; one is left out as a whole.
        is_fitted: 1 where the fraction that stacks have is a mean over it.
        allocated_gib: Most memory of live tensors (``max_memory_allocated``).
        reserved_gib: Most memory that the allocator held (``max_memory_reserved``).
        note: What was run.
    """

    source: Text
    series: Text
    is_fitted: bool
    allocated_gib: Positive
    reserved_gib: Positive
    note: Note

    @property
    def fraction(self) -> float:
        """What the allocator held beyond, as a part of what was allocated."""
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


def allocator_fraction(rows: Iterable[PublishedReserve]) -> float:
    """Return the mean of what allocators held beyond, in the rows that are fitted."""
    return fmean(row.fraction for row in rows if row.is_fitted)
