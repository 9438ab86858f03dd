"""Breakdown of the time of steps: one stacked bar a step."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshwright.hwprofiles import PS_PER_S, counted, format_time
from meshwright.planner.plots import canvas
from meshwright.simulator import Category, StepResult

# Work in cool colours, communication in warm ones, the rest in greys; (face, hatch).
STYLES: dict[Category, tuple[str, str]] = {
    Category.MATMUL: (canvas.BLUE, ""),
    Category.ATTENTION: (canvas.SKY, ""),
    Category.ELEMENTWISE: (canvas.GREEN, ""),
    Category.KERNEL_LAUNCH: ("#8FD3BE", ""),
    Category.HOST: ("#B7D9F2", "////"),
    Category.RECOMPUTE: (canvas.BLUE, "////"),
    Category.TP_COMM: (canvas.ORANGE, ""),
    Category.CP_COMM: (canvas.YELLOW, "////"),
    Category.EP_COMM: (canvas.VERMILION, "////"),
    Category.PP_COMM: (canvas.YELLOW, ""),
    Category.DP_COMM: (canvas.VERMILION, ""),
    Category.HOST_COPY: (canvas.ORANGE, "////"),
    Category.OPTIMIZER: (canvas.PURPLE, ""),
    Category.STEP_OVERHEAD: (canvas.DARK_GREY, ""),
    Category.BUBBLE: (canvas.WHITE, "...."),
}
TITLES: dict[Category, str] = {
    Category.MATMUL: "matrix products",
    Category.ATTENTION: "attention",
    Category.ELEMENTWISE: "element-wise kernels",
    Category.KERNEL_LAUNCH: "kernel launch gaps",
    Category.HOST: "host",
    Category.RECOMPUTE: "recompute",
    Category.TP_COMM: "tensor-parallel communication",
    Category.CP_COMM: "context-parallel communication",
    Category.EP_COMM: "expert-parallel communication",
    Category.PP_COMM: "pipeline communication",
    Category.DP_COMM: "data-parallel communication",
    Category.HOST_COPY: "copies from and to the host",
    Category.OPTIMIZER: "optimizer",
    Category.STEP_OVERHEAD: "step overhead",
    Category.BUBBLE: "idle (bubble)",
}
LABELLED_FRACTION = 0.045


def plot_breakdown(*steps: StepResult, names: Sequence[str] = ()) -> Figure:
    """Return one horizontal bar a step, split by what ranks spend their time on.

    The parts are averages over pipeline ranks and add up to the step; one that is zero in
    every step is left out.

    Args:
        steps: One or more.
        names: What the bars of several are called, above their layouts.

    Raises:
        ValueError: If no step is given.
    """
    if not steps:
        raise ValueError("plot_breakdown needs at least one step")
    figure = canvas.new_figure()
    axes = figure.add_subplot()
    categories = [each for each in Category if any(step.breakdown_ps[each] > 0 for step in steps)]
    left_s = [0.0] * len(steps)
    for category in categories:
        widths_s = [step.breakdown_ps[category] / PS_PER_S for step in steps]
        _draw_part(axes, category, widths_s, left_s, steps)
        left_s = [left + width for left, width in zip(left_s, widths_s, strict=True)]
    _finish(axes, steps, names)
    # Labels of a single step have its times and shares.
    columns = 3 if len(steps) > 1 else 2
    figure.legend(ncols=columns, handlelength=2.2, handleheight=1.2, **canvas.BELOW)
    return figure


def _draw_part(
    axes: Axes,
    category: Category,
    widths_s: list[float],
    left_s: list[float],
    steps: tuple[StepResult, ...],
) -> None:
    face, hatch = STYLES[category]
    label = TITLES[category]
    if len(steps) == 1:
        fraction = widths_s[0] / steps[0].step_time_s
        label = f"{label}: {format_time(widths_s[0])} ({fraction:.1%})"
    bars = axes.barh(
        range(len(steps)),
        widths_s,
        left=left_s,
        height=0.62,
        color=face,
        hatch=hatch,
        edgecolor=canvas.GREY if face == canvas.WHITE else canvas.WHITE,
        linewidth=0.6,
        label=label,
    )
    longest_s = max(step.step_time_s for step in steps)
    texts = [
        f"{width / step.step_time_s:.0%}" if width / longest_s >= LABELLED_FRACTION else ""
        for width, step in zip(widths_s, steps, strict=True)
    ]
    colour = canvas.ink_on(face)
    for text in axes.bar_label(
        bars, texts, label_type="center", fontsize=canvas.TEXT_POINTS, color=colour
    ):
        # A hatch would run through the number.
        if hatch:
            text.set_bbox({"facecolor": face, "edgecolor": "none", "pad": 1.2})


def _finish(axes: Axes, steps: tuple[StepResult, ...], names: Sequence[str]) -> None:
    """Name the bars, scale the axes and write the title."""
    over = "devices" if any(step.lanes for step in steps) else "pipeline ranks"
    canvas.style_axes(axes, "", "")
    axes.grid(axis="x", color=canvas.LIGHT_GREY, linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    longest_s = max(step.step_time_s for step in steps)
    label = f"Time of one training step ({{unit}}), average over {over}"
    canvas.label_time(axes.xaxis, label, longest_s)
    if len(steps) == 1:
        axes.set_xlim(0, longest_s * 1.01)
        axes.set_ylim(0.45, -0.45)
        axes.set_yticks([])
        headline = f"Where the {format_time(longest_s)} of a training step go"
        canvas.write_titles(axes, headline, *canvas.describe_step(steps[0]))
        return
    axes.set_xlim(0, longest_s * 1.1)
    axes.set_ylim(len(steps) - 0.5, -0.5)
    for row, step in enumerate(steps):
        axes.annotate(
            format_time(step.step_time_s),
            (step.step_time_s, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=canvas.TEXT_POINTS,
        )
    details, described = _name_bars(steps, names)
    axes.set_yticks(range(len(steps)), described)
    note = "Percentages are shares of the bar's own step"
    headline = f"Where the time of {len(steps)} training steps goes"
    canvas.write_titles(axes, headline, *details, note)


def _name_bars(steps: tuple[StepResult, ...], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the lines that all steps share, and the label of each bar."""
    tasks = [canvas.describe_task(step.job, step.cluster, step.plan.world_size) for step in steps]
    stacks = [step.stack.name for step in steps]
    options = [canvas.describe_options(step.plan) for step in steps]
    common = [each for each in options[0] if all(each in others for others in options)]
    details, labels = [], [[name] for name in names] or [[] for _ in steps]
    if len(set(tasks)) == 1:
        one_stack = len(set(stacks)) == 1
        details.append(f"{tasks[0]}, {stacks[0]}" if one_stack else tasks[0])
    for index, (step, label) in enumerate(zip(steps, labels, strict=True)):
        if len(set(tasks)) > 1:
            gpus = counted(step.plan.world_size, "GPU")
            label.append(f"{step.job.model.name}, {gpus}, {step.cluster.name}")
        if len(set(stacks)) > 1 and stacks[index] not in label:
            label.append(stacks[index])
        own = [each for each in options[index] if each not in common]
        label += [canvas.describe_plan(step.plan), *([", ".join(own)] if own else [])]
    if common:
        details.append(f"All: {', '.join(common)}")
    return details, ["\n".join(label) for label in labels]
