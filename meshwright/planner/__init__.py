"""The planner: the whole space of layouts, bounded, pruned with reasons and searched with proof."""

from meshwright.planner.changes import Change, cheapest_changes
from meshwright.planner.search import FrontierPoint, Nearest, SearchResult, SimulatedPlan, search
from meshwright.planner.space import RULES, Space, SpaceLimits, enumerate_space

__all__ = [
    "RULES",
    "Change",
    "FrontierPoint",
    "Nearest",
    "SearchResult",
    "SimulatedPlan",
    "Space",
    "SpaceLimits",
    "cheapest_changes",
    "enumerate_space",
    "search",
]
