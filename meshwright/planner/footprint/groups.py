"""Layouts by pipeline."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import Pipeline, Space


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
