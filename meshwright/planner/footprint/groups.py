"""Layouts by pipeline."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import Role, Space, distinct, pipeline_roles
from meshwright.simulator import RUNTIMES, Schedule
from meshwright.simulator.layout import PLAN_FIELDS, Stage, model_stages


class PipelineGroup(NamedTuple):
    """Layouts with the same pipeline: degree, schedule and virtual stages in model order."""

    indices: NDArray[np.int64]
    pp: int
    schedule: Schedule
    stages: tuple[Stage, ...]
    roles: list[Role]


def pipeline_groups(space: Space, indices: NDArray[np.int64]) -> Iterator[PipelineGroup]:
    """Yield the layouts among *indices* by pipeline, in a fixed order."""
    names = ("pp", "num_virtual_stages", "schedule", "stages")
    keys = [space.column(name)[indices] for name in names]
    first, member = distinct(keys)
    schedules = tuple(RUNTIMES[space.stack.pipeline_runtime].values())
    ends = np.cumsum(np.bincount(member, minlength=len(first)))
    by_group = np.split(indices[np.argsort(member, kind="stable")], ends[:-1])
    for (pp, vpp, schedule, code), chosen in zip(
        np.stack(keys, axis=1)[first].tolist(), by_group, strict=bool(len(first))
    ):
        layers = space.layers(pp, vpp, PLAN_FIELDS["stages"].value(code))
        stages = model_stages(space.job.model, layers)
        yield PipelineGroup(chosen, pp, schedules[schedule], stages, pipeline_roles(stages, pp))
