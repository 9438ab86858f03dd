"""Lower bounds of the step time of all layouts of a space."""

from meshwright.planner.bounds.bounds import StepBounds
from meshwright.planner.bounds.partial import PartialBounds

__all__ = [
    "PartialBounds",
    "StepBounds",
]
