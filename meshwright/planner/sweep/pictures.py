"""Pictures of a sweep: scaling, curves over one variation, maps over two."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan
from textwrap import wrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from meshwright.hwprofiles import GIBI, KILO, counted
from meshwright.planner.plots import canvas
from meshwright.planner.reports import format_count
from meshwright.planner.sweep.outcome import Outcome
from meshwright.planner.sweep.result import GPUS, RATE, Row, SweepResult
from meshwright.planner.sweep.varied import Variation

COLOURS = (canvas.BLUE, canvas.VERMILION, canvas.GREEN, canvas.ORANGE, canvas.PURPLE, canvas.SKY)
MARKERS = "os^Dv*"
MOST_LINES = len(COLOURS)
LOG_RATIO = 4.0  # beyond it a linear axis would press most values together
MOST_TEXTS = 120  # cells of a map that are wide enough for their numbers
MOST_TICKS = 12
KNOWN = {"model": "", "cluster": "", "stack": "", "num_gpus": " GPUs"}
KNOWN |= {"global_batch_size": " sequences", "seq_len": " tokens each", "precision": ""}
PERCENT = 100
BATCH = "global_batch_size"


class Measure(NamedTuple):
    """Quantity that a panel shows of a cell."""

    name: str
    label: str
    scale: float = 1.0


def pictures_of(result: SweepResult) -> Mapping[str, Callable[[SweepResult], Figure]]:
    """Return the pictures that say something of a sweep, by name."""
    pictures: dict[str, Callable[[SweepResult], Figure]] = {}
    if not result.num_fitting:
        return pictures
    several = [each for each in result.varied if len(each.values) > 1]
    over_gpus = any(each.column == GPUS for each in several)
    if over_gpus:
        pictures["scaling"] = plot_scaling
    elif several:
        pictures["curves"] = plot_curves
    if len(several) > 1:
        pictures["heatmap"] = plot_heatmap
    return pictures


def plot_scaling(result: SweepResult) -> Figure:
    """Return throughput and efficiency against devices, with what they would ideally be.

    Efficiency is the throughput a device against that on the first number of devices.
    """
    (axis,) = (each for each in result.varied if each.column == GPUS)
    panels = (
        Measure("tokens_per_s", f"{_samples(result)} a second, all GPUs"),
        Measure(RATE, "throughput a GPU against the first (%)"),
    )
    figure, (left, right) = _sheet(result, _scaling_title(result, axis), axis, panels)
    lines, rates = (_lines(result, axis, panel) for panel in panels)
    for colour, points in zip(COLOURS, lines.values(), strict=False):
        first_x, first_y = points[0]
        ends = [first_x, points[-1][0]]
        ideal = [first_y * x / first_x for x in ends]
        left.plot(ends, ideal, "--", color=colour, linewidth=1, alpha=0.6)
    left.plot([], [], "--", color=canvas.GREY, linewidth=1, label="in step with the GPUs")
    right.axhline(PERCENT, linestyle="--", color=canvas.GREY, linewidth=1)
    _draw_lines(left, lines, named=True)
    # Of what a line shows, not of each cell: the best of others may be another on more devices.
    shares = {name: [(x, PERCENT * y / of[0][1]) for x, y in of] for name, of in rates.items()}
    _draw_lines(right, shares, named=False)
    right.set_ylim(bottom=0)
    _scale_devices(left, right, axis)
    _legend(figure, result, axis)
    return figure


def _scaling_title(result: SweepResult, axis: Variation) -> str:
    """Return the title: weak or strong scaling, and the variations of which the best is shown."""
    kind = "Weak scaling: the batch grows with the GPUs" if result.is_weak else "Strong scaling"
    shown = axis, _next_one(result, axis)
    others = [each for each in result.varied if len(each.values) > 1 and each not in shown]
    return kind + _best_of(others)


def _best_of(others: Sequence[Variation]) -> str:
    """Return the clause of a title on other variations, of which the best is shown."""
    return f", the best {', '.join(each.name for each in others)} of each" if others else ""


def _scale_devices(left: Axes, right: Axes, axis: Variation) -> None:
    """Mark the numbers of devices, and scale throughput as they are: an ideal line is straight."""
    values = [float(str(each.content)) for each in axis.values]
    is_log = max(values) > LOG_RATIO * min(values)
    for axes in (left, right):
        _scale_across(axes, values, is_log=is_log)
    if is_log:
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(value)))
    left.yaxis.set_minor_formatter(NullFormatter())


def plot_curves(result: SweepResult) -> Figure:
    """Return throughput and memory against the first thing that is varied."""
    axis = next(each for each in result.varied if len(each.values) > 1)
    panels = _per_gpu(result)
    figure, panels_drawn = _sheet(result, f"{_subject(result)} over {axis.name}", axis, panels)
    numbers = _numbers(axis)
    for axes, panel in zip(panels_drawn, panels, strict=True):
        lines = _lines(result, axis, panel)
        _draw_lines(axes, lines, named=axes is panels_drawn[0], joined=_is_ordered(axis))
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(value)))
        if numbers is None:
            texts = [value.text for value in axis.values]
            axes.set_xticks(range(len(texts)), texts, rotation=30 if len(texts) > 4 else 0)
        else:
            is_log = min(numbers) > 0 and max(numbers) > LOG_RATIO * min(numbers)
            _scale_across(axes, numbers, is_log=is_log)
    _legend(figure, result, axis)
    return figure


def plot_heatmap(result: SweepResult) -> Figure:
    """Return maps of throughput and memory over the first two things that are varied."""
    across, up, *others = [each for each in result.varied if len(each.values) > 1]
    panels = _per_gpu(result)
    title = f"{_subject(result)} over {across.name} and {up.name}{_best_of(others)}"
    figure, panels_drawn = _sheet(result, title, across, panels)
    for axes, panel in zip(panels_drawn, panels, strict=True):
        axes.set_ylabel(up.name, fontsize=canvas.TEXT_POINTS)
        _draw_map(figure, axes, _map(result, across, up), panel)
        for axis, set_ticks in ((across, axes.set_xticks), (up, axes.set_yticks)):
            # More labels than this would run into each other.
            step = -(-len(axis.values) // MOST_TICKS)
            places = range(0, len(axis.values), step)
            set_ticks(places, [axis.values[index].text for index in places])
    return figure


def _per_gpu(result: SweepResult) -> tuple[Measure, Measure]:
    return (
        Measure(RATE, f"{_samples(result)} a second and GPU"),
        Measure("device_bytes", "memory of the fullest device (GiB)", GIBI),
    )


def _subject(result: SweepResult) -> str:
    """Return the subject of a title: a search has best layouts, a simulation has one."""
    return "Best layouts" if any("search" in each for each in result.documents) else "A layout"


def _samples(result: SweepResult) -> str:
    """Return the unit of a batch, as the models have it."""
    return " or ".join(dict.fromkeys(each.sample for each in result.cells if each.sample))


def _sheet(
    result: SweepResult, title: str, axis: Variation, panels: Sequence[Measure]
) -> tuple[Figure, tuple[Axes, Axes]]:
    """Return a figure with two panels over *axis*, titles and labels."""
    figure = canvas.new_figure()
    left, right = figure.subplots(1, 2)
    for axes, panel in zip((left, right), panels, strict=True):
        canvas.style_axes(axes, "GPUs" if axis.column == GPUS else axis.name, panel.label)
        axes.grid(color=canvas.LIGHT_GREY, linewidth=0.6)
    figure.suptitle(
        title,
        x=0.02,
        ha="left",
        fontsize=canvas.TITLE_POINTS,
        fontweight="bold",
        color=canvas.INK,
    )
    # A title takes no width of its panel, so that this one may reach over both.
    left.set_title(
        "\n".join(wrap(_setting_text(result), canvas.DETAIL_CHARACTERS)),
        loc="left",
        fontsize=canvas.TEXT_POINTS,
        color=canvas.DARK_GREY,
        pad=10,
    )
    return figure, (left, right)


def _setting_text(result: SweepResult) -> str:
    """Return the options that all cells share, in a line."""
    rows = result.rows
    shared = [
        f"{rows[0][name]:,}{unit}" if isinstance(rows[0][name], int) else f"{rows[0][name]}{unit}"
        for name, unit in KNOWN.items()
        if len({row[name] for row in rows}) == 1 and rows[0][name] is not None
    ]
    fixed = [f"{each.name} {each.values[0].text}" for each in result.varied if _is_fixed(each)]
    first = result.cells[0].setting
    if result.is_weak and not any(each.column == BATCH for each in result.varied):
        fixed.append(f"{counted(first[BATCH], 'sequence')} on {counted(first[GPUS], 'GPU')}")
    return ", ".join(shared + fixed)


def _is_fixed(variation: Variation) -> bool:
    return len(variation.values) == 1 and variation.column not in KNOWN


Point = tuple[float, float]


def _lines(result: SweepResult, axis: Variation, panel: Measure) -> dict[str, list[Point]]:
    """Return points over *axis*, a line for each value of the next thing that is varied.

    Of several cells at a point the one with the most throughput counts.
    """
    column = result.varied.index(axis)
    next_one = _next_one(result, axis)
    numbers = _numbers(axis)
    best: dict[tuple[str, int], Row] = {}
    for cell, row in zip(result.cells, result.rows, strict=True):
        if _rate(row):
            line = cell.values[result.varied.index(next_one)].text if next_one else ""
            key = line, axis.values.index(cell.values[column])
            if key not in best or row[RATE] > best[key][RATE]:
                best[key] = row
    lines: dict[str, list[Point]] = {}
    for (line, index), row in best.items():
        x = float(index) if numbers is None else numbers[index]
        lines.setdefault(line, []).append((x, row[panel.name] / panel.scale))
    return {line: sorted(points) for line, points in _some(lines)}


def _some(lines: Mapping[str, list[Point]]) -> Iterator[tuple[str, list[Point]]]:
    """Yield all lines, or as many as can be told apart, evenly chosen."""
    names = list(lines)
    count = min(MOST_LINES, len(names))
    chosen = {names[index * (len(names) - 1) // max(count - 1, 1)] for index in range(count)}
    for name in names:
        if name in chosen:
            yield name, lines[name]


def _next_one(result: SweepResult, axis: Variation) -> Variation | None:
    return next((each for each in result.varied if each != axis and len(each.values) > 1), None)


def _numbers(axis: Variation) -> list[float] | None:
    """Return the values as numbers, None where one is none."""
    try:
        return [float(value.text.replace(",", "")) for value in axis.values]
    except ValueError:
        return None


def _is_ordered(axis: Variation) -> bool:
    """Return True if values are amounts, not names."""
    return all(value.text[:1].isdigit() for value in axis.values)


def _draw_lines(
    axes: Axes, lines: Mapping[str, list[Point]], *, named: bool, joined: bool = True
) -> None:
    for number, (name, points) in enumerate(lines.items()):
        x, y = zip(*points, strict=True)
        axes.plot(
            x,
            y,
            color=COLOURS[number],
            marker=MARKERS[number],
            markersize=5,
            linewidth=1.5 if joined else 0,
            label=name if named and name else None,
        )


def _scale_across(axes: Axes, values: Sequence[float], *, is_log: bool) -> None:
    """Mark the values of a horizontal axis, which is logarithmic where they need that."""
    if is_log:
        axes.set_xscale("log")
    chosen = sorted(values)[:: -(-len(values) // MOST_TICKS)]
    axes.set_xticks(chosen, [_text(value) for value in chosen])
    axes.xaxis.set_minor_locator(NullLocator())


def _text(value: float) -> str:
    """Return a number of a picture: three digits, or all of it up to a million.

    >>> _text(0.12345), _text(16), _text(12_345), _text(12_345_678)
    ('0.123', '16', '12,345', '12.3 M')
    """
    return format_count(value) if value >= KILO else f"{value:.3g}"


def _legend(figure: Figure, result: SweepResult, axis: Variation) -> None:
    """Name the lines below both panels, if there are several or one needs its name."""
    next_one = _next_one(result, axis)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            title=next_one and f"{next_one.name}{_of_some(next_one)}",
            title_fontsize=canvas.TEXT_POINTS,
            loc="outside lower center",
            ncols=len(labels) if len(labels) <= MOST_LINES else 4,
            fontsize=canvas.TEXT_POINTS,
            frameon=False,
        )


def _of_some(variation: Variation) -> str:
    """Return that not all values have a line, where it is so."""
    count = len(variation.values)
    return f", {MOST_LINES} of {count} values" if count > MOST_LINES else ""


def _map(result: SweepResult, across: Variation, up: Variation) -> list[list[Row]]:
    """Return the cells of a map by rows, the best of each."""
    best: dict[tuple[int, int], Row] = {}
    places = result.varied.index(across), result.varied.index(up)
    for cell, row in zip(result.cells, result.rows, strict=True):
        x, y = across.values.index(cell.values[places[0]]), up.values.index(cell.values[places[1]])
        if (y, x) not in best or _rate(row) > _rate(best[y, x]):
            best[y, x] = row
    return [[best[y, x] for x in range(len(across.values))] for y in range(len(up.values))]


def _rate(row: Row) -> float:
    """Return the throughput of a cell, nothing where it cannot run."""
    rate: float = row[RATE] if row["outcome"] == Outcome.FITS else 0.0
    return rate


def _draw_map(figure: Figure, axes: Axes, table: Sequence[Sequence[Row]], panel: Measure) -> None:
    numbers = [
        [row[panel.name] / panel.scale if _rate(row) else float("nan") for row in line]
        for line in table
    ]
    # Cells without a layout are not drawn: this shows through.
    axes.set_facecolor(canvas.LIGHT_GREY)
    axes.grid(visible=False)
    image = axes.imshow(numbers, cmap="cividis", aspect="auto", origin="lower")
    bar = figure.colorbar(image, ax=axes, location="bottom", pad=0.02)
    bar.set_label(panel.label, fontsize=canvas.TEXT_POINTS)
    bar.ax.tick_params(labelsize=canvas.SMALL_POINTS)
    bar.ax.xaxis.set_major_locator(MaxNLocator(5))
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(value)))
    if sum(map(len, table)) > MOST_TEXTS:
        return
    low, high = image.get_clim()
    for y, line in enumerate(numbers):
        for x, value in enumerate(line):
            axes.text(
                x,
                y,
                str(table[y][x]["outcome"]) if isnan(value) else _text(value),
                ha="center",
                va="center",
                fontsize=canvas.SMALL_POINTS,
                color=canvas.WHITE if value < (low + high) / 2 else canvas.INK,
            )
