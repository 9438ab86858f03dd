"""Periodic sequences, stored with one period: actions of long schedules, and their times."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar, overload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Periodic(Sequence[T]):
    """A sequence stored with one of its periods.

    The period, the *size* entries before *end*, is repeated *copies* times behind itself, each time
    shifted by *distance*; the entries that follow are shifted by all copies.

    Args:
        once: Entries with one period.
        end: Index behind the period.
        size: Entries of the period.
        copies: Further repetitions.
        distance: Shift from one period to the next.
        move: Shifts entries by a distance.
        make: Builds all entries for a number of copies, if that is faster, or returns None.

    >>> list(Periodic([0, 10, 12, 50], 3, 2, 2, 5, shifted_times))
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
        """Return the number of entries, those of all copies counted."""
        return len(self.once) + self.size * self.copies

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return one entry, or a list for a slice."""
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        position = range(len(self))[index]  # resolves negative ones, and raises IndexError
        if position < self.end:
            return self.once[position]
        copy = self.copies
        if self.size:
            copy = min((position - self.end) // self.size + 1, self.copies)
        stored = self.once[position - copy * self.size]
        return self.move([stored], copy * self.distance)[0]

    def __iter__(self) -> Iterator[T]:
        """Iterate over all entries."""
        period = self.once[self.end - self.size : self.end]
        copies = (self.move(period, copy * self.distance) for copy in range(1, self.copies + 1))
        rest = self.move(self.once[self.end :], self.copies * self.distance)
        return chain(self.once[: self.end], chain.from_iterable(copies), rest)

    def __eq__(self, other: object) -> bool:
        """Return True if *other* has the same entries."""
        if not isinstance(other, Sequence):
            return NotImplemented
        is_as_long = len(self) == len(other)
        return is_as_long and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as lists have none

    def place(self, index: int) -> int:
        """Return the index in the whole sequence of the stored entry at *index*."""
        return index if index < self.end else index + self.size * self.copies

    def repeated(self, copies: int) -> list[T]:
        """Return a list of the entries with *copies* of the period."""
        made = None if self.make is None else self.make(copies)
        return list(replace(self, copies=copies)) if made is None else made


def shifted_times(times_ps: Sequence[int], distance_ps: int) -> list[int]:
    """Return *times_ps* with *distance_ps* added to each."""
    return [each + distance_ps for each in times_ps]


def total_ps(times_ps: Sequence[int]) -> int:
    """Return the sum of times, in closed form where they are periodic.

    >>> total_ps(Periodic([0, 10, 12, 50], 3, 2, 2, 5, shifted_times))
    156
    """
    if not isinstance(times_ps, Periodic):
        return sum(times_ps)
    copies, end = times_ps.copies, times_ps.end
    period = sum(times_ps.once[end - times_ps.size : end])
    # Copies are shifted by 1, 2, ... distances: an arithmetic series.  The rest is shifted by all.
    distances = times_ps.size * copies * (copies + 1) // 2 + (len(times_ps.once) - end) * copies
    return sum(times_ps.once) + copies * period + distances * times_ps.distance
