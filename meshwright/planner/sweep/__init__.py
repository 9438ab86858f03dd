"""A sweep: the best layout of every combination of options and facts, kept cell by cell."""

from meshwright.planner.sweep.command import run_sweep
from meshwright.planner.sweep.result import SweepResult
from meshwright.planner.sweep.run import sweep

__all__ = ["SweepResult", "run_sweep", "sweep"]
