"""Sequences of which a part comes again and again: passes of long schedules, and their times."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar, overload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Periodic(Sequence[T]):
    """A sequence with a period of which one is kept.

    The period, the *size* entries before *end*, comes *copies* times more behind itself, each time
    moved by *distance* from the one before; so are the entries that follow, by all of them.

    Args:
        once: The entries, with the period once.
        end: Where the period ends in them.
        size: Entries of the period.
        copies: How often it comes again.
        distance: By how much it moves.
        move: Moves entries by a distance.
        make: Makes all entries for a number of copies, if that is faster; None where it cannot.

    >>> list(Periodic([0, 10, 12, 50], 3, 2, 2, 5, moved_times))
    [0, 10, 12, 15, 17, 20, 22, 60]
    """

    once: Sequence[T]
    end: int
    size: int
    copies: int
    distance: int
    move: Callable[[Sequence[T], int], list[T]] = field(repr=False)
    make: Callable[[int], list[T] | None] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        """Return how many entries there are, each copy counted."""
        return len(self.once) + self.size * self.copies

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return an entry, or some of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        place = range(len(self))[index]
        if place < self.end:
            return self.once[place]
        copy = min((place - self.end) // self.size + 1, self.copies) if self.size else self.copies
        kept = self.once[place - copy * self.size]
        return self.move([kept], copy * self.distance)[0]

    def __iter__(self) -> Iterator[T]:
        """Return all entries, one after the other."""
        period = self.once[self.end - self.size : self.end]
        copies = (self.move(period, copy * self.distance) for copy in range(1, self.copies + 1))
        rest = self.move(self.once[self.end :], self.copies * self.distance)
        return chain(self.once[: self.end], chain.from_iterable(copies), rest)

    def __eq__(self, other: object) -> bool:
        """Whether *other* has the same entries."""
        if not isinstance(other, Sequence):
            return NotImplemented
        is_as_long = len(self) == len(other)
        return is_as_long and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as lists have none

    def place(self, index: int) -> int:
        """Return the place of what stands at *index* of the entries that are kept."""
        return index if index < self.end else index + self.size * self.copies

    def repeated(self, copies: int) -> list[T]:
        """Return the entries with so many copies of the period."""
        made = None if self.make is None else self.make(copies)
        return list(replace(self, copies=copies)) if made is None else made


def moved_times(times_ps: Sequence[int], distance_ps: int) -> list[int]:
    """Return *times_ps* so much later."""
    return [each + distance_ps for each in times_ps]


def total_ps(times_ps: Sequence[int]) -> int:
    """Return the sum of times, in closed form where they are periodic.

    >>> total_ps(Periodic([0, 10, 12, 50], 3, 2, 2, 5, moved_times))
    156
    """
    if not isinstance(times_ps, Periodic):
        return sum(times_ps)
    copies, end = times_ps.copies, times_ps.end
    period = sum(times_ps.once[end - times_ps.size : end])
    # The copies are 1, 2 ... times the distance later, what follows as often as there are copies.
    distances = times_ps.size * copies * (copies + 1) // 2 + (len(times_ps.once) - end) * copies
    return sum(times_ps.once) + copies * period + distances * times_ps.distance
