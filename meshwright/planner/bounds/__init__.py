"""Lower bounds of the step time of every layout of a space."""

from meshwright.planner.bounds.bounds import StepBounds

__all__ = [
    "StepBounds",
]
