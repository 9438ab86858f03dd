"""The pipeline timeline of a step: what each pipeline rank does when."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from meshwright.hwprofiles import PS_PER_S
from meshwright.planner.plots import canvas
from meshwright.planner.plots.lanes import plot_lanes
from meshwright.simulator import StepResult
from meshwright.simulator.engine import SpanKind

MESSAGES = "pipeline messages"
DATA_PARALLEL = "data-parallel wait"
TENSOR_SUM = SpanKind.TENSOR_SUM.value
OPTIMIZER = "optimizer"
OVERHEAD = "step overhead"
OTHER_COLOURS = {
    MESSAGES: canvas.YELLOW,
    DATA_PARALLEL: canvas.PURPLE,
    TENSOR_SUM: canvas.VERMILION,
    OPTIMIZER: canvas.GREEN,
    OVERHEAD: canvas.GREY,
}
PALEST_FRACTION = 0.62  # of the way to white: the last of many virtual stages
NUMBER_POINTS = 6.5
NUMBER_PIXELS = NUMBER_POINTS * canvas.DOTS_PER_INCH / canvas.POINTS_PER_INCH
DIGIT_PIXELS = 0.68 * NUMBER_PIXELS
# Passes narrower than this cannot be told apart: the two ends are then shown enlarged.
NARROW_PIXELS = 5.0
# Smaller ones are drawn as an image: a shape always fills the pixels that it touches.
SHAPE_PIXELS = 7.0
IMAGE_COLUMNS = 1100
IMAGE_ROWS = 8
ROW_FRACTION = 0.88
FEW_RANKS = 16
ENLARGED_PASSES = 24


class Box(NamedTuple):
    """A stretch of a rank's row; ``number`` is its microbatch, -1 for none."""

    rank: int
    start_s: float
    end_s: float
    number: int = -1


class ColouredBoxes(NamedTuple):
    """Boxes of one colour and what they mean."""

    name: str
    colour: str
    boxes: tuple[Box, ...]


class Window(NamedTuple):
    """A stretch of the step."""

    start_s: float
    end_s: float


def plot_timeline(step: StepResult) -> Figure:
    """Return one row a pipeline rank with its passes, its waits for replicas and its update.

    White is idle.  Where passes are too narrow to be seen, the start and the end of the step
    are shown enlarged below the whole.  A step that is no pipeline has a row a lane.
    """
    if step.lanes:
        return plot_lanes(step)
    figure = canvas.new_figure()
    layers = timeline_layers(step)
    num_passes = 2 * step.num_microbatches * step.plan.num_virtual_stages
    whole = Window(0.0, step.step_time_s)
    windows = {"whole": whole}
    if canvas.WIDTH_INCHES * canvas.DOTS_PER_INCH / num_passes < NARROW_PIXELS:
        panels = figure.subplot_mosaic([["whole", "whole"], ["A", "B"]])
        windows |= _ends(step)
    else:
        panels = {"whole": figure.add_subplot()}
    for name, window in windows.items():
        _draw_panel(panels[name], layers, window, step.plan.pp)
        if name != "whole":
            _mark_window(panels["whole"], name, window, step.plan.pp)
            text = "start" if window.start_s == 0 else "end"
            title = f"{name}: the {text}, enlarged"
            panels[name].set_title(title, loc="left", fontsize=canvas.TEXT_POINTS)
    headline = f"One training step: {step.step_time_s:.4g} s, {step.bubble_fraction:.1%} idle"
    canvas.write_titles(panels["whole"], headline, *canvas.describe_step(step))
    _add_legend(figure, layers)
    figure.draw_without_rendering()  # places the axes, so that pixels are known
    for name, window in windows.items():
        _number_boxes(panels[name], layers, window)
    return figure


def timeline_layers(step: StepResult) -> tuple[ColouredBoxes, ...]:
    """Return every box of the timeline, one layer a colour; empty ones are left out."""
    boxes: dict[str, list[Box]] = {name: [] for name in _pass_colours(step)}
    boxes |= {name: [] for name in OTHER_COLOURS}
    for pp_rank in range(step.plan.pp):
        for name, start_ps, end_ps, number in _rank_boxes(step, pp_rank):
            if end_ps > start_ps:
                box = Box(pp_rank, start_ps / PS_PER_S, end_ps / PS_PER_S, number)
                boxes[name].append(box)
    colours = _pass_colours(step) | OTHER_COLOURS
    return tuple(
        ColouredBoxes(name, colours[name], tuple(each)) for name, each in boxes.items() if each
    )


def _rank_boxes(step: StepResult, pp_rank: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield layer, start, end and number of each box in one row."""
    assert step.work is not None  # a pipeline has both
    assert step.times is not None
    rank = step.times.ranks[pp_rank]
    streams = rank.streams()
    for span in streams.compute:
        if span.kind in (SpanKind.OPTIMIZER, SpanKind.TENSOR_SUM):
            yield span.kind.value, span.start_ps, span.end_ps, -1
        else:
            name = _pass_name(span.kind, span.virtual_stage, step.plan.num_virtual_stages)
            yield name, span.start_ps, span.end_ps, span.microbatch
    if step.work.blocking_messages:
        for span in streams.messages:
            yield MESSAGES, span.start_ps, span.end_ps, -1
    for span in rank.closing:
        if span.kind not in (SpanKind.OPTIMIZER, SpanKind.TENSOR_SUM):
            yield DATA_PARALLEL, span.start_ps, span.end_ps, -1
    end_ps = max(each.end_ps for each in step.times.ranks)
    yield OVERHEAD, end_ps, step.step_ps, -1


def _pass_name(kind: SpanKind, virtual_stage: int, num_virtual_stages: int) -> str:
    return kind.value if num_virtual_stages == 1 else f"{kind.value}, virtual stage {virtual_stage}"


def _pass_colours(step: StepResult) -> dict[str, str]:
    """Return the colour of each kind of pass: a hue a direction, paler for later stages."""
    count = step.plan.num_virtual_stages
    return {
        _pass_name(kind, virtual_stage, count): _paler(
            hue, PALEST_FRACTION * virtual_stage / max(1, count - 1)
        )
        for kind, hue in ((SpanKind.FORWARD, canvas.BLUE), (SpanKind.BACKWARD, canvas.ORANGE))
        for virtual_stage in range(count)
    }


def _paler(colour: str, fraction: float) -> str:
    red, green, blue = (channel + (1 - channel) * fraction for channel in to_rgb(colour))
    return to_hex((red, green, blue))


def _ends(step: StepResult) -> dict[str, Window]:
    """Return the windows around the filling and the draining of the pipeline."""
    assert step.times is not None  # a pipeline has them
    ranks = step.times.ranks
    fill_ps = max(rank.starts_ps[0] for rank in ranks)
    drain_ps = step.step_ps - min(rank.ends_ps[-1] for rank in ranks)
    pass_ps = (ranks[0].ends_ps[-1] - ranks[0].starts_ps[0]) / len(ranks[0].ends_ps)
    least_ps, most_ps = ENLARGED_PASSES * pass_ps, 0.45 * step.step_ps
    start_s, end_s = (
        min(most_ps, max(least_ps, 1.5 * each_ps)) / PS_PER_S for each_ps in (fill_ps, drain_ps)
    )
    return {
        "A": Window(0.0, start_s),
        "B": Window(step.step_time_s - end_s, step.step_time_s),
    }


def _draw_panel(axes: Axes, layers: tuple[ColouredBoxes, ...], window: Window, pp: int) -> None:
    """Draw what of each layer lies in *window*: as shapes, or as an image where they are tiny."""
    canvas.style_axes(axes, "Time (s)", "Pipeline rank")
    row_pixels = axes.get_window_extent().height / pp
    if min(row_pixels, _pass_pixels(axes, layers, window)) >= SHAPE_PIXELS:
        _draw_shapes(axes, layers, window)
    else:
        _draw_image(axes, layers, window, pp)
    margin = 1.0 if pp == 1 else 0.6
    axes.set_xlim(window)
    axes.set_ylim(pp - 1 + margin, -margin)
    axes.yaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1))
    if pp <= FEW_RANKS:
        axes.set_yticks(range(pp))


def _draw_shapes(axes: Axes, layers: tuple[ColouredBoxes, ...], window: Window) -> None:
    """Draw each box, one collection a colour."""
    half = ROW_FRACTION / 2
    for layer in layers:
        corners = [
            ((start, rank - half), (end, rank - half), (end, rank + half), (start, rank + half))
            for rank, start, end, _ in layer.boxes
            if start < window.end_s and end > window.start_s
        ]
        if corners:
            shapes = PolyCollection(
                corners, facecolors=layer.colour, edgecolors=canvas.WHITE, linewidths=0.5
            )
            shapes.set_label(layer.name)
            shapes.set_snap(False)  # snapped to pixels, touching boxes would seem to idle
            axes.add_collection(shapes, autolim=False)


def _draw_image(axes: Axes, layers: tuple[ColouredBoxes, ...], window: Window, pp: int) -> None:
    """Draw pixels whose colour mixes what happens in their time, by its share of it."""
    image = np.ones((pp, IMAGE_COLUMNS, 3))
    for layer in layers:
        shares = column_shares(layer.boxes, window, pp, IMAGE_COLUMNS)
        image -= shares[:, :, np.newaxis] * (1.0 - np.asarray(to_rgb(layer.colour)))
    image = np.repeat(np.clip(image, 0.0, 1.0), IMAGE_ROWS, axis=0)
    if pp <= FEW_RANKS:
        image[::IMAGE_ROWS] = 1.0  # a gap between rows
    axes.imshow(
        image,
        extent=(window.start_s, window.end_s, pp - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )


def column_shares(
    boxes: tuple[Box, ...], window: Window, pp: int, num_columns: int
) -> NDArray[np.float64]:
    """Return for each rank and column of time which share of it *boxes* fill.

    Args:
        boxes: Of one rank in order of time and disjoint.
        window: What the columns cover.
        pp: Pipeline ranks.
        num_columns: Equal stretches of time.

    >>> column_shares((Box(0, 1.0, 2.5),), Window(0.0, 4.0), 1, 4).tolist()
    [[0.0, 1.0, 0.5, 0.0]]
    """
    edges_s = np.linspace(window.start_s, window.end_s, num_columns + 1)
    shares = np.zeros((pp, num_columns))
    rows = np.array(boxes)
    for rank in range(pp):
        times_s = rows[rows[:, 0] == rank, 1:3]
        if times_s.size:
            ends_s = np.cumsum(times_s[:, 1] - times_s[:, 0])
            busy_s = np.stack((ends_s - (times_s[:, 1] - times_s[:, 0]), ends_s), axis=1)
            until_s = np.interp(edges_s, times_s.ravel(), busy_s.ravel())
            shares[rank] = np.diff(until_s) / np.diff(edges_s)
    return shares


def _pass_pixels(axes: Axes, layers: tuple[ColouredBoxes, ...], window: Window) -> float:
    """Return the mean width of a pass in *window*."""
    widths_s = [box.end_s - box.start_s for each in layers for box in each.boxes if box.number >= 0]
    mean_s = sum(widths_s) / len(widths_s)
    return axes.get_window_extent().width * mean_s / (window.end_s - window.start_s)


def _mark_window(axes: Axes, name: str, window: Window, pp: int) -> None:
    """Frame in the whole step what a panel below shows enlarged."""
    width = window.end_s - window.start_s
    frame = Rectangle(
        (window.start_s, -0.5), width, pp, fill=False, edgecolor=canvas.INK, linewidth=1.2
    )
    frame.set_clip_on(False)
    axes.add_patch(frame)
    axes.annotate(
        name,
        (window.start_s + width / 2, pp / 2),
        ha="center",
        va="center",
        fontsize=canvas.SMALL_POINTS,
        fontweight="bold",
        bbox={"boxstyle": "circle,pad=0.2", "facecolor": canvas.WHITE, "edgecolor": canvas.INK},
    )


def _number_boxes(axes: Axes, layers: tuple[ColouredBoxes, ...], window: Window) -> None:
    """Write microbatch numbers into the boxes that have room for them."""
    extent = axes.get_window_extent()
    pixels_per_s = extent.width / (window.end_s - window.start_s)
    low, high = sorted(axes.get_ylim())
    if extent.height / (high - low) < 1.3 * NUMBER_PIXELS:
        return
    for layer in layers:
        colour = canvas.WHITE if layer.colour.upper() == canvas.BLUE else canvas.INK
        for rank, start_s, end_s, number in layer.boxes:
            needed_s = (len(str(number)) + 0.4) * DIGIT_PIXELS / pixels_per_s
            inside = window.start_s <= start_s and end_s <= window.end_s
            if number >= 0 and inside and end_s - start_s >= needed_s:
                axes.text(
                    (start_s + end_s) / 2,
                    rank,
                    str(number),
                    ha="center",
                    va="center_baseline",
                    fontsize=NUMBER_POINTS,
                    color=colour,
                ).set_in_layout(False)


def _add_legend(figure: Figure, layers: tuple[ColouredBoxes, ...]) -> None:
    """Explain the colours; of many virtual stages the first and the last."""
    passes = [layer for layer in layers if layer.name not in OTHER_COLOURS]
    half = len(passes) // 2
    ends = [layer for side in (passes[:half], passes[half:]) for layer in (side[0], side[-1])]
    others = [layer for layer in layers if layer.name in OTHER_COLOURS]
    shown = dict.fromkeys([*ends, *others])
    handles = [Patch(facecolor=layer.colour, label=layer.name) for layer in shown]
    handles.append(Patch(facecolor=canvas.WHITE, edgecolor=canvas.GREY, label="idle (bubble)"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        fontsize=canvas.TEXT_POINTS,
        frameon=False,
        handlelength=1.4,
    )
