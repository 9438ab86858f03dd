"""Changes of a plan: the cheapest that make it fit, and those one step away."""

from meshwright.planner.changes.change import Change
from meshwright.planner.changes.cheapest import Trials, cheapest_changes
from meshwright.planner.changes.switches import Fields, neighbours, switched

__all__ = ["Change", "Fields", "Trials", "cheapest_changes", "neighbours", "switched"]
