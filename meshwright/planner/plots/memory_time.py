"""Step time against memory of every simulated layout, and the frontier between them."""

from collections.abc import Sequence
from math import hypot
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from meshwright.hwprofiles import GIBI, PS_PER_S, Recompute
from meshwright.planner.plots import canvas
from meshwright.planner.search import FrontierPoint, SearchResult, SimulatedPlan

COLOURS: dict[Recompute, str] = {
    Recompute.NONE: canvas.GREEN,
    Recompute.SELECTIVE: canvas.PURPLE,
    Recompute.SELECTIVE_OP: canvas.SKY,
    Recompute.FULL: canvas.BLUE,
}
# Beyond this ratio of largest to smallest a linear axis would press most layouts together.
LOG_RATIO = 8.0
TICKS = (1.0, 2.0, 3.0, 5.0, 7.0)
# Where the note on the best plan may stand, as fractions of the axes;
# the emptiest wins, then the nearest.
NOTE_PLACES = ((0.62, 0.86), (0.03, 0.86), (0.62, 0.55), (0.32, 0.86), (0.03, 0.06), (0.62, 0.06))
NOTE_SIZE = (0.28, 0.12)
Point = tuple[float, float]
Line = Literal["-", "--", ""]


def plot_memory_time(result: SearchResult) -> Figure:
    """Return step time against device memory for every layout that the search simulated.

    Colour says what is recomputed, a cross that a layout does not fit.  The line is the
    frontier: the least time for the memory; its points are filled where no layout of the
    whole space can beat them, hollow where only the simulated ones do not.
    """
    figure = canvas.new_figure()
    axes = figure.add_subplot()
    canvas.style_axes(axes, "Memory of the fullest device (GiB)", "Time of one training step (s)")
    canvas.write_titles(
        axes,
        "Step time against memory of the simulated layouts",
        canvas.describe_job(result.job, result.cluster, result.stack, result.num_gpus),
        _proof(result),
    )
    axes.grid(color=canvas.LIGHT_GREY, linewidth=0.6)
    points = [_point(each) for each in result.evaluated]
    _draw_layouts(axes, result.evaluated)
    _draw_frontier(axes, result.frontier)
    _draw_limits(axes, result)
    _scale(axes, points)
    if result.plans:
        _note_best(axes, result, points)
    figure.legend(
        handles=_legend(result),
        loc="outside lower center",
        ncols=4,
        fontsize=canvas.TEXT_POINTS,
        frameon=False,
    )
    return figure


def _point(each: SimulatedPlan | FrontierPoint) -> Point:
    return each.device_bytes / GIBI, each.step_ps / PS_PER_S


def _proof(result: SearchResult) -> str:
    """Return in words how much of the space the picture shows and what is proven."""
    counts = f"{result.simulated:,} simulated of {result.space_size:,} layouts"
    if not result.plans:
        return f"{counts}; none fits"
    if result.optimal:
        return f"{counts}; the fastest is proven best"
    return f"{counts}; nothing can be more than {result.bound_gap_fraction:.1%} faster"


def _draw_layouts(axes: Axes, evaluated: Sequence[SimulatedPlan]) -> None:
    for recompute, colour in COLOURS.items():
        for fits, marker, size in ((True, "o", 20), (False, "x", 18)):
            shown = [
                _point(each)
                for each in evaluated
                if each.plan.recompute is recompute and each.fits is fits
            ]
            if shown:
                x_gib, y_s = zip(*shown, strict=True)
                axes.scatter(
                    x_gib,
                    y_s,
                    s=size,
                    c=colour,
                    marker=marker,
                    alpha=0.65,
                    linewidths=0 if fits else 0.9,
                )


def _draw_frontier(axes: Axes, frontier: Sequence[FrontierPoint]) -> None:
    if not frontier:
        return
    x_gib, y_s = zip(*(_point(each) for each in frontier), strict=True)
    axes.step(x_gib, y_s, where="post", color=canvas.INK, linewidth=1.3, zorder=3)
    for proven, face in ((True, canvas.INK), (False, canvas.WHITE)):
        shown = [_point(each) for each in frontier if each.proven is proven]
        if shown:
            x_gib, y_s = zip(*shown, strict=True)
            axes.scatter(
                x_gib,
                y_s,
                s=34,
                c=face,
                edgecolors=canvas.INK,
                linewidths=1.3,
                zorder=4,
            )


def _limits(result: SearchResult) -> list[tuple[str, int, Line]]:
    """Return what a device has and, where a plan fitted, what of it may be used."""
    capacity_bytes = result.cluster.device.memory_capacity_bytes
    limits: list[tuple[str, int, Line]] = [("capacity", capacity_bytes, "-")]
    if result.plans and result.plans[0].memory.usable_bytes != capacity_bytes:
        limits.insert(0, ("usable", result.plans[0].memory.usable_bytes, "--"))
    return limits


def _draw_limits(axes: Axes, result: SearchResult) -> None:
    for _, size_bytes, style in _limits(result):
        axes.axvline(
            size_bytes / GIBI, color=canvas.VERMILION, linewidth=1.3, linestyle=style, zorder=1
        )


def _scale(axes: Axes, points: Sequence[Point]) -> None:
    """Give an axis a logarithmic scale where its values need one, with plain numbers."""
    for axis, set_scale, values in (
        (axes.xaxis, axes.set_xscale, [x for x, _ in points]),
        (axes.yaxis, axes.set_yscale, [y for _, y in points]),
    ):
        if points and max(values) > LOG_RATIO * min(values):
            set_scale("log")
            axis.set_major_locator(LogLocator(subs=TICKS))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    axes.margins(0.05, 0.15)
    axes.autoscale_view()  # now, since the note on the best plan is placed by it


def _note_best(axes: Axes, result: SearchResult, points: Sequence[Point]) -> None:
    """Name the fastest plan that fits, where the fewest layouts are hidden."""
    best = result.plans[0]
    at = (best.memory.device_bytes / GIBI, best.step_time_s)
    to_fraction = axes.transData + axes.transAxes.inverted()
    taken = [tuple(to_fraction.transform(point)) for point in points]
    width, height = NOTE_SIZE

    best_x, best_y = to_fraction.transform(at)

    def drawback(place: Point) -> tuple[int, float]:
        x, y = place
        hidden = sum(
            x - 0.02 <= px <= x + width + 0.02 and y - 0.04 <= py <= y + height + 0.04
            for px, py in taken
        )
        return hidden, hypot(x + width / 2 - best_x, y + height / 2 - best_y)

    axes.annotate(
        f"best: {canvas.describe_plan(best.plan)}\n{best.step_time_s:.4g} s, {at[0]:.1f} GiB, "
        f"MFU {best.mfu_fraction:.1%}",
        at,
        xytext=min(NOTE_PLACES, key=drawback),
        textcoords="axes fraction",
        fontsize=canvas.TEXT_POINTS,
        color=canvas.INK,
        va="bottom",
        bbox={"boxstyle": "round,pad=0.35", "facecolor": canvas.WHITE, "edgecolor": canvas.GREY},
        arrowprops={"arrowstyle": "-|>", "color": canvas.INK, "shrinkB": 4},
        zorder=5,
    )


def _legend(result: SearchResult) -> list[Line2D]:
    """Return an entry for each kind of mark that the picture has."""
    present = {each.plan.recompute for each in result.evaluated}
    entries = [
        _mark(f"recompute {recompute}", colour, "o", colour)
        for recompute, colour in COLOURS.items()
        if recompute in present
    ]
    if any(not each.fits for each in result.evaluated):
        entries.append(_mark("does not fit", canvas.DARK_GREY, "x", canvas.DARK_GREY))
    for proven, name, face in (
        (True, "frontier, proven", canvas.INK),
        (False, "frontier of the simulated", canvas.WHITE),
    ):
        if any(each.proven is proven for each in result.frontier):
            entries.append(_mark(name, canvas.INK, "o", face, line="-"))
    for name, size_bytes, style in _limits(result):
        label = f"{name} {size_bytes / GIBI:.4g} GiB"
        entries.append(Line2D([], [], color=canvas.VERMILION, linestyle=style, label=label))
    return entries


def _mark(label: str, colour: str, marker: str, face: str, line: Line = "") -> Line2D:
    return Line2D(
        [], [], color=colour, marker=marker, markerfacecolor=face, linestyle=line, label=label
    )
