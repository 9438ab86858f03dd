"""Picture of the placements of a matrix product: one panel a signature, one colour a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from string import ascii_uppercase
from textwrap import shorten
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from meshwright.hwprofiles import PS_PER_S, format_time
from meshwright.planner.matmul.study import MatmulStudy, Pipeline, ProductRow, Refusal, shape_text
from meshwright.planner.matmul.wording import boxing_text, chain_text, format_sent
from meshwright.planner.plots import canvas
from meshwright.simulator.layout import Partial, Placement, Replicate, Split
from meshwright.simulator.matmul import Chain, Shape

COLOURS = (
    *(canvas.BLUE, canvas.ORANGE, canvas.GREEN, canvas.PURPLE),
    *(canvas.SKY, canvas.VERMILION, canvas.YELLOW, canvas.GREY),
)
DARK = (canvas.BLUE, canvas.GREEN, canvas.VERMILION)
MAX_CELLS = 16  # matrices up to this size are drawn to scale, element by element
TITLE_CHARACTERS = 112  # of a panel as wide as the picture
LARGEST, SMALLEST = 9.0, 3.0  # longest and shortest side of others, in cells
MAX_CARDS = 4
MAX_HEADLINE = 84
LEAST_NUMBERED_INCHES = 0.12  # a slice this narrow still holds the number of its device
MOST_LABEL = 16  # characters that fit below a small matrix
CARD_SHIFT = 0.5  # cells between the corners of two cards
GAP, WIDE_GAP = 2.8, 4.0  # cells between matrices of few and of many elements
LABEL_CELLS = 2.9
MOST_CELLS_OF_HALF = 45.0  # what half the width of the picture has space for
HEAD_INCHES, MARGIN_INCHES, WORDS_INCHES = 0.85, 0.16, 0.46
MOST_PANEL_INCHES, LEAST_PANEL_INCHES = 1.5, 0.9
WHO_HOLDS = (
    "S(i): cut along dim i, one slice a device. R: every device holds all of it, drawn as cards.\n"
    "P: every device holds a summand of full size, drawn as hatched cards that add up."
)


class Drawn(NamedTuple):
    """A matrix of a panel.

    ``sign`` stands before it, ``label`` below its name; ``device`` is its only holder, where
    there is only one.
    """

    shape: Shape
    placement: Placement
    sign: str
    label: str
    device: int | None = None


@dataclass(frozen=True, slots=True)
class PlacementPanel:
    """One way to place the matrices, in words and to draw."""

    title: str
    detail: str
    matrices: tuple[Drawn, ...]
    is_refused: bool = False


def plot_matmul_split(study: MatmulStudy) -> Figure:
    """Return a picture of who holds what, a panel for each way to place the matrices."""
    panels = panels_of(study)
    scale = _Scale(study, panels)
    num_columns = 1 if scale.width_cells > MOST_CELLS_OF_HALF else 2
    num_rows = -(-len(panels) // num_columns)
    width = (canvas.WIDTH_INCHES - MARGIN_INCHES) / num_columns
    ratio = (width - MARGIN_INCHES) / scale.width_cells * scale.height_cells
    height = WORDS_INCHES + min(max(ratio, LEAST_PANEL_INCHES), MOST_PANEL_INCHES)
    # The tighter of both scales says which slices have room for a number.
    shown = (height - WORDS_INCHES) / scale.height_cells
    least_cells = LEAST_NUMBERED_INCHES / min((width - MARGIN_INCHES) / scale.width_cells, shown)
    total = HEAD_INCHES + height * num_rows + MARGIN_INCHES
    figure = canvas.new_figure()
    # Panels are placed by hand: their scale decides the height of the picture.
    figure.set_layout_engine("none")
    figure.set_size_inches(canvas.WIDTH_INCHES, total)
    for number, panel in enumerate(panels):
        row, column = divmod(number, num_columns)
        left = MARGIN_INCHES + column * width
        bottom = total - HEAD_INCHES - (row + 1) * height
        box_inches = (left, bottom, width - MARGIN_INCHES, height - WORDS_INCHES)
        axes = figure.add_axes(_fractions(box_inches, total))
        _draw_panel(axes, panel, scale, _Devices(study.num_devices, least_cells))
    _write_head(figure, study, total)
    return figure


def panels_of(study: MatmulStudy) -> tuple[PlacementPanel, ...]:
    """Return the panels: signatures of a single product; chains and pipeline of several."""
    if len(study.products) == 1:
        return tuple(_row_panel(study, row) for row in study.rows)
    chains = [_chain_panel(study, chain) for chain in study.chains]
    if study.pipeline is not None:
        chains.append(_pipeline_panel(study, study.pipeline))
    return tuple(chains)


def _row_panel(study: MatmulStudy, row: ProductRow | Refusal) -> PlacementPanel:
    signature = row.signature
    placements = (*signature.inputs, signature.out)
    shapes = (*study.shapes, study.products[0].out)
    labels = [repr(placement) for placement in placements]
    if isinstance(row, ProductRow):
        parts = (*row.run.shapes.inputs, row.run.shapes.out)
        labels = [
            _slice_label(placement, local)
            for placement, local in zip(placements, parts, strict=True)
        ]
    matrices = tuple(
        Drawn(shape, placement, sign, label)
        for shape, placement, sign, label in zip(
            shapes, placements, ("", "x", "="), labels, strict=True
        )
    )
    if isinstance(row, Refusal):
        return PlacementPanel(signature.name, f"refused: {row.reason}", matrices, is_refused=True)
    boxing = row.boxing
    detail = "C needs no boxing"
    if boxing.op_names:
        detail = f"C to R: {boxing_text(boxing)}, {format_sent(boxing.sent_bytes)} a device"
    return PlacementPanel(signature.name, f"{detail}; {_time(row.time_ps)} in all", matrices)


def _slice_label(placement: Placement, local: Shape) -> str:
    """Return a placement, with the shape of a slice where there is space for it."""
    label = f"{placement}: {shape_text(local)} each"
    is_short = isinstance(placement, Split) and len(label) <= MOST_LABEL
    return label if is_short else repr(placement)


def _chain_panel(study: MatmulStudy, chain: Chain) -> PlacementPanel:
    runs = [step.run for step in chain.steps]
    first = runs[0].signatures[0].inputs[0]
    matrices = [Drawn(study.shapes[0], first, "", repr(first))]
    for shape, run, boxing in zip(study.shapes[1:], runs, chain.boxings[1:], strict=True):
        weight, out = run.signatures[0].inputs[1], run.signatures[0].out
        then = f" to {boxing.steps[-1].change.target}" if boxing.steps else ""
        matrices.append(Drawn(shape, weight, "x", repr(weight)))
        matrices.append(Drawn(run.operator.out, out, "=", f"{out}{then}"))
    names = ", ".join(name for each in chain.boxings for name in each.op_names)
    detail = f"{names}, {format_sent(chain.sent_bytes)} a device" if names else "no boxing"
    best = ", the fastest" if chain is study.best else ""
    detail = f"{detail}; {_time(chain.time_ps)} in all{best}"
    return PlacementPanel(chain_text(chain), detail, tuple(matrices))


def _pipeline_panel(study: MatmulStudy, pipeline: Pipeline) -> PlacementPanel:
    matrices = [Drawn(study.shapes[0], Replicate(), "", "device 0", 0)]
    weights = iter(study.shapes[1:])
    for device, stage in enumerate(pipeline.stages):
        for run in stage:
            where = f"device {device}"
            matrices.append(Drawn(next(weights), Replicate(), "x", where, device))
            matrices.append(Drawn(run.operator.out, Replicate(), "=", where, device))
    sizes = ", ".join(shape_text(each.shape) for each in pipeline.messages)
    period = f"every {_time(pipeline.period_ps)} in a stream"
    detail = f"message {sizes}; {_time(pipeline.time_ps)} in all, {period}"
    return PlacementPanel("pipeline", detail, tuple(matrices))


class _Scale:
    """From sizes to cells on paper, and the cells that the largest panel takes.

    Small matrices are drawn as they are; of others a side is as long as the root of its size.
    """

    def __init__(self, study: MatmulStudy, panels: Sequence[PlacementPanel]) -> None:
        self._largest = max(size for shape in study.shapes for size in shape)
        shapes = [each.shape for each in panels[0].matrices]
        shift = CARD_SHIFT * (min(study.num_devices, MAX_CARDS) - 1)
        self.gap_cells = shift + (GAP if self.is_exact else WIDE_GAP)
        self.above_cells = 0.5 * max(self(rows) for rows, _ in shapes) + shift + 0.3
        self.height_cells = 2 * self.above_cells - shift + LABEL_CELLS
        self.width_cells = sum(self(columns) + self.gap_cells for _, columns in shapes)

    @property
    def is_exact(self) -> bool:
        """True if a cell is an element."""
        return self._largest <= MAX_CELLS

    def __call__(self, size: int) -> float:
        """Return the length of a side in cells."""
        if self.is_exact:
            return size
        # By the root of sizes, so that 8 and 8192 fit one picture.
        return max(SMALLEST, LARGEST * sqrt(size / self._largest))


class _Devices(NamedTuple):
    """Number of devices, and the least side in cells of a slice that gets a number."""

    num: int
    least_cells: float


def _draw_panel(axes: Axes, panel: PlacementPanel, scale: _Scale, devices: _Devices) -> None:
    """Draw the matrices of a panel from left to right, centred on one line."""
    axes.set_axis_off()
    axes.set_aspect("equal", anchor="NW")
    axes.set_xlim(-0.1, scale.width_cells - 0.1)
    # Rows of a matrix count downwards.
    axes.set_ylim(scale.height_cells - scale.above_cells, -scale.above_cells)
    x = 0.0
    for name, drawn in zip(ascii_uppercase, panel.matrices, strict=False):
        rows, columns = (scale(size) for size in drawn.shape)
        if drawn.sign:
            _write(axes, x - 0.45 * GAP, 0, drawn.sign, canvas.TITLE_POINTS)
        _draw_matrix(axes, drawn, _Box(x, -0.5 * rows, columns, rows), panel, devices)
        if scale.is_exact:
            _draw_cells(axes, x, -0.5 * rows, drawn.shape)
        label = f"{name} {shape_text(drawn.shape)}\n{drawn.label}"
        _write(axes, x, 0.5 * rows + 0.3, label, canvas.SMALL_POINTS - 0.8, corner=True)
        x += columns + scale.gap_cells
    _write_words(axes, panel)


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def _draw_matrix(
    axes: Axes, drawn: Drawn, box: _Box, panel: PlacementPanel, devices: _Devices
) -> None:
    """Draw the slices of a split matrix, else the cards of its holders, the first on top."""
    if panel.is_refused:
        _add(axes, box, canvas.LIGHT_GREY)
    elif drawn.device is not None:
        _add(axes, box, _colour(drawn.device))
        _write_number(axes, box, drawn.device)
    elif isinstance(drawn.placement, Split):
        for device in range(devices.num):
            part = _slice(box, drawn.placement.dim, device, devices.num)
            _add(axes, part, _colour(device), 0.8 if devices.num <= MAX_CELLS else 0.1)
            if min(part.width, part.height) >= devices.least_cells:
                _write_number(axes, part, device)
    else:
        is_partial = isinstance(drawn.placement, Partial)
        # From behind: the card of the first device lies on top.
        for device in reversed(range(min(devices.num, MAX_CARDS))):
            shift = CARD_SHIFT * device
            card = _Box(box.x + shift, box.y - shift, box.width, box.height)
            _add(axes, card, _colour(device), hatch="////" if is_partial else None)


def _slice(box: _Box, dim: int, device: int, num_devices: int) -> _Box:
    if dim == 0:
        height = box.height / num_devices
        return _Box(box.x, box.y + device * height, box.width, height)
    width = box.width / num_devices
    return _Box(box.x + device * width, box.y, width, box.height)


def _add(
    axes: Axes, box: _Box, colour: str, line_points: float = 0.8, *, hatch: str | None = None
) -> None:
    axes.add_patch(
        Rectangle(
            (box.x, box.y),
            box.width,
            box.height,
            facecolor=colour,
            edgecolor=canvas.WHITE,
            linewidth=line_points,
            hatch=hatch,
        )
    )


def _draw_cells(axes: Axes, x: float, y: float, shape: Shape) -> None:
    """Draw the lines between the elements of a matrix."""
    rows, columns = shape
    across = [((x, y + row), (x + columns, y + row)) for row in range(1, rows)]
    down = [((x + column, y), (x + column, y + rows)) for column in range(1, columns)]
    lines = LineCollection(across + down, colors=canvas.WHITE, linewidths=0.35, alpha=0.7)
    axes.add_collection(lines, autolim=False)


def _write(
    axes: Axes, x: float, y: float, text: str, points: float, *, corner: bool = False
) -> None:
    """Write *text* around a point, or with its upper left corner there."""
    sides = ("left", "top") if corner else ("center", "center")
    axes.text(x, y, text, fontsize=points, color=canvas.INK, ha=sides[0], va=sides[1])


def _write_number(axes: Axes, box: _Box, device: int) -> None:
    axes.text(
        box.x + 0.5 * box.width,
        box.y + 0.5 * box.height,
        str(device),
        color=canvas.WHITE if _colour(device) in DARK else canvas.INK,
        ha="center",
        va="center",
        fontsize=canvas.SMALL_POINTS,
        fontweight="bold",
    )


def _write_words(axes: Axes, panel: PlacementPanel) -> None:
    """Write a panel's title and detail above the space of its axes."""
    box = axes.get_position(original=True)
    most = int(box.width * TITLE_CHARACTERS)
    lines = (
        (shorten(panel.title, most, placeholder=" ..."), 14, canvas.INK, "bold"),
        (panel.detail, 2, canvas.VERMILION if panel.is_refused else canvas.DARK_GREY, "normal"),
    )
    for text, points, colour, weight in lines:
        axes.annotate(
            text,
            (box.x0, box.y1),
            xycoords="figure fraction",
            xytext=(0, points),
            textcoords="offset points",
            fontsize=canvas.SMALL_POINTS + (1 if weight == "bold" else 0),
            fontweight=weight,
            color=colour,
            annotation_clip=False,
        )


def _write_head(figure: Figure, study: MatmulStudy, total_inches: float) -> None:
    """Write the headline, the key to placements, and the legend of devices."""
    matrices = " x ".join(shape_text(shape) for shape in study.shapes)
    devices = f"{study.num_devices} device{'s' * (study.num_devices > 1)}"
    hardware = f"on {devices} of {study.cluster.name}, {study.precision}"
    most = MAX_HEADLINE - len(hardware)
    headline = f"{shorten(matrices, most, placeholder=' ...')} {hardware}"
    left = MARGIN_INCHES / canvas.WIDTH_INCHES
    top = 1 - MARGIN_INCHES / total_inches
    title = figure.text(left, top, headline, fontsize=canvas.TITLE_POINTS, fontweight="bold")
    title.set(color=canvas.INK, va="top")
    top -= 0.25 / total_inches
    key = figure.text(left, top, WHO_HOLDS, fontsize=canvas.TEXT_POINTS, va="top")
    key.set(color=canvas.DARK_GREY)
    shown = min(study.num_devices, len(COLOURS))
    # Colours repeat beyond their number.
    repeats = "..." if study.num_devices > shown else ""
    handles = [Patch(color=_colour(n), label=f"{n}{repeats}") for n in range(shown)]
    figure.legend(
        handles=handles,
        title="device",
        title_fontsize=canvas.SMALL_POINTS,
        loc="upper right",
        bbox_to_anchor=(1, top + 0.04 / total_inches),
        ncols=min(shown, 4),
        fontsize=canvas.SMALL_POINTS,
        frameon=False,
        handlelength=1.0,
        columnspacing=1.0,
    )


def _fractions(
    box_inches: tuple[float, float, float, float], total_inches: float
) -> tuple[float, float, float, float]:
    left, bottom, width, height = box_inches
    across = canvas.WIDTH_INCHES
    return left / across, bottom / total_inches, width / across, height / total_inches


def _colour(device: int) -> str:
    return COLOURS[device % len(COLOURS)]


def _time(time_ps: int) -> str:
    return format_time(time_ps / PS_PER_S)
