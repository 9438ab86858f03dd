"""Changes of a plan: the cheapest that make it fit, and those one step away."""

from meshwright.planner.changes.change import Change
from meshwright.planner.changes.cheapest import MOST_CHANGES, Trials, cheapest_changes, more_devices
from meshwright.planner.changes.switches import Fields, neighbours, switched

__all__ = [
    "MOST_CHANGES",
    "Change",
    "Fields",
    "Trials",
    "cheapest_changes",
    "more_devices",
    "neighbours",
    "switched",
]
