"""The planner: the whole space of layouts, bounded, pruned with reasons and searched with proof."""

from planner.result import FrontierPoint, Nearest, SearchResult, SimulatedPlan
from planner.rules import RULES
from planner.search import search
from planner.space import Space, SpaceLimits, enumerate_space

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
