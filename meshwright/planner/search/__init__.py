"""Search: price, prune with reasons, simulate best first, prove."""

from meshwright.planner.search.finalists import Progress
from meshwright.planner.search.result import (
    Density,
    FrontierPoint,
    Nearest,
    SearchResult,
    SimulatedPlan,
    Unlaunchable,
)
from meshwright.planner.search.search import search, with_kernels
from meshwright.planner.search.varied import ONLY_ONE, UNEQUAL, Held
from meshwright.planner.search.verdict import Cause, RuleCount, Verdict, Way

__all__ = [
    "ONLY_ONE",
    "UNEQUAL",
    "Cause",
    "Density",
    "FrontierPoint",
    "Held",
    "Nearest",
    "Progress",
    "RuleCount",
    "SearchResult",
    "SimulatedPlan",
    "Unlaunchable",
    "Verdict",
    "Way",
    "search",
    "with_kernels",
]
