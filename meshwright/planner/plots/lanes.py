"""Timeline of a step that is no pipeline: each device, host and link."""

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from meshwright.hwprofiles import PS_PER_S, format_time
from meshwright.planner.plots import canvas
from meshwright.planner.plots.boxes import corners_of
from meshwright.simulator import StepResult
from meshwright.simulator.account import ResourceLane
from meshwright.simulator.engine import TaskKind

# (face, hatch): computation in cool colours, transfers in warm ones.
STYLES: dict[TaskKind, tuple[str, str]] = {
    TaskKind.LAUNCH: (canvas.GREY, ""),
    TaskKind.FORWARD: (canvas.BLUE, ""),
    TaskKind.BACKWARD: (canvas.SKY, ""),
    TaskKind.LOSS: (canvas.INK, ""),
    TaskKind.OPTIMIZER: (canvas.GREEN, ""),
    TaskKind.SUM: ("#8FD3BE", ""),
    TaskKind.SCATTER: (canvas.YELLOW, ""),
    TaskKind.GATHER: (canvas.YELLOW, "////"),
    TaskKind.BROADCAST: (canvas.ORANGE, ""),
    TaskKind.REDUCTION: (canvas.VERMILION, ""),
    TaskKind.PULL: (canvas.ORANGE, ""),
    TaskKind.PUSH: (canvas.VERMILION, ""),
}
MOST_LANES = 40
FEW_LANES = 24
SMALLEST_POINTS = 6.0
SHOWN_ROUNDS = 6
ROW_FRACTION = 0.84


def plot_lanes(step: StepResult) -> Figure:
    """Return one row a lane with its tasks; idle lanes are left out.

    Of asynchronous workers the first rounds are shown, of very many lanes the first ones.
    """
    figure = canvas.new_figure()
    axes = figure.add_subplot()
    busy = [lane for lane in step.lanes if lane.spans]
    lanes = busy[:MOST_LANES]
    last_ps = max(span.end_ps for lane in busy for span in lane.spans)
    end_ps = last_ps
    if step.asynchronous is not None:
        # All rounds of a run would press each to a line.
        end_ps = min(last_ps, SHOWN_ROUNDS * step.step_ps)
    kinds = _draw(axes, lanes, end_ps)
    canvas.style_axes(axes, "", "")
    canvas.label_time(axes.xaxis, "Time ({unit})", end_ps / PS_PER_S)
    axes.set_xlim(0, end_ps / PS_PER_S)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    if len(lanes) > FEW_LANES:
        axes.tick_params(axis="y", labelsize=SMALLEST_POINTS)
    notes = []
    if len(lanes) < len(busy):
        notes.append(f"The first {len(lanes)} of {len(busy)} lanes")
    if step.asynchronous is None:
        headline = canvas.step_headline(step)
    else:
        headline = f"Asynchronous workers: a batch every {format_time(step.step_time_s)}"
        notes.append("The start of the run")
    canvas.write_titles(axes, headline, *canvas.describe_step(step), *notes)
    handles = [
        Patch(facecolor=STYLES[kind][0], hatch=STYLES[kind][1], label=kind.value) for kind in kinds
    ]
    figure.legend(handles=handles, ncols=5, handlelength=1.4, **canvas.BELOW)
    return figure


def _draw(axes: Axes, lanes: list[ResourceLane], end_ps: int) -> list[TaskKind]:
    """Draw each kind as one collection; return those that were drawn."""
    half = ROW_FRACTION / 2
    drawn = []
    for kind, (face, hatch) in STYLES.items():
        corners = [
            corners_of((span.start_ps / PS_PER_S, span.end_ps / PS_PER_S), (row - half, row + half))
            for row, lane in enumerate(lanes)
            for span in lane.spans
            if span.kind is kind and span.start_ps < end_ps
        ]
        if corners:
            shapes = PolyCollection(corners, facecolors=face, hatch=hatch, linewidths=0)
            axes.add_collection(shapes, autolim=False)
            drawn.append(kind)
    return drawn
