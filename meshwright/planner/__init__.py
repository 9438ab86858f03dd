"""The planner: the whole space of layouts, bounded, pruned with reasons and searched with proof."""

from typing import TYPE_CHECKING

from meshwright.faces import lazy_name
from meshwright.planner.changes import Change, cheapest_changes
from meshwright.planner.search import FrontierPoint, Nearest, SearchResult, SimulatedPlan, search
from meshwright.planner.space import RULES, Space, SpaceLimits, enumerate_space

if TYPE_CHECKING:
    from meshwright.planner.largest import Largest, Quantity, find_largest, find_largest_of_plan

__all__ = [
    "RULES",
    "Change",
    "FrontierPoint",
    "Largest",
    "Nearest",
    "Quantity",
    "SearchResult",
    "SimulatedPlan",
    "Space",
    "SpaceLimits",
    "cheapest_changes",
    "enumerate_space",
    "find_largest",
    "find_largest_of_plan",
    "search",
]


def __getattr__(name: str) -> object:
    """Return a name of `largest`, imported when first asked for: few searches need it."""
    return lazy_name(__name__, ("largest",), name)
