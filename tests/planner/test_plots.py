"""Pictures show the numbers of the result, say what they are, and come out the same twice."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from meshwright.hwprofiles import (
    GIBI,
    PS_PER_S,
    Precision,
    Recompute,
    StageSplit,
    load_cluster,
    load_stack,
)
from meshwright.planner.plots import (
    plot_breakdown,
    plot_memory_time,
    plot_stage_memory,
    plot_timeline,
    save_figure,
)
from meshwright.planner.plots.boxes import WAIT, Window, column_shares, timeline_layers
from meshwright.planner.plots.memory_time import MARKS
from meshwright.planner.search import search
from meshwright.planner.search.result import (
    FrontierPoint,
    SearchResult,
    SimulatedPlan,
    layout_density,
)
from meshwright.planner.search.varied import SearchedFields
from meshwright.simulator import (
    Category,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    resolve_stages,
    simulate,
)


@cache
def step(
    stack_name: str = "megatron-core",
    *,
    pp: int = 4,
    vpp: int = 1,
    batch: int = 64,
    recompute: Recompute = Recompute.NONE,
) -> StepResult:
    model, stack = load_model("megatron-1.7b"), load_stack(stack_name)
    job = TrainingJob(
        model=model, global_batch_size=batch, seq_len=2048, precision=stack.precisions[-1].storage
    )
    plan = ResolvedPlan(
        tp=2,
        pp=pp,
        dp=4,
        num_virtual_stages=vpp,
        recompute=recompute,
        attention=stack.attention,
        zero_stage=stack.zero_stage,
        schedule="interleaved" if vpp > 1 else "1f1b",
        stages=resolve_stages(model, 2048, pp * vpp, StageSplit.BALANCED),
    )
    return simulate(job, plan, load_cluster("dgx-a100"), stack)


@cache
def fastest_first() -> list[StepResult]:
    modes = load_stack("megatron-core").recompute_modes
    steps = (step(pp=pp, recompute=recompute) for pp in (1, 2, 4) for recompute in modes)
    return sorted(steps, key=lambda each: each.step_ps)


@cache
def search_result() -> SearchResult:
    steps = fastest_first()
    evaluated = [
        SimulatedPlan(
            plan=each.plan,
            step_ps=each.step_ps,
            peak_bytes=each.memory.peak_bytes,
            device_bytes=each.memory.device_bytes,
            fits=each.memory.fits,
        )
        for each in steps
    ]
    evaluated[-1] = replace(evaluated[-1], fits=False)
    places = np.array([(each.device_bytes, each.step_ps) for each in evaluated])
    ends = (min(evaluated, key=lambda each: each.device_bytes), evaluated[0])
    frontier = tuple(
        FrontierPoint(
            plan=each.plan, step_ps=each.step_ps, device_bytes=each.device_bytes, proven=proven
        )
        for each, proven in zip(ends, (False, True), strict=True)
    )
    first = steps[0]
    return SearchResult(
        job=first.job,
        cluster=first.cluster,
        stack=first.stack,
        num_gpus=32,
        space_size=50,
        looked_at=50,
        feasible=40,
        simulated=len(evaluated),
        optimal=True,
        bound_gap_fraction=0.0,
        rejections={},
        varied=SearchedFields((), ()),
        plans=(first,),
        like=((),),
        evaluated=tuple(evaluated),
        frontier=frontier,
        density=layout_density(*places.T),
    )


def nothing_fits() -> SearchResult:
    found = search_result()
    evaluated = tuple(replace(each, fits=False) for each in found.evaluated)
    return replace(
        found, plans=(), like=(), frontier=(), evaluated=evaluated, density=None, optimal=False
    )


FIGURES: dict[str, Callable[[], Figure]] = {
    "memory-time": lambda: plot_memory_time(search_result()),
    "memory-time-nothing-fits": lambda: plot_memory_time(nothing_fits()),
    "stage-memory": lambda: plot_stage_memory(step()),
    "stage-memory-of-one": lambda: plot_stage_memory(step(pp=1)),
    "timeline": lambda: plot_timeline(step(vpp=2)),
    "timeline-enlarged": lambda: plot_timeline(step(batch=2048)),
    "timeline-blocking": lambda: plot_timeline(step("megatron-lm-2021")),
    "timeline-of-one": lambda: plot_timeline(step(pp=1)),
    "breakdown": lambda: plot_breakdown(step()),
    "breakdown-of-two": lambda: plot_breakdown(step(), step("megatron-lm-2021")),
}


def texts(figure: Figure) -> list[Text]:
    """Return what is written, without tick labels: those outside the axes are never drawn."""
    found = cast("Sequence[Text]", figure.findobj(Text))
    ticks = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
    }
    return [each for each in found if each not in ticks and each.get_text().strip()]


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_same_result_gives_the_same_png_of_the_promised_size(name: str, tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        save_figure(FIGURES[name](), path)
    data = paths[0].read_bytes()
    assert data == paths[1].read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) == (1200, 750)
    assert b"Software" not in data
    assert len(data) > 10_000


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_axis_is_labelled_with_its_unit_and_every_figure_titled(name: str) -> None:
    figure = FIGURES[name]()
    for axes in figure.axes:
        labels = axes.get_xlabel() + axes.get_ylabel()
        assert any(unit in labels for unit in ("(s)", "(ms)", "(GiB)", "layouts in a cell"))
    assert figure.axes[0].get_title(loc="left")
    named = [*texts(figure), *figure.axes[0].get_yticklabels()]
    words = " ".join(text.get_text() for text in named)
    assert "{unit}" not in words
    assert "dgx-a100" in words
    assert "GPUs" in words


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_no_text_leaves_the_picture_and_titles_do_not_overlap(name: str) -> None:
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    page = figure.bbox
    for text in texts(figure):
        box = text.get_window_extent()
        assert page.x0 <= box.x0 <= box.x1 <= page.x1, text.get_text()
        assert page.y0 <= box.y0 <= box.y1 <= page.y1, text.get_text()
    axes = figure.axes[0]
    headline = next(t for t in texts(figure) if t.get_text() == axes.get_title(loc="left"))
    details = axes.texts[[t.get_verticalalignment() for t in axes.texts].index("bottom")]
    others = [headline, *(t for legend in figure.legends for t in legend.get_texts())]
    assert not any(details.get_window_extent().overlaps(t.get_window_extent()) for t in others)


def bars(axes: Axes) -> list[BarContainer]:
    return [each for each in axes.containers if isinstance(each, BarContainer)]


def test_stacked_stage_heights_are_the_peak_and_the_device_bytes() -> None:
    result = step()
    stacks = bars(plot_stage_memory(result).axes[0])
    for stage in result.memory.by_stage:
        heights = [parts.patches[stage.stage].get_height() * GIBI for parts in stacks]
        assert sum(heights[:5]) == pytest.approx(stage.peak_bytes)
        assert sum(heights) == pytest.approx(result.memory.stage_device_bytes(stage))
        assert heights[0] == pytest.approx(stage.parameters_bytes)
        assert heights[3] == pytest.approx(stage.activations_bytes)


def test_worst_stage_and_limits_are_named() -> None:
    result = step()
    words = " ".join(text.get_text() for text in plot_stage_memory(result).axes[0].texts)
    assert f"fullest: rank {result.memory.worst_stage.stage}" in words
    assert "capacity\n80 GiB" in words
    assert "usable\n" in words


def test_breakdown_widths_are_the_categories_without_the_zero_ones() -> None:
    steps = (step(), step("megatron-lm-2021"))
    figure = plot_breakdown(*steps)
    shown = [category for category in Category if any(s.breakdown_ps[category] for s in steps)]
    assert len(shown) < len(Category)
    for category, parts in zip(shown, bars(figure.axes[0]), strict=True):
        widths_ps = [patch.get_width() * PS_PER_S for patch in parts.patches]
        assert widths_ps == pytest.approx([each.breakdown_ps[category] for each in steps])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "matrix products"
    assert labels[-1] == "idle (bubble)"


def test_breakdown_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        plot_breakdown()


@pytest.mark.parametrize("stack_name", ["megatron-core", "megatron-lm-2021"])
def test_white_area_of_the_timeline_is_the_measured_bubble(stack_name: str) -> None:
    result = step(stack_name, vpp=3)
    drawn_s = sum(
        box.end_s - box.start_s
        for layer in timeline_layers(result)
        if not layer.is_collective
        for box in layer.boxes
    )
    idle_fraction = 1 - drawn_s / result.plan.pp / result.step_time_s
    assert idle_fraction == pytest.approx(result.bubble_fraction, abs=1e-9)


def test_timeline_draws_every_pass_once_with_one_collection_a_colour() -> None:
    result = step(vpp=2)
    axes = plot_timeline(result).axes[0]
    shapes = {
        str(each.get_label()): each for each in axes.collections if isinstance(each, PolyCollection)
    }
    computed = [layer for layer in timeline_layers(result) if not layer.is_collective]
    assert list(shapes) == [layer.name for layer in computed]  # collectives are tiny: an image
    for layer in computed:
        assert len(shapes[layer.name].get_paths()) == len(layer.boxes)
        if "virtual stage" in layer.name:  # the first passes are cut by what they wait for
            passes = {(box.rank, box.number) for box in layer.boxes}
            assert len(passes) == result.plan.pp * result.num_microbatches
    numbers = [text.get_text() for text in axes.texts if text.get_text().isdigit()]
    assert len(numbers) > result.plan.pp * result.num_microbatches
    assert set(numbers) <= {str(index) for index in range(result.num_microbatches)}


def test_image_of_tiny_passes_keeps_every_second() -> None:
    result = step(batch=2048)
    window = Window(0.0, result.step_time_s)
    shares = sum(
        column_shares(layer.boxes, window, result.plan.pp, 1000)
        for layer in timeline_layers(result)
        if not layer.is_collective
    )
    assert np.max(shares) == pytest.approx(1.0)
    assert 1 - np.mean(shares) == pytest.approx(result.bubble_fraction, abs=1e-9)
    pixels = plot_timeline(result).axes[0].images[0].get_array()
    assert pixels is not None
    assert pixels.shape[2] == 3


def test_long_timeline_also_shows_both_ends_enlarged() -> None:
    result = step(batch=2048)
    whole, start, end = plot_timeline(result).axes
    assert whole.get_xlim() == pytest.approx((0, result.step_time_s))
    assert start.get_xlim()[0] == 0
    assert start.get_xlim()[1] < 0.1 * result.step_time_s
    assert end.get_xlim()[0] > 0.9 * result.step_time_s
    assert end.get_xlim()[1] == pytest.approx(result.step_time_s)


def test_memory_time_shows_every_layout_and_tells_proven_points_apart() -> None:
    result = search_result()
    axes = plot_memory_time(result).axes[0]
    clouds = [each for each in axes.collections if isinstance(each, PathCollection)]
    counts = [len(each.get_offsets()) for each in clouds]  # type: ignore[arg-type]
    assert sum(counts) == len(result.evaluated) + len(result.frontier)
    assert counts[-2:] == [1, 1]
    hollow, filled = (np.asarray(each.get_facecolor())[0, :3] for each in clouds[-1:-3:-1])
    assert hollow.tolist() == [1, 1, 1]
    (proven,) = (each for each in result.frontier if each.proven)
    assert filled.tolist() == list(to_rgb(MARKS[proven.plan.recompute][0]))
    note = next(text.get_text() for text in axes.texts if text.get_text().startswith("best:"))
    plan = result.plans[0].plan
    assert f"tp{plan.tp} pp{plan.pp} dp{plan.dp} vpp1 mb1" in note


def test_memory_time_names_what_a_device_has_and_what_of_it_may_be_used() -> None:
    for result, limits in (
        (search_result(), ["usable", "capacity"]),
        (nothing_fits(), ["capacity"]),
    ):
        figure = plot_memory_time(result)
        legends = [
            each for each in (*figure.legends, *(a.get_legend() for a in figure.axes)) if each
        ]
        words = [text.get_text() for legend in legends for text in legend.get_texts()]
        named = [each.split()[0] for each in words if each.endswith("GiB")]
        assert named == limits


def test_density_is_of_every_feasible_layout() -> None:
    """What was simulated lies in a cell of its memory, and no cell is slower than that."""
    job = TrainingJob(
        model=load_model("gpt2"), global_batch_size=16, seq_len=1024, precision=Precision.BF16
    )
    found = search(job, load_cluster("dgx-a100"), load_stack("megatron-core"), 4)
    density = found.density
    assert density is not None
    counts = np.array(density.counts)
    assert counts.sum() + density.num_slower == found.feasible > 1000
    for each in found.evaluated:
        column = np.searchsorted(density.memory_edges_bytes, each.device_bytes, "right") - 1
        least_ps = density.time_edges_ps[int(np.flatnonzero(counts[:, column])[0])]
        assert least_ps <= each.step_ps
    shades = plot_memory_time(found).axes[0].collections[0].get_array()
    assert shades is not None
    assert shades.sum() == counts.sum()


def test_fsdp_timeline_shows_its_collectives_and_what_they_delay() -> None:
    job = TrainingJob(
        model=load_model("gpt2"), global_batch_size=16, seq_len=1024, precision=Precision.BF16
    )
    plan = ResolvedPlan(dp=8, zero_stage=3, stages=(12,))
    result = simulate(job, plan, load_cluster("dgx-a100"), load_stack("fsdp"))
    boxes = {layer.name: layer.boxes for layer in timeline_layers(result)}
    waited_ps = sum(box.end_s - box.start_s for box in boxes[WAIT]) * PS_PER_S
    assert waited_ps == pytest.approx(result.breakdown_ps[Category.DP_COMM])
    # Two microbatches; the root unit, which has the ends, stays from forward to backward.
    gathers, reductions = boxes["parameter gather"], boxes["gradient reduction"]
    assert len(gathers) == 2 * (2 * 12 + 1)
    assert len(reductions) == 2 * (12 + 1)
    whole = plot_timeline(result).axes[0]
    ticks = [label.get_text() for label in whole.get_yticklabels()]
    assert ticks == ["computation", "collectives"]


def test_only_the_plots_import_matplotlib() -> None:
    code = "import sys, meshwright.planner; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plots_leave_no_figure_behind_in_pyplot() -> None:
    code = (
        "import sys, meshwright.planner.plots, meshwright.planner.plots.timeline; "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
