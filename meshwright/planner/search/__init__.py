"""The search: price, prune with reasons, simulate best first, prove."""

from meshwright.planner.search.finalists import MAX_PASSES
from meshwright.planner.search.result import FrontierPoint, Nearest, SearchResult, SimulatedPlan
from meshwright.planner.search.search import search

__all__ = [
    "MAX_PASSES",
    "FrontierPoint",
    "Nearest",
    "SearchResult",
    "SimulatedPlan",
    "search",
]
