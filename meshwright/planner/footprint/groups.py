"""Layouts grouped by pipeline, and the largest peaks found so far."""

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


class LargestPeaks(NamedTuple):
    """Largest peaks of a space's layouts so far; `most_bytes` is that of `peak_bytes`."""

    space: Space
    most_bytes: int
    peaks: PeakBytes[Column]
    fragmentation: Fragmentation

    @classmethod
    def of(cls, space: Space, most_bytes: int) -> Self:
        """Return the peaks of layouts of which no rank was sized yet."""
        peaks = PeakBytes(np.zeros(len(space), np.int64), np.zeros(len(space), np.int64))
        return cls(space, most_bytes, peaks, Fragmentation.of(space.stack))

    def left(self, indices: Column) -> NDArray[np.bool_]:
        """Return the mask of *indices* that are not known to need too much."""
        return np.asarray(self.peaks.live_bytes[indices] <= self.most_bytes)

    def add(self, indices: Column, live: Column, states: Column) -> None:
        """Add a rank of each of *indices*, with its live bytes, and its states among them."""
        # Reserved bytes are counted in parts, which would overflow for larger numbers.
        clipped = np.minimum(live, MOST_LIVE_BYTES), np.minimum(states, MOST_LIVE_BYTES)
        rank_peaks = live, self.fragmentation.reserved_parts(*clipped)
        for column, values in zip(self.peaks, rank_peaks, strict=True):
            column[indices] = np.maximum(column[indices], values)

    def may_grow(self, indices: Column, most: Column, states: Column) -> NDArray[np.bool_]:
        """Return the mask of *indices* whose peak a rank with this upper bound may raise."""
        live, reserved = (column[indices] for column in self.peaks)
        clipped = np.minimum(most, MOST_LIVE_BYTES), np.minimum(states, MOST_LIVE_BYTES)
        parts = self.fragmentation.reserved_parts(*clipped)
        return np.asarray(((most > live) | (parts > reserved)) & self.left(indices))
