"""The planner: the whole space of layouts, bounded, pruned with reasons and searched with proof."""

from meshwright.planner.changes import Change, cheapest_changes
from meshwright.planner.largest import Largest, Quantity, find_largest, find_largest_of_plan
from meshwright.planner.search import FrontierPoint, Nearest, SearchResult, SimulatedPlan, search
from meshwright.planner.space import RULES, Space, SpaceLimits, enumerate_space

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
