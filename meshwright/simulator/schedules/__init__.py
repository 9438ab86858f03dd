"""Pipeline schedules as data: one module each, and this registry."""

from difflib import get_close_matches
from functools import cache

from meshwright.hwprofiles import PipelineRuntime
from meshwright.simulator.errors import PlanError
from meshwright.simulator.schedules.actions import Action, Phase, Schedule
from meshwright.simulator.schedules.gpipe import GPIPE
from meshwright.simulator.schedules.interleaved import any_core_group, core_group, interleaved
from meshwright.simulator.schedules.lookahead import (
    MOST_GATHERED,
    NO_REFETCHES,
    Refetches,
    count_refetches,
    next_virtual_stages,
    refetched,
)
from meshwright.simulator.schedules.one_f_one_b import ONE_F_ONE_B, PYTORCH_ONE_F_ONE_B

__all__ = [
    "MOST_GATHERED",
    "NO_REFETCHES",
    "RUNTIMES",
    "SCHEDULES",
    "Action",
    "Phase",
    "Refetches",
    "Schedule",
    "any_core_group",
    "core_group",
    "count_refetches",
    "get_schedule",
    "next_virtual_stages",
    "refetched",
]


_ONE_F_ONE_B = {PipelineRuntime.PYTORCH: PYTORCH_ONE_F_ONE_B}
RUNTIMES: dict[PipelineRuntime, dict[str, Schedule]] = {
    runtime: {
        schedule.name: schedule
        for schedule in (GPIPE, _ONE_F_ONE_B.get(runtime, ONE_F_ONE_B), interleaved(runtime))
    }
    for runtime in PipelineRuntime
}
SCHEDULES = RUNTIMES[PipelineRuntime.PUBLISHED]


_interleaved_in_groups = cache(interleaved)


def get_schedule(
    name: str,
    runtime: PipelineRuntime = PipelineRuntime.PUBLISHED,
    group_size: int | None = None,
) -> Schedule:
    """Return the schedule called *name* as *runtime* runs it.

    Args:
        name: Of the registry.
        runtime: Whose.
        group_size: Microbatches that an interleaved one takes through a virtual stage in a row;
            None is as many as the runtime does.

    Raises:
        PlanError: If there is none, with the nearest names.
    """
    try:
        schedule = RUNTIMES[runtime][name]
    except KeyError:
        near = get_close_matches(name, SCHEDULES, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}" if near else ""
        known = ", ".join(SCHEDULES)
        raise PlanError(f"unknown schedule {name!r}{hint}; known: {known}") from None
    if group_size is None or not schedule.interleaves:
        return schedule
    return _interleaved_in_groups(runtime, group_size)
