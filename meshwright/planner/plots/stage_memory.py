"""Memory of each pipeline stage at its fullest instant, against what a device has."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from meshwright.hwprofiles import GIBI, PS_PER_S
from meshwright.planner.plots import canvas
from meshwright.simulator import StageMemory, StepResult

COLOURS = {
    "parameters": canvas.BLUE,
    "gradients": canvas.SKY,
    "optimizer_states": canvas.GREEN,
    "activations": canvas.ORANGE,
    "buffers": canvas.PURPLE,
}
FEW_STAGES = 12


def plot_stage_memory(step: StepResult) -> Figure:
    """Return stacked bars of the live bytes of each pipeline rank when it is fullest.

    The hollow part on top is what the allocator and the context add: with it, a bar is what
    the device must hold.
    """
    figure = canvas.new_figure()
    axes = figure.add_subplot()
    stages = step.memory.by_stage
    numbers = [stage.stage for stage in stages]
    bottom_gib = [0.0] * len(stages)
    for name in stages[0].terms:
        heights_gib = [stage.terms[name] / GIBI for stage in stages]
        colour, label = COLOURS.get(name, canvas.YELLOW), name.replace("_", " ")
        axes.bar(numbers, heights_gib, 0.82, bottom_gib, color=colour, label=label)
        bottom_gib = [low + high for low, high in zip(bottom_gib, heights_gib, strict=True)]
    # Each rank has its own allocator: what it reserves follows its own peak.
    tops_gib = [step.memory.stage_device_bytes(stage) / GIBI for stage in stages]
    axes.bar(
        numbers,
        [top - low for top, low in zip(tops_gib, bottom_gib, strict=True)],
        0.82,
        bottom_gib,
        facecolor=canvas.WHITE,
        edgecolor=canvas.GREY,
        linewidth=0.7,
        label="allocator, context, communicators",
    )
    top_gib = max(*tops_gib, step.memory.capacity_bytes / GIBI)
    _draw_limits(axes, step)
    _mark_worst(axes, step, max(tops_gib), top_gib)
    _finish(axes, step, top_gib)
    figure.legend(*axes.get_legend_handles_labels(), ncols=4, **canvas.BELOW)
    return figure


def _draw_limits(axes: Axes, step: StepResult) -> None:
    """Draw what a device has and what of it may be used, named in the right margin."""
    memory = step.memory
    limits = [("usable", memory.usable_bytes, "--"), ("capacity", memory.capacity_bytes, "-")]
    if memory.usable_bytes == memory.capacity_bytes:
        limits = limits[1:]
    largest_bytes = max(size for _, size, _ in limits)
    for name, size_bytes, style in limits:
        axes.axhline(size_bytes / GIBI, color=canvas.VERMILION, linewidth=1.3, linestyle=style)
        axes.annotate(
            f"{name}\n{size_bytes / GIBI:.4g} GiB",
            (1, size_bytes / GIBI),
            xytext=(5, 1 if size_bytes == largest_bytes else -1),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="bottom" if size_bytes == largest_bytes else "top",
            fontsize=canvas.SMALL_POINTS,
            color=canvas.VERMILION,
        )


def _mark_worst(axes: Axes, step: StepResult, worst_gib: float, top_gib: float) -> None:
    """Point at the fullest rank and say when it is fullest."""
    worst, owner = step.memory.worst_stage, "device" if step.lanes else "rank"
    last = len(step.memory.by_stage) - 1
    position = worst.stage / last if last else 0.5
    # The text runs towards the middle of the picture; the arrow leaves from its outer end.
    side, anchor = ("left", 0.02) if position < 1 / 3 else ("center", 0.5)
    if position > 2 / 3:
        side, anchor = "right", 0.98
    axes.annotate(
        f"fullest: {owner} {worst.stage}, {worst.peak_bytes / GIBI:.1f} GiB of live tensors, "
        f"{worst_gib:.1f} GiB on the device,\n"
        f"{_peak_text(step, worst)}",
        (worst.stage, worst_gib),
        xytext=(worst.stage, 1.17 * top_gib),
        fontsize=canvas.TEXT_POINTS,
        color=canvas.INK,
        ha=side,
        va="center",
        arrowprops={
            "arrowstyle": "-|>",
            "color": canvas.INK,
            "shrinkB": 1,
            "relpos": (anchor, 0),
        },
    )


def _peak_text(step: StepResult, stage: StageMemory) -> str:
    """Return the instant of the peak in words."""
    when = f"{stage.peak_time_ps / PS_PER_S:.4g} s into the step"
    for action in () if step.work is None else step.work.actions[stage.stage]:
        if str(action) == stage.peak_moment:
            return f"in the {action.phase.label} pass of microbatch {action.microbatch}, {when}"
    return f"in the {stage.peak_moment}, {when}"


def _finish(axes: Axes, step: StepResult, top_gib: float) -> None:
    """Scale and label the axes and write the title."""
    stages = step.memory.by_stage
    owner, short = ("device", "device") if step.lanes else ("pipeline rank", "rank")
    label = f"Memory at the {short}'s fullest instant (GiB)"
    canvas.style_axes(axes, owner.capitalize(), label)
    # A few bars alone would be as wide as the picture.
    margin = 1.5 if len(stages) <= 4 else 0.0
    axes.set_xlim(-0.6 - margin, len(stages) - 0.4 + margin)
    axes.set_ylim(0, 1.26 * top_gib)
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True, min_n_ticks=1))
    if len(stages) <= FEW_STAGES:
        axes.set_xticks([stage.stage for stage in stages])
    axes.grid(axis="y", color=canvas.LIGHT_GREY, linewidth=0.6)
    verdict = "fits" if step.memory.fits else "does not fit"
    headline = f"Memory by {owner}: the plan {verdict}"
    canvas.write_titles(axes, headline, *canvas.describe_step(step))
