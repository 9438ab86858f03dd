"""Measured against modelled rates, a panel a kind of work."""

from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from matplotlib.axes import Axes

from meshwright.hwprofiles import GIGA, KILO
from meshwright.planner.plots import canvas, save_figure
from meshwright.planner.reports import output_file
from meshwright.validate.calibration.fit.residuals import Residual
from meshwright.validate.calibration.rows import CaseGroup

COLORS = (
    *(canvas.BLUE, canvas.VERMILION, canvas.GREEN, canvas.ORANGE, canvas.PURPLE, canvas.SKY),
    *(canvas.DARK_GREY, canvas.YELLOW),
)
MARKERS = "osD^vP*X"
MARGIN = 1.3
TITLE_CHARACTERS = 120
SIZE_INCHES = (10.0, 8.6)


class ResidualPanel(NamedTuple):
    """Groups that share a panel, and its unit."""

    title: str
    groups: tuple[CaseGroup, ...]
    unit: str
    scale: float


PANELS = (
    ResidualPanel("matrix products", (CaseGroup.GEMM,), "GFLOP/s", GIGA),
    ResidualPanel("attention", (CaseGroup.ATTENTION,), "GFLOP/s", GIGA),
    ResidualPanel(
        "memory-bound work", (CaseGroup.MEMORY, CaseGroup.OPTIMIZER, CaseGroup.COPY), "GB/s", GIGA
    ),
    ResidualPanel("collectives, bus bandwidth", (CaseGroup.COLLECTIVE,), "GB/s", GIGA),
)


def draw_residuals(residuals: Iterable[Residual], title: str, path: Path) -> None:
    """Write a PNG of all rows that the profiles have a time for.

    A row on the diagonal is modelled as measured; the thin lines are 20 % off it.
    """
    shown = [each for each in residuals if each.modelled_s is not None]
    panels = [
        (panel, rows)
        for panel in PANELS
        if (rows := [each for each in shown if each.row.case.group in panel.groups])
    ]
    if not panels:
        return
    figure = canvas.new_figure()
    num_rows = (len(panels) + 1) // 2
    figure.set_size_inches(SIZE_INCHES[0], SIZE_INCHES[1] * num_rows / 2 + 0.4)
    lines = ["Measured against modelled rates", *wrap(title, TITLE_CHARACTERS)]
    figure.suptitle("\n".join(lines), fontsize=canvas.TEXT_POINTS + 1, color=canvas.INK)
    columns = min(2, len(panels))
    for number, (panel, rows) in enumerate(panels, start=1):
        _draw_panel(figure.add_subplot(num_rows, columns, number), panel, rows)
    with output_file(path) as draft:
        save_figure(figure, draft)


def _draw_panel(axes: Axes, panel: ResidualPanel, residuals: list[Residual]) -> None:
    if max(each.row.rate for each in residuals) > KILO * panel.scale:
        panel = panel._replace(unit=f"T{panel.unit[1:]}", scale=KILO * panel.scale)
    points: dict[str, list[tuple[float, float]]] = {}
    for each in residuals:
        assert each.modelled_s is not None  # draw_residuals takes no others
        case = each.row.case
        modelled = case.work / each.modelled_s / panel.scale
        label = (
            f"{case.op}, {case.sizes[1]} ranks" if case.group is CaseGroup.COLLECTIVE else case.op
        )
        points.setdefault(label, []).append((modelled, each.row.rate / panel.scale))
    rates = [rate for pairs in points.values() for pair in pairs for rate in pair]
    ends = (min(rates) / MARGIN, max(rates) * MARGIN)
    for factor, width in ((1.0, 1.0), (1.2, 0.5), (1 / 1.2, 0.5)):
        axes.plot(ends, [factor * end for end in ends], color=canvas.GREY, linewidth=width)
    for number, (label, pairs) in enumerate(sorted(points.items())):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        x, y = zip(*pairs, strict=True)
        axes.scatter(x, y, s=14, color=color, marker=marker, alpha=0.65, linewidths=0, label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    canvas.style_axes(axes, f"modelled, {panel.unit}", f"measured, {panel.unit}")
    axes.set_title(f"{panel.title}: {len(residuals)} rows", loc="left", fontsize=canvas.TEXT_POINTS)
    axes.legend(fontsize=canvas.SMALL_POINTS, frameon=False, loc="upper left")
