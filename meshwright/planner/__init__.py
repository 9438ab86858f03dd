"""The planner: the whole space of layouts, bounded, pruned with reasons and searched with proof."""

from meshwright.planner.result import FrontierPoint, Nearest, SearchResult, SimulatedPlan
from meshwright.planner.rules import RULES
from meshwright.planner.search import search
from meshwright.planner.space import Space, SpaceLimits, enumerate_space

__all__ = [
    "RULES",
    "FrontierPoint",
    "Nearest",
    "SearchResult",
    "SimulatedPlan",
    "Space",
    "SpaceLimits",
    "enumerate_space",
    "search",
]
