"""Canvas of every picture: size, type, colours, titles, and the file."""

from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import Any
from warnings import catch_warnings, filterwarnings

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogFormatter

from meshwright.hwprofiles import Cluster, Offload, StackProfile, counted, format_time
from meshwright.simulator import ResolvedPlan, StepResult, TrainingJob

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 8.0, 5.0, 150
TEXT_POINTS, SMALL_POINTS, TITLE_POINTS = 8.5, 7.5, 11.5
POINTS_PER_INCH = 72
LINE_POINTS = 1.35 * TEXT_POINTS
DETAIL_CHARACTERS = 108

# Okabe and Ito, "Color Universal Design" (2008): told apart by colour-blind readers.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE = "#E69F00", "#D55E00", "#CC79A7"
INK, DARK_GREY, GREY, LIGHT_GREY, WHITE = "#222222", "#555555", "#999999", "#DDDDDD", "#FFFFFF"

# How a legend below a picture looks.
BELOW: dict[str, Any] = {"loc": "outside lower center", "fontsize": TEXT_POINTS, "frameon": False}


class Picture(Figure):
    """A figure that a notebook shows, though no figure manager knows it."""

    def _repr_png_(self) -> bytes:
        """Return the PNG that IPython displays."""
        png = BytesIO()
        save_figure(self, png)
        return png.getvalue()

    def draw(self, renderer: RendererBase) -> None:
        """Draw the figure with its texts as they stand: a name with dollars is no formula.

        Powers of ten on a logarithmic axis are matplotlib's own formulas. A letter that the font
        lacks is an empty box, which says as much as a warning with a line of our code.
        """
        for text in self.findobj(Text):
            text.set_parse_math(False)
        for axes in self.axes:
            for axis in (axes.xaxis, axes.yaxis):
                if isinstance(axis.get_major_formatter(), LogFormatter):
                    for tick in axis.get_major_ticks():
                        tick.label1.set_parse_math(True)
        with catch_warnings():
            filterwarnings("ignore", "Glyph .* missing from")
            super().draw(renderer)


def new_figure() -> Figure:
    """Return an empty figure of 1200 x 750 pixels, known to no figure manager."""
    layout = ConstrainedLayoutEngine(w_pad=0.10, h_pad=0.08, hspace=0.04)
    size = (WIDTH_INCHES, HEIGHT_INCHES)
    return Picture(figsize=size, dpi=DOTS_PER_INCH, facecolor=WHITE, layout=layout)


def save_figure(figure: Figure, path: Path | BytesIO) -> None:
    """Write *figure* as PNG; the same figure gives the same bytes.

    What matplotlib would add by itself, its own version and a date, is left out.
    """
    figure.canvas = FigureCanvasAgg(figure)
    figure.savefig(
        path,
        format="png",
        dpi=DOTS_PER_INCH,
        bbox_inches=figure.bbox_inches,
        metadata={"Software": None, "Date": None},
    )


def write_titles(axes: Axes, headline: str, *details: str) -> None:
    """Write the headline in bold, and details in smaller lines below it."""
    lines = [line for detail in details for line in wrap(detail, DETAIL_CHARACTERS)]
    pad = LINE_POINTS * len(lines) + 9
    axes.set_title(
        headline, loc="left", fontsize=TITLE_POINTS, fontweight="bold", color=INK, pad=pad
    )
    axes.annotate(
        "\n".join(lines),
        (0, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=TEXT_POINTS,
        color=DARK_GREY,
        va="bottom",
    )


def style_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Label both axes and keep the frame to what helps reading."""
    axes.set_xlabel(x_label, fontsize=TEXT_POINTS, color=INK)
    axes.set_ylabel(y_label, fontsize=TEXT_POINTS, color=INK)
    axes.tick_params(labelsize=SMALL_POINTS, colors=INK, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.set_axisbelow(True)


def label_time(axis: Axis, label: str, longest_s: float) -> None:
    """Label an axis whose values are seconds: in ms where all are below a second.

    Args:
        axis: One of a picture's two.
        label: With ``{unit}`` where the unit stands.
        longest_s: The largest value.
    """
    unit, in_unit = ("ms", 1e3) if longest_s < 1 else ("s", 1.0)
    axis.set_label_text(label.format(unit=unit), fontsize=TEXT_POINTS, color=INK)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * in_unit:.6g}"))


def ink_on(colour: str) -> str:
    """Return white or ink, which of them is read better on *colour*.

    By relative luminance, weights and threshold of equal contrast of WCAG 2.1 (1.4.3).

    >>> ink_on(BLUE) == WHITE, ink_on(YELLOW) == INK
    (True, True)
    """
    red, green, blue = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4
        for each in to_rgb(colour)
    )
    return WHITE if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.179 else INK


def describe_job(job: TrainingJob, cluster: Cluster, stack: StackProfile, num_gpus: int) -> str:
    """Return model, cluster, GPUs, batch and software in one line."""
    return f"{describe_task(job, cluster, num_gpus)}, {stack.name}"


def describe_task(job: TrainingJob, cluster: Cluster, num_gpus: int) -> str:
    """Return model, cluster, GPUs and batch in one line."""
    gpus = counted(num_gpus, "GPU")
    return f"{job.model.title} on {cluster.name}, {gpus}, global batch {job.batch_text}"


def describe_plan(plan: ResolvedPlan) -> str:
    """Return the degrees of a layout in one short line."""
    degrees = " ".join(f"{axis}{degree}" for axis, degree in plan.degrees.items())
    return f"{degrees} vpp{plan.num_virtual_stages} mb{plan.microbatch_size}"


def describe_step(step: StepResult) -> tuple[str, str]:
    """Return the two lines that describe the job and the layout of a step."""
    plan = step.plan
    job = describe_job(step.job, step.cluster, step.stack, plan.world_size)
    return job, f"{describe_plan(plan)}, {', '.join(describe_options(plan))}"


def step_headline(step: StepResult) -> str:
    """Return the headline of a step: its time, and its bubble."""
    return f"One training step: {format_time(step.step_time_s)}, {step.bubble_fraction:.1%} idle"


def describe_options(plan: ResolvedPlan) -> list[str]:
    """Return the fields of a layout besides its degrees, each in a few words."""
    options = [f"recompute {plan.recompute}", f"ZeRO-{plan.zero_stage}", plan.schedule]
    if plan.offload is not Offload.NONE:
        options.append(f"offload {plan.offload}")
    if plan.sequence_parallel:
        options.insert(1, "sequence parallel")
    return options
