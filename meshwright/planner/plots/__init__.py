"""Pictures of results as PNG; importing this package, and only this one, imports matplotlib."""

from meshwright.planner.plots import canvas
from meshwright.planner.plots.breakdown import plot_breakdown
from meshwright.planner.plots.canvas import save_figure
from meshwright.planner.plots.memory_time import plot_memory_time
from meshwright.planner.plots.stage_memory import plot_stage_memory
from meshwright.planner.plots.timeline import plot_timeline

__all__ = [
    "canvas",
    "plot_breakdown",
    "plot_memory_time",
    "plot_stage_memory",
    "plot_timeline",
    "save_figure",
]
