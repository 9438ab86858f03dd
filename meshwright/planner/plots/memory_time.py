"""Step time against memory: the whole feasible space, what was simulated, the frontier."""

from collections.abc import Sequence
from itertools import pairwise
from math import hypot
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from meshwright.hwprofiles import GIBI, PS_PER_S, Recompute, counted, format_time
from meshwright.planner.plots import canvas
from meshwright.planner.search import Density, FrontierPoint, SearchResult, SimulatedPlan

# (colour, marker): told apart without colours, too.
MARKS: dict[Recompute, tuple[str, str]] = {
    Recompute.NONE: (canvas.GREEN, "o"),
    Recompute.SELECTIVE: (canvas.PURPLE, "s"),
    Recompute.SELECTIVE_OP: (canvas.ORANGE, "^"),
    Recompute.FULL: (canvas.BLUE, "D"),
}
SHADES = LinearSegmentedColormap.from_list("shades", ["#ECECEC", "#8A8A8A"])
# Beyond this ratio of largest to smallest a linear axis would press most layouts together.
LOG_RATIO = 8.0
TICKS = (1.0, 2.0, 3.0, 5.0, 7.0)
# A limit beyond this ratio to the fullest layout is named, not drawn.
FAR_RATIO = 1.6
# Where the note on the best plan may stand, as fractions of the axes;
# the emptiest wins, then the nearest.
NOTE_PLACES = ((0.62, 0.86), (0.03, 0.86), (0.62, 0.55), (0.32, 0.86), (0.03, 0.06), (0.62, 0.06))
# Below a space that fills the axes there is room on this share of their height.
NOTE_ROOM = 0.2
NOTE_PLACES_BELOW = ((0.03, 0.03), (0.34, 0.03), (0.5, 0.03), (0.62, 0.03))
NOTE_SIZE = (0.28, 0.12)
Point = tuple[float, float]
Line = Literal["-", "--", ""]


def _counted(result: SearchResult) -> str:
    """Return the number of layouts in the picture as text."""
    counts = counted(result.feasible, "layout")
    return counts if result.is_counted else f"{counts}, the fastest for their memory,"


def plot_memory_time(result: SearchResult) -> Figure:
    """Return step time against device memory of the layouts of a search.

    Grey is the whole feasible space by the lower bound of its time; what was simulated stands at
    its time.  Colour and shape say what is recomputed, a cross that a layout does not fit.  The
    line is the frontier: the least time for the memory; its points are filled where no layout of
    the whole space can beat them, hollow where only the simulated ones do not.
    """
    figure = canvas.new_figure()
    axes = figure.add_subplot()
    canvas.style_axes(axes, "Memory of the fullest device (GiB)", "")
    canvas.write_titles(
        axes,
        f"Step time against memory of {_counted(result)} that fit"
        if result.plans
        else "Step time against memory of the simulated layouts",
        canvas.describe_job(result.job, result.cluster, result.stack, result.num_gpus),
        _proof(result),
    )
    axes.grid(color=canvas.LIGHT_GREY, linewidth=0.6)
    points = [_point(each) for each in result.evaluated]
    cells = []
    if result.density is not None:
        _draw_density(figure, axes, result.density)
        cells = _filled_cells(result.density)
    _draw_layouts(axes, result.evaluated)
    _draw_frontier(axes, result.frontier)
    _draw_limits(axes, result, max(x for x, _ in [*points, *cells]))
    _scale(axes, points + cells, NOTE_ROOM if cells else 0.0)
    if result.plans:
        _note_best(axes, result, points + cells)
    figure.legend(handles=_legend(result), ncols=4, **canvas.BELOW)
    return figure


def _point(each: SimulatedPlan | FrontierPoint) -> Point:
    return each.device_bytes / GIBI, each.step_ps / PS_PER_S


def _filled_cells(density: Density) -> list[Point]:
    """Return the middle of each cell in which a layout is."""
    x_gib, y_s = (
        [(low + high) / 2 / unit for low, high in pairwise(edges)]
        for edges, unit in (
            (density.memory_edges_bytes, GIBI),
            (density.time_edges_ps, PS_PER_S),
        )
    )
    return [
        (x, y)
        for y, row in zip(y_s, density.counts, strict=True)
        for x, count in zip(x_gib, row, strict=True)
        if count
    ]


def _proof(result: SearchResult) -> str:
    """Return the proof in words: how much of the space is shown, and whether it is optimal."""
    counts = f"{result.simulated:,} simulated of {counted(result.space_size, 'layout')}"
    if result.density is not None and result.density.num_slower:
        slowest_s = result.density.time_edges_ps[-1] / PS_PER_S
        counts += f", {result.density.num_slower:,} beyond {slowest_s:.3g} s not shown"
    if not result.plans:
        return f"{counts}; none fits"
    if result.optimal:
        return f"{counts}; the fastest is proven best"
    return f"{counts}; nothing can be more than {result.bound_gap_fraction:.1%} faster"


def _draw_density(figure: Figure, axes: Axes, density: Density) -> None:
    """Shade each cell by its layouts, and say what the shades mean."""
    # Empty cells stay white instead of the palest shade.
    counts = np.ma.masked_equal(density.counts, 0)
    shades = axes.pcolormesh(
        [each / GIBI for each in density.memory_edges_bytes],
        [each / PS_PER_S for each in density.time_edges_ps],
        counts,
        cmap=SHADES,
        norm=LogNorm(1, max(2, counts.max())),
        linewidth=0,
        rasterized=True,
        zorder=0.5,
    )
    bar = figure.colorbar(shades, ax=axes, pad=0.015, aspect=32, fraction=0.06)
    bar.set_label(
        "feasible layouts in a cell; its time is their lower bound",
        fontsize=canvas.SMALL_POINTS,
        color=canvas.INK,
    )
    bar.ax.tick_params(labelsize=canvas.SMALL_POINTS)
    bar.ax.minorticks_off()
    bar.set_ticks(_shade_ticks(int(counts.max())))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    bar.outline.set_visible(False)


def _shade_ticks(most: int) -> list[int]:
    """Return powers of ten up to *most*, and *most* where it stands clear of the last."""
    ticks = [10**power for power in range(len(str(most)))]
    return [*ticks, most] if most >= 2 * ticks[-1] else ticks


def _draw_layouts(axes: Axes, evaluated: Sequence[SimulatedPlan]) -> None:
    for recompute, (colour, marker) in MARKS.items():
        for fits in (True, False):
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
                    s=14 if fits else 18,
                    c=colour,
                    marker=marker if fits else "x",
                    linewidths=0 if fits else 0.9,
                    zorder=2,
                )


def _draw_frontier(axes: Axes, frontier: Sequence[FrontierPoint]) -> None:
    """Draw the frontier; what its layouts recompute is told by colour and shape."""
    if not frontier:
        return
    x_gib, y_s = zip(*(_point(each) for each in frontier), strict=True)
    axes.step(x_gib, y_s, where="post", color=canvas.INK, linewidth=1.3, zorder=3)
    for proven in (True, False):
        for recompute, (colour, marker) in MARKS.items():
            shown = [
                _point(each)
                for each in frontier
                if each.proven is proven and each.plan.recompute is recompute
            ]
            if shown:
                x_gib, y_s = zip(*shown, strict=True)
                axes.scatter(
                    x_gib,
                    y_s,
                    s=42,
                    c=colour if proven else canvas.WHITE,
                    marker=marker,
                    edgecolors=canvas.INK if proven else colour,
                    linewidths=1.1 if proven else 1.6,
                    zorder=4,
                )


def _limits(result: SearchResult) -> list[tuple[str, int, Line]]:
    """Return the capacity of a device and, where a plan fits, its usable memory."""
    capacity_bytes = result.cluster.device.memory_capacity_bytes
    limits: list[tuple[str, int, Line]] = [("capacity", capacity_bytes, "-")]
    if result.plans and result.plans[0].memory.usable_bytes != capacity_bytes:
        limits.insert(0, ("usable", result.plans[0].memory.usable_bytes, "--"))
    return limits


def _draw_limits(axes: Axes, result: SearchResult, most_gib: float) -> None:
    """Draw the limits but those so far to the right that all layouts would be pressed together."""
    for _, size_bytes, style in _limits(result):
        if size_bytes / GIBI < FAR_RATIO * most_gib:
            axes.axvline(
                size_bytes / GIBI, color=canvas.VERMILION, linewidth=1.3, linestyle=style, zorder=1
            )


def _scale(axes: Axes, points: Sequence[Point], room_below: float) -> None:
    """Give an axis a logarithmic scale where its values need one, with plain numbers."""
    for axis, set_scale, values in (
        (axes.xaxis, axes.set_xscale, [x for x, _ in points]),
        (axes.yaxis, axes.set_yscale, [y for _, y in points]),
    ):
        if points and max(values) > LOG_RATIO * min(values):
            set_scale("log")
            axis.set_major_locator(LogLocator(subs=TICKS))
            axis.set_minor_formatter(NullFormatter())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    canvas.label_time(axes.yaxis, "Time of one training step ({unit})", max(y for _, y in points))
    # The edges of the density are sticky: without this they would take the margins away.
    axes.use_sticky_edges = False
    axes.margins(0.05, 0.05 if room_below else 0.15)
    axes.autoscale_view()  # now, since the note on the best plan is placed by it
    if room_below:
        to_data = (axes.transData + axes.transAxes.inverted()).inverted()
        axes.set_ylim(bottom=to_data.transform((0, -room_below))[1])


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
        f"best: {canvas.describe_plan(best.plan)}\n{format_time(at[1])}, {at[0]:.1f} GiB, "
        f"MFU {best.mfu_fraction:.1%}",
        at,
        xytext=min(NOTE_PLACES if result.density is None else NOTE_PLACES_BELOW, key=drawback),
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
        _mark(f"recompute {recompute}", colour, marker, colour)
        for recompute, (colour, marker) in MARKS.items()
        if recompute in present
    ]
    if any(not each.fits for each in result.evaluated):
        entries.append(_mark("does not fit", canvas.DARK_GREY, "x", canvas.DARK_GREY))
    for proven, name, face in (
        (True, "frontier, proven", canvas.GREY),
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
