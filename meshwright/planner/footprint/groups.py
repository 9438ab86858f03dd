"""Layouts by pipeline, and the fullest ranks found so far."""

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import Column, Pipeline, Space
from meshwright.simulator.memory import Fragmentation, PeakBytes

MOST_LIVE_BYTES = 2**46
"""More than any device has; parts of more would not fit into 64 bits."""


class PipelineGroup(NamedTuple):
    """Layouts with the same pipeline."""

    indices: NDArray[np.int64]
    pipeline: Pipeline


def pipeline_groups(space: Space, indices: NDArray[np.int64]) -> Iterator[PipelineGroup]:
    """Yield the layouts among *indices* by pipeline, in a fixed order."""
    member = space.pipeline_numbers[indices]
    counts = np.bincount(member, minlength=len(space.pipelines))
    by_group = np.split(indices[np.argsort(member, kind="stable")], np.cumsum(counts)[:-1])
    for number in np.flatnonzero(counts).tolist():
        yield PipelineGroup(by_group[number], space.pipelines[number])


class FullestRanks(NamedTuple):
    """The fullest ranks of a space's layouts seen so far; `most_bytes` is of `peak_bytes`."""

    space: Space
    most_bytes: int
    peaks: PeakBytes[Column]
    fragmentation: Fragmentation

    @classmethod
    def of(cls, space: Space, most_bytes: int) -> Self:
        """Return those of layouts of which no rank was seen yet."""
        peaks = PeakBytes(np.zeros(len(space), np.int64), np.zeros(len(space), np.int64))
        return cls(space, most_bytes, peaks, Fragmentation.of(space.stack))

    def left(self, indices: Column) -> NDArray[np.bool_]:
        """Return which of *indices* are not known to need too much."""
        return np.asarray(self.peaks.live_bytes[indices] <= self.most_bytes)

    def add(self, indices: Column, live: Column, states: Column) -> None:
        """Add a rank of each of *indices*, with so much live, of which so much are states."""
        counted = np.minimum(live, MOST_LIVE_BYTES), np.minimum(states, MOST_LIVE_BYTES)
        found = live, self.fragmentation.reserved_parts(*counted)
        for column, own in zip(self.peaks, found, strict=True):
            column[indices] = np.maximum(column[indices], own)

    def may_grow(self, indices: Column, most: Column, states: Column) -> NDArray[np.bool_]:
        """Return where a rank with at most so much live may be a fullest one of *indices*."""
        live, reserved = (column[indices] for column in self.peaks)
        counted = np.minimum(most, MOST_LIVE_BYTES), np.minimum(states, MOST_LIVE_BYTES)
        parts = self.fragmentation.reserved_parts(*counted)
        return np.asarray(((most > live) | (parts > reserved)) & self.left(indices))
