"""Pipeline timeline of a step: the passes, waits and collectives of each pipeline rank."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from meshwright.hwprofiles import PS_PER_S
from meshwright.planner.plots import canvas
from meshwright.planner.plots.boxes import (
    COLLECTIVE_COLOURS,
    GATHER,
    OTHER_COLOURS,
    REDUCTION,
    Box,
    ColouredBoxes,
    Window,
    column_shares,
    corners_of,
    timeline_layers,
)
from meshwright.planner.plots.lanes import plot_lanes
from meshwright.simulator import StepResult
from meshwright.simulator.engine import check_passes

NUMBER_POINTS = 6.5
NUMBER_PIXELS = NUMBER_POINTS * canvas.DOTS_PER_INCH / canvas.POINTS_PER_INCH
DIGIT_PIXELS = 0.68 * NUMBER_PIXELS
# Rows at least so high have room for a label each.
LABEL_PIXELS = 1.2 * canvas.TEXT_POINTS * canvas.DOTS_PER_INCH / canvas.POINTS_PER_INCH
# Passes narrower than this cannot be told apart: the two ends are then shown enlarged.
NARROW_PIXELS = 5.0
# Smaller ones are drawn as an image: a shape always fills the pixels that it touches.
SHAPE_PIXELS = 7.0
IMAGE_COLUMNS = 1100
IMAGE_ROWS, FINE_IMAGE_ROWS = 8, 25
FEW_RANKS = 16
ENLARGED_PASSES = 24
# Of one row, so many collectives are told apart; of more, so many are shown enlarged.
FEW_COLLECTIVES, ENLARGED_COLLECTIVES = 60, 12


class Band(NamedTuple):
    """Part of a rank's row that a lane fills, from top to bottom; the row is 1 high around 0.

    >>> f"{Band(-0.44, 0.14).centre:.2f}"
    '-0.15'
    """

    top: float
    bottom: float

    @property
    def centre(self) -> float:
        """Its middle."""
        return (self.top + self.bottom) / 2


WHOLE_ROW = Band(-0.44, 0.44)
COMPUTATION, COLLECTIVES = Band(-0.44, 0.14), Band(0.2, 0.44)


class Sheet(NamedTuple):
    """Boxes, rows and unit of time that all panels of a timeline share."""

    layers: tuple[ColouredBoxes, ...]
    pp: int
    step_time_s: float

    @classmethod
    def of(cls, step: StepResult) -> "Sheet":
        """Return the sheet of *step*; collectives stand on it where rows have room for them."""
        layers = timeline_layers(step)
        names = {layer.name for layer in layers}
        # Thin rows have no room for a second lane.
        if step.plan.pp > FEW_RANKS or names.isdisjoint((GATHER, REDUCTION)):
            layers = tuple(layer for layer in layers if not layer.is_collective)
        return cls(layers, step.plan.pp, step.step_time_s)

    @property
    def bands(self) -> dict[Band, tuple[ColouredBoxes, ...]]:
        """Layers of each lane of a row."""
        collectives = tuple(layer for layer in self.layers if layer.is_collective)
        if not collectives:
            return {WHOLE_ROW: self.layers}
        computed = tuple(layer for layer in self.layers if not layer.is_collective)
        return {COMPUTATION: computed, COLLECTIVES: collectives}

    @property
    def num_collectives(self) -> int:
        """Collectives of the first rank."""
        return sum(
            box.rank == 0 for layer in self.layers if layer.is_collective for box in layer.boxes
        )


def plot_timeline(step: StepResult) -> Figure:
    """Return one row a pipeline rank: above its passes, waits and update, below its collectives.

    White is idle.  Where passes or collectives are too narrow to be seen, the start and the end of
    the step are shown enlarged below the whole.  A step that is no pipeline has a row a lane.

    Raises:
        TooManyTasksError: If there are too many passes to draw each.
    """
    if step.lanes:
        return plot_lanes(step)
    check_passes(step.plan.num_stages, step.num_microbatches, to="draw")
    figure, sheet = canvas.new_figure(), Sheet.of(step)
    windows = {"whole": Window(0.0, step.step_time_s)}
    if _is_crowded(step, sheet):
        panels = figure.subplot_mosaic([["whole", "whole"], ["A", "B"]])
        windows |= _ends(step, sheet)
    else:
        panels = {"whole": figure.add_subplot()}
    for name, window in windows.items():
        _draw_panel(panels[name], sheet, window)
        if name != "whole":
            _mark_window(panels["whole"], name, window, step.plan.pp)
            text = "start" if window.start_s == 0 else "end"
            title = f"{name}: the {text}, enlarged"
            panels[name].set_title(title, loc="left", fontsize=canvas.TEXT_POINTS)
    canvas.write_titles(panels["whole"], canvas.step_headline(step), *canvas.describe_step(step))
    _add_legend(figure, sheet.layers)
    figure.draw_without_rendering()  # places the axes, so that pixels are known
    for name, window in windows.items():
        _number_boxes(panels[name], sheet, window)
    return figure


def _is_crowded(step: StepResult, sheet: Sheet) -> bool:
    """Return True if passes, or the collectives of the only row, cannot be told apart."""
    num_passes = 2 * step.num_microbatches * step.plan.num_virtual_stages
    is_narrow = canvas.WIDTH_INCHES * canvas.DOTS_PER_INCH / num_passes < NARROW_PIXELS
    return is_narrow or (sheet.pp == 1 and sheet.num_collectives > FEW_COLLECTIVES)


def _ends(step: StepResult, sheet: Sheet) -> dict[str, Window]:
    """Return the windows around the filling and the draining of the pipeline."""
    assert step.times is not None  # a pipeline has them
    ranks = step.times.ranks
    fill_ps = max(rank.starts_ps[0] for rank in ranks)
    drain_ps = step.step_ps - min(rank.ends_ps[-1] for rank in ranks)
    share = ENLARGED_PASSES / len(ranks[0].ends_ps)
    if sheet.pp == 1 and sheet.num_collectives > FEW_COLLECTIVES:
        share = min(share, ENLARGED_COLLECTIVES / sheet.num_collectives)
    least_ps = share * (ranks[0].ends_ps[-1] - ranks[0].starts_ps[0])
    # Together the two ends do not cover the step.
    most_ps = 0.45 * step.step_ps
    start_s, end_s = (
        min(most_ps, max(least_ps, 1.5 * each_ps)) / PS_PER_S for each_ps in (fill_ps, drain_ps)
    )
    return {
        "A": Window(0.0, start_s),
        "B": Window(step.step_time_s - end_s, step.step_time_s),
    }


def _draw_panel(axes: Axes, sheet: Sheet, window: Window) -> None:
    """Draw the layers within *window*: as shapes, or as an image where they are tiny."""
    pp = sheet.pp
    has_strips = len(sheet.bands) > 1
    rows = "Pipeline rank" + ",\ncollectives below" * has_strips  # panels may be low
    canvas.style_axes(axes, "", rows if pp > 1 else "")
    canvas.label_time(axes.xaxis, "Time ({unit})", sheet.step_time_s)
    row_pixels = axes.get_window_extent().height / pp
    tiny = {}
    for band, layers in sheet.bands.items():
        if min(row_pixels, _mean_pixels(axes, layers, window)) >= SHAPE_PIXELS:
            _draw_shapes(axes, layers, window, band)
        else:
            tiny[band] = layers
    if tiny:
        _draw_image(axes, tiny, window, pp)
    axes.set_xlim(window)
    axes.set_ylim(pp - 0.45, -0.55)
    if pp == 1:  # all ranks do the same
        names = ["computation", "collectives"]
        axes.set_yticks([band.centre for band in sheet.bands], names[: len(sheet.bands)])
        return
    axes.yaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
    if pp <= FEW_RANKS and row_pixels >= LABEL_PIXELS:
        axes.set_yticks(range(pp))


def _draw_shapes(axes: Axes, layers: tuple[ColouredBoxes, ...], window: Window, band: Band) -> None:
    """Draw each box, one collection a colour."""
    for layer in layers:
        corners = [
            corners_of((start, end), (rank + band.top, rank + band.bottom))
            for rank, start, end, _ in layer.boxes
            if start < window.end_s and end > window.start_s
        ]
        if corners:
            # A white edge parts boxes, and would hide those that are not much wider.
            is_wide = _mean_pixels(axes, (layer,), window) >= SHAPE_PIXELS
            shapes = PolyCollection(
                corners,
                facecolors=layer.colour,
                edgecolors=canvas.WHITE,
                linewidths=0.5 if is_wide else 0.0,
            )
            shapes.set_label(layer.name)
            shapes.set_snap(False)  # snapped to pixels, touching boxes would seem to idle
            axes.add_collection(shapes, autolim=False)


def _draw_image(
    axes: Axes, bands: dict[Band, tuple[ColouredBoxes, ...]], window: Window, pp: int
) -> None:
    """Draw pixels whose colour mixes what happens in their time, by its share of it."""
    rows = FINE_IMAGE_ROWS if pp <= FEW_RANKS else IMAGE_ROWS
    image = np.ones((pp, rows, IMAGE_COLUMNS, 3))
    for band, layers in bands.items():
        # Many ranks stand without a gap between them.
        filled = slice(*(round((edge + 0.5) * rows) for edge in band))
        if pp > FEW_RANKS:
            filled = slice(0, rows)
        for layer in layers:
            shares = column_shares(layer.boxes, window, pp, IMAGE_COLUMNS)
            # From white each layer takes its share of what its colour lacks.
            darker = shares[:, :, np.newaxis] * (1.0 - np.asarray(to_rgb(layer.colour)))
            image[:, filled] -= darker[:, np.newaxis]
    axes.imshow(
        np.clip(image, 0.0, 1.0).reshape(pp * rows, IMAGE_COLUMNS, 3),
        extent=(window.start_s, window.end_s, pp - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        zorder=0,
    )


def _mean_pixels(axes: Axes, layers: tuple[ColouredBoxes, ...], window: Window) -> float:
    """Return the mean width of a box on the scale of *window*."""
    widths_s = [box.end_s - box.start_s for each in layers for box in each.boxes]
    mean_s = sum(widths_s) / len(widths_s)
    return axes.get_window_extent().width * mean_s / (window.end_s - window.start_s)


def _mark_window(axes: Axes, name: str, window: Window, pp: int) -> None:
    """Frame the part of the whole step that a panel below enlarges."""
    width = window.end_s - window.start_s
    frame = Rectangle(
        (window.start_s, -0.5), width, pp, fill=False, edgecolor=canvas.INK, linewidth=1.2
    )
    frame.set_clip_on(False)
    axes.add_patch(frame)
    axes.annotate(
        name,
        (window.start_s + width / 2, (pp - 1) / 2),
        ha="center",
        va="center",
        fontsize=canvas.SMALL_POINTS,
        fontweight="bold",
        bbox={"boxstyle": "circle,pad=0.2", "facecolor": canvas.WHITE, "edgecolor": canvas.INK},
    )


def _number_boxes(axes: Axes, sheet: Sheet, window: Window) -> None:
    """Write microbatch numbers into the boxes that have room for them."""
    extent = axes.get_window_extent()
    pixels_per_s = extent.width / (window.end_s - window.start_s)
    low, high = sorted(axes.get_ylim())
    band = next(iter(sheet.bands))
    if (band.bottom - band.top) * extent.height / (high - low) < 1.2 * NUMBER_PIXELS:
        return
    for layer in sheet.layers:
        colour = canvas.ink_on(layer.colour)
        for box in layer.boxes:
            needed_s = (len(str(box.number)) + 0.4) * DIGIT_PIXELS / pixels_per_s
            inside = window.start_s <= box.start_s and box.end_s <= window.end_s
            if box.number >= 0 and inside and box.end_s - box.start_s >= needed_s:
                _write_number(axes, box, band.centre, colour)


def _write_number(axes: Axes, box: Box, centre: float, colour: str) -> None:
    axes.text(
        (box.start_s + box.end_s) / 2,
        box.rank + centre,
        str(box.number),
        ha="center",
        va="center_baseline",
        fontsize=NUMBER_POINTS,
        color=colour,
    ).set_in_layout(False)


def _add_legend(figure: Figure, layers: tuple[ColouredBoxes, ...]) -> None:
    """Explain the colours; of many virtual stages the first and the last."""
    named = OTHER_COLOURS | COLLECTIVE_COLOURS
    passes = [layer for layer in layers if layer.name not in named]
    half = len(passes) // 2
    ends = [layer for side in (passes[:half], passes[half:]) for layer in (side[0], side[-1])]
    others = [layer for layer in layers if layer.name in named]
    shown = dict.fromkeys([*ends, *others])
    handles = [Patch(facecolor=layer.colour, label=layer.name) for layer in shown]
    handles.append(Patch(facecolor=canvas.WHITE, edgecolor=canvas.GREY, label="idle (bubble)"))
    figure.legend(handles=handles, ncols=4, handlelength=1.4, **canvas.BELOW)
