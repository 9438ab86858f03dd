"""Pipeline schedules as data: one module each, and this registry."""

from difflib import get_close_matches

from meshwright.simulator.errors import PlanError
from meshwright.simulator.schedules.actions import Action, ActionLists, Phase, Schedule
from meshwright.simulator.schedules.gpipe import GPIPE
from meshwright.simulator.schedules.interleaved import INTERLEAVED
from meshwright.simulator.schedules.lookahead import (
    MOST_GATHERED,
    NO_REFETCHES,
    Refetches,
    count_refetches,
    next_virtual_stages,
    refetched,
)
from meshwright.simulator.schedules.one_f_one_b import ONE_F_ONE_B

__all__ = [
    "MOST_GATHERED",
    "NO_REFETCHES",
    "SCHEDULES",
    "Action",
    "ActionLists",
    "Phase",
    "Refetches",
    "Schedule",
    "count_refetches",
    "get_schedule",
    "next_virtual_stages",
    "refetched",
]


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (GPIPE, ONE_F_ONE_B, INTERLEAVED)
}


def get_schedule(name: str) -> Schedule:
    """Return the schedule called *name*.

    Raises:
        PlanError: If there is none, with the nearest names.
    """
    try:
        return SCHEDULES[name]
    except KeyError:
        near = get_close_matches(name, SCHEDULES, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}" if near else ""
        known = ", ".join(SCHEDULES)
        raise PlanError(f"unknown schedule {name!r}{hint}; known: {known}") from None
