"""When a plan does not fit: the cheapest changes that make it fit."""

from meshwright.planner.changes.change import Change
from meshwright.planner.changes.cheapest import cheapest_changes

__all__ = ["Change", "cheapest_changes"]
