"""Pipeline schedules as data: one module each, and this registry."""

from difflib import get_close_matches
from functools import cache

from meshwright.hwprofiles import PipelineRuntime
from meshwright.simulator.errors import PlanError
from meshwright.simulator.schedules.actions import Action, Phase, Schedule, shifted_actions
from meshwright.simulator.schedules.gpipe import GPIPE
from meshwright.simulator.schedules.interleaved import (
    any_core_group,
    core_group,
    first_passes,
    group_passes,
    interleaved,
)
from meshwright.simulator.schedules.lookahead import (
    MAX_ACTIVE_STAGES,
    NO_REFETCHES,
    Refetches,
    count_refetches,
    next_virtual_stages,
    refetched,
)
from meshwright.simulator.schedules.one_f_one_b import (
    ONE_F_ONE_B,
    OVERLAPPED_ONE_F_ONE_B,
    PYTORCH_ONE_F_ONE_B,
)
from meshwright.simulator.schedules.periodic import Periodic, shifted_times, total_ps

__all__ = [
    "MAX_ACTIVE_STAGES",
    "NO_REFETCHES",
    "RUNTIMES",
    "SCHEDULES",
    "Action",
    "Periodic",
    "Phase",
    "Refetches",
    "Schedule",
    "any_core_group",
    "core_group",
    "count_refetches",
    "first_passes",
    "get_schedule",
    "group_passes",
    "next_virtual_stages",
    "refetched",
    "shifted_actions",
    "shifted_times",
    "total_ps",
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


# A schedule holds functions, so that one made anew would equal no other in caches.
_interleaved = cache(interleaved)


def get_schedule(
    name: str,
    runtime: PipelineRuntime = PipelineRuntime.PUBLISHED,
    group_size: int | None = None,
    *,
    beside: bool = False,
) -> Schedule:
    """Return the schedule called *name* as *runtime* runs it.

    Args:
        name: Registry key.
        runtime: Runtime of the pipeline.
        group_size: Microbatches in a row through a virtual stage, of an interleaved schedule; None
            is the runtime's default.
        beside: Whether forward passes overlap with backward passes of other microbatches.

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
    if schedule.interleaves and (beside or group_size is not None):
        return _interleaved(runtime, group_size, beside=beside)
    return OVERLAPPED_ONE_F_ONE_B if beside and schedule.name == ONE_F_ONE_B.name else schedule
