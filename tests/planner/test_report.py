"""Results as text."""

from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from meshwright.hwprofiles import Attention, Precision, load_cluster, load_stack
from meshwright.planner import FrontierPoint, Nearest, SearchResult, SpaceLimits
from meshwright.planner.reports.catalogue import (
    clusters_table,
    models_table,
    schedules_table,
    stacks_table,
)
from meshwright.planner.reports.money import Budget
from meshwright.planner.reports.search import MAX_FRONTIER_LINES, proof_text, search_report
from meshwright.planner.reports.step import WIDTH, format_stages, step_report
from meshwright.planner.search import search
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, load_model, simulate

CLUSTER = load_cluster("dgx-a100")
STACK = load_stack("megatron-core")
JOB = TrainingJob(model=load_model("gpt2"), global_batch_size=16, seq_len=1024)
PLAN = ResolvedPlan(tp=2, pp=2, dp=2, zero_stage=1, attention=Attention.FLASH, stages=(6, 6))


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(JOB, CLUSTER, STACK, 8, limits=SpaceLimits(max_tp=2), top=3)


def text_of(report: RenderableType, width: int = WIDTH) -> str:
    console = Console(width=width, markup=False, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(report)
    return capture.get()


def test_step_report_holds_the_figures_of_the_result() -> None:
    result = simulate(JOB, PLAN, CLUSTER, STACK)
    text = text_of(step_report(result, Budget(tokens=1e9, price_usd_per_gpu_hour=2.0)))
    assert f"MFU {result.mfu_fraction:.1%}" in text
    assert f"{result.bubble_fraction:.1%} measured idle" in text
    assert f"{result.schedule_bubble_fraction:.1%} closed form" in text
    assert f"{result.memory.device_bytes / 2**30:,.2f}" in text
    assert "1 B tokens" in text
    assert "USD" in text
    for warning in result.warnings:
        assert f"warning: {warning}" in " ".join(text.split())


def test_step_report_says_what_a_plan_wants_of_gradients() -> None:
    plan = ResolvedPlan(
        dp=8,
        attention=Attention.FLASH,
        stages=(12,),
        gradient_precision=Precision.FP32,
        reduce_precision=Precision.FP16,
        sync_each_microbatch=True,
    )
    result = simulate(JOB, plan, CLUSTER, load_stack("ddp"))
    text = text_of(step_report(result))
    assert "gradients   reduced in fp16, sync_each_microbatch=yes" in text
    assert "gradients   kept" not in text_of(step_report(simulate(JOB, PLAN, CLUSTER, STACK)))


def test_step_report_says_which_peak_a_share_is_of() -> None:
    peaks = []
    for precision in (Precision.FP8, Precision.BF16):
        job = replace(JOB, precision=precision)
        text = text_of(step_report(simulate(job, PLAN, load_cluster("dgx-h100"), STACK)))
        peaks.append("of the fp8 peak, " in text)
        assert max(map(len, text.splitlines())) <= WIDTH
    assert peaks == [True, False]


def test_step_report_of_long_stage_lists_stays_within_its_width() -> None:
    plan = replace(PLAN, pp=12, dp=1, tp=1, stages=(1,) * 12)
    text = text_of(step_report(simulate(JOB, plan, CLUSTER, STACK)))
    assert "12 x 1 layers" in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((12,), "12 layers"),
        ((1,), "1 layer"),
        ((3, 3, 2), "3 3 2 layers"),
        ((1,) * 31 + (2,) * 32 + (1,), "31 x 1, 32 x 2, 1 x 1 layers"),
    ],
)
def test_stages_are_grouped_in_order(stages: tuple[int, ...], expected: str) -> None:
    assert format_stages(stages) == expected


def test_markup_in_names_is_printed_as_it_is() -> None:
    model = JOB.model.model_copy(update={"name": "[bold]x[/bold]"})
    result = simulate(replace(JOB, model=model), PLAN, CLUSTER, STACK)
    assert "[bold]x[/bold]" in text_of(step_report(result))


def test_search_report_has_a_row_a_plan_and_the_proof(found: SearchResult) -> None:
    text = text_of(search_report(found, Budget(tokens=1e12, price_usd_per_gpu_hour=2.0)), 130)
    assert proof_text(found) in text
    assert "cost USD" in text
    for plan in found.plans:
        assert f"{plan.step_time_s:.4g}" in text
    for reason, count in found.rejections.items():
        assert f"{count:,} {reason}" in text


def test_proof_says_how_far_the_optimum_may_be(found: SearchResult) -> None:
    assert "proven optimal over" in proof_text(found)
    gap = replace(found, optimal=False, bound_gap_fraction=0.023)
    assert proof_text(gap).startswith("within 2.3% of the optimum")


def test_search_report_without_a_plan_says_what_is_nearest(found: SearchResult) -> None:
    nearest = Nearest(plan=PLAN, lacks_bytes=3 * 2**30, changes=("16 GPUs hold it",))
    empty = replace(found, plans=(), frontier=(), optimal=False, nearest=nearest)
    text = text_of(search_report(empty), 130)
    assert "none of" in text
    assert "tp=2 pp=2 dp=2" in text
    assert "3 GiB" in text
    assert "16 GPUs hold it" in text


def test_frontier_is_shown_in_short_with_both_ends(found: SearchResult) -> None:
    points = tuple(
        FrontierPoint(
            plan=PLAN,
            step_ps=(100 - n) * 10**12,
            device_bytes=n * 2**30,
            proven=n == 1,
            bound_gap_fraction=0.0 if n == 1 else 0.03,
        )
        for n in range(1, 41)
    )
    text = text_of(search_report(replace(found, frontier=points, num_below=2)), 130)
    assert "left out: 2 layouts below 1.0 GiB" in text
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if "memory against time" in line)
    shown = [line.split() for line in lines[start + 3 : start + 3 + MAX_FRONTIER_LINES]]
    assert shown[0][:2] == ["1.0", "99"]
    assert shown[0][-1] == "yes"
    assert shown[-1][:2] == ["40.0", "60"]
    assert shown[-1][-2:] == ["within", "3.0%"]
    assert lines[start].endswith(f"in both; {MAX_FRONTIER_LINES} shown")


def test_a_curve_of_which_all_is_proven_has_no_column_for_it(found: SearchResult) -> None:
    point = FrontierPoint(plan=PLAN, step_ps=10**12, device_bytes=2**30, proven=True)
    text = text_of(search_report(replace(found, frontier=(point,))), 130)
    *_, curve = text.partition("memory against time, ")
    assert curve.startswith("1 layout that no other beats in both, proven\n")
    assert "yes" not in curve.splitlines()[3]


def test_facts_of_a_cluster_have_units_and_the_sources_of_its_parts() -> None:
    text = text_of(clusters_table("dgx-a100"))
    assert "312 TFLOP/s" in text
    assert "80 GiB" in text
    assert "300 GB/s" in text
    for part in ("device.gemm.source", "intra_node.source", "inter_node.source"):
        assert part in text


def test_facts_of_a_model_a_stack_and_a_schedule() -> None:
    assert "124,439,808" in text_of(models_table("gpt2"))
    assert "fitted_source" in text_of(stacks_table("megatron-core"))
    assert "fp32/fp32, bf16/bf16, fp16/fp16" in text_of(stacks_table("megatron-core"))
    assert "2104.04473" in text_of(schedules_table("interleaved"))


def test_unknown_name_is_refused() -> None:
    with pytest.raises(PlanError, match="nearest: gpt2"):
        models_table("gtp2")


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_cuts_nothing_off(found: SearchResult, width: int) -> None:
    for report in (search_report(found), step_report(found.plans[0])):
        text = text_of(report, width)
        assert "\u2026" not in text
        assert max(map(len, text.splitlines())) <= width
    assert "bubble" in text_of(search_report(found), 130)


def test_what_a_search_holds_is_listed_by_reason() -> None:
    one = search(JOB, CLUSTER, load_stack("torchtitan@0.2"), 8, limits=SpaceLimits(tp=(2,)), top=1)
    said = {line.strip() for line in text_of(search_report(one)).splitlines()}
    assert said >= {
        "held      tp=2 (asked for)",
        "held      recompute_layers (ask by value)",
        "held      offload=none (ask with --also)",
    }
