"""The search: price, prune with reasons, simulate best first, prove."""

from meshwright.planner.search.density import Density
from meshwright.planner.search.finalists import Progress
from meshwright.planner.search.result import (
    FrontierPoint,
    Nearest,
    SearchResult,
    SimulatedPlan,
    Unlaunchable,
)
from meshwright.planner.search.search import search, with_kernels
from meshwright.planner.search.varied import ONLY_ONE, UNEQUAL, Held

__all__ = [
    "ONLY_ONE",
    "UNEQUAL",
    "Density",
    "FrontierPoint",
    "Held",
    "Nearest",
    "Progress",
    "SearchResult",
    "SimulatedPlan",
    "Unlaunchable",
    "search",
    "with_kernels",
]
