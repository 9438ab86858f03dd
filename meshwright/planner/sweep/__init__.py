"""A sweep: the best layout of every combination of options and facts, kept cell by cell."""

from meshwright.planner.sweep.command import run_sweep
from meshwright.planner.sweep.result import SweepResult
from meshwright.planner.sweep.run import sweep
from meshwright.planner.sweep.workers import script_runs_once

__all__ = ["SweepResult", "run_sweep", "script_runs_once", "sweep"]
