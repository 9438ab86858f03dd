"""What experts cost beside plain products: weights, starts, dispatch, and a hottest one."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest

from meshwright.hwprofiles import (
    Attention,
    Device,
    Dispatcher,
    Precision,
    load_cluster,
    load_device,
    load_stack,
)
from meshwright.simulator import CostModel, PlanError, ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.blocks import BlockShape, Gemm, MemoryBound, walk
from meshwright.simulator.blocks.fp8_casts import num_linear_weights
from meshwright.simulator.blocks.parts import hottest_share
from meshwright.simulator.costs import Category
from meshwright.simulator.costs.collectives import dispatch_cost, mean_destinations
from meshwright.simulator.costs.compute import gemm_cost
from meshwright.simulator.graph import BlockMemory, Kind, Phase, Product, Tensor, Traffic, Transfer
from meshwright.simulator.layout import ExpertAxis, Mesh, stack_refusal
from meshwright.simulator.model import EXPERT_LAYER, Experts
from meshwright.simulator.simulation import simulate

GOLDEN = Path(__file__).parents[1] / "golden"
MIXTRAL = load_model("mixtral-8x7b")
JOB = TrainingJob(model=MIXTRAL, global_batch_size=16, seq_len=4096)
PLAN = ResolvedPlan(dp=8, ep=8, zero_stage=1, attention=Attention.FLASH, stages=(32,))
STACK = load_stack("megatron-core")


def golden(name: str) -> list[dict[str, str]]:
    with (GOLDEN / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def brute_force(experts: Experts, num_parts: int) -> Fraction:
    """Count the parts of every choice of groups and of experts within them."""
    size = experts.num_experts // experts.num_groups
    part, found = experts.num_experts // num_parts, []
    for groups in combinations(range(experts.num_groups), experts.groups_per_token):
        known = [each for each in range(experts.num_experts) if each // size in groups]
        found += [
            len({each // part for each in chosen})
            for chosen in combinations(known, experts.experts_per_token)
        ]
    return Fraction(sum(found), len(found))


@pytest.mark.parametrize(("groups", "of_token"), [(1, 1), (4, 2), (4, 3), (2, 1)])
@pytest.mark.parametrize("num_parts", [2, 4, 8, 16])
def test_a_token_is_sent_to_as_many_parts_as_counted(
    groups: int, of_token: int, num_parts: int
) -> None:
    experts = Experts(
        num_experts=16,
        experts_per_token=3,
        hidden_size=8,
        num_groups=groups,
        groups_per_token=of_token,
    )
    assert mean_destinations(experts, num_parts) == pytest.approx(
        float(brute_force(experts, num_parts))
    )


def test_dispatch_takes_as_long_as_published() -> None:
    """Nothing is fitted to these times: links and cards are those of the all-to-all."""
    model = load_model("deepseek-v3")
    experts = model.experts  # type: ignore[union-attr]
    errors = []
    for row in golden("expert_dispatch.csv"):
        cluster, ranks = load_cluster(row["cluster"]), int(row["ranks"])
        mesh = Mesh(dp=ranks, experts=(1, ranks), node_size=cluster.devices_per_node)
        span = mesh.span(ExpertAxis.EP)
        size = 4096 * 8 * 7168 * 2
        found = dispatch_cost(size, span, cluster, experts, Dispatcher.HYBRIDEP)
        published = (float(row["dispatch_us"]) + float(row["combine_us"])) / 2
        errors.append(found.time_ps / 1e6 / published - 1)
        extrapolated = dispatch_cost(size, span, cluster, experts, Dispatcher.DEEPEP)
        assert extrapolated.time_ps == found.time_ps
    assert fmean(map(abs, errors)) < 0.09
    assert max(map(abs, errors)) < 0.23


def errors_of(rows: list[dict[str, str]], device: Device, launch_s: float) -> Iterator[float]:
    for row in rows:
        batch, m, n, k = (int(row[key]) for key in ("experts", "rows", "outputs", "inputs"))
        weights = batch * n * k
        gemm = {
            "forward": Gemm("y", m, n, k, batch, rows="m", weight_bytes=2 * weights),
            "input": Gemm("y", m, k, n, batch, rows="m", weight_bytes=2 * weights),
            "weight": Gemm("y", n, k, m, batch, rows="k", weight_bytes=8 * weights),
        }[row["product"]]
        cost = gemm_cost(gemm, device, Precision.BF16, launch_s)
        peak = device.peak_flops_per_s[Precision.BF16]
        yield cost.time_ps / 1e12 * peak * float(row["peak_fraction"]) / gemm.flops - 1


@pytest.mark.parametrize(
    ("device", "with_it", "without"), [("b200", 0.11, 0.32), ("a100-pcie-80gb", 0.05, 0.07)]
)
def test_products_of_experts_take_as_long_as_timed(
    device: str, with_it: float, without: float
) -> None:
    rows = [row for row in golden("grouped_products.csv") if row["device"] == device]
    known = load_device(device)
    assert fmean(map(abs, errors_of(rows, known, STACK.expert_launch_s))) < with_it
    plain = known.model_copy(update={"gemm": known.gemm.model_copy(update={"grouped": None})})
    assert fmean(map(abs, errors_of(rows, plain, 0.0))) > without


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("imbalance", [1.0, 1.5, 4.0])
def test_the_hottest_rank_has_what_the_others_lack(ranks: int, imbalance: float) -> None:
    experts = Experts(num_experts=8, experts_per_token=2, hidden_size=64)
    share = hottest_share(experts, ranks, imbalance)
    cold = Fraction(8 - Fraction(imbalance), 7)
    loads = [Fraction(imbalance), *[cold] * 7]
    assert share == sum(loads[: 8 // ranks]) / (8 // ranks)
    assert sum(loads) == 8


def walked(imbalance: float, plan: ResolvedPlan = PLAN) -> tuple[int, set[int], set[int]]:
    """Return what a layer keeps, its rows of an expert, and the bytes that it exchanges."""
    shape = BlockShape.of(replace(JOB, imbalance=imbalance), plan, STACK)
    found = walk(shape, EXPERT_LAYER)
    steps = [step for step in found.tape.steps if step.phase is Phase.FORWARD]
    works = [(step.operator.kind, step.work) for step in steps]
    rows = {
        int(work.m) for kind, work in works if kind is Kind.GROUPED and isinstance(work, Product)
    }
    sent = {
        int(work.nbytes)
        for _, work in works
        if isinstance(work, Transfer) and work.axis is ExpertAxis.EP and work.nbytes > 10**6
    }
    return int(BlockMemory.of(found).saved), rows, sent


def test_rows_of_the_hottest_rank_are_computed_sent_and_kept() -> None:
    even, hot = walked(1.0), walked(2.0)
    assert (even[1], hot[1]) == ({8192}, {16384})
    assert {2 * size for size in even[2]} == hot[2] == {2 * 8192 * 4096 * 2}
    # Of an expert's row are kept: what arrived, both halves, what is made of them, its weight.
    assert hot[0] - even[0] == 8192 * 2 * (4096 + 3 * 14336 + 1)
    alone = ResolvedPlan(dp=8, stages=(32,))
    assert walked(2.0, alone) == walked(1.0, alone)


def test_a_step_waits_for_the_hottest_rank() -> None:
    times, peaks = [], []
    for imbalance in (1.0, 2.0, 4.0):
        job = replace(JOB, imbalance=imbalance)
        result = simulate(job, PLAN, load_cluster("dgx-h100"), STACK)
        times.append(result.step_ps)
        peaks.append(result.memory.peak_bytes)
    # Rows, and what is done with them, grow as the hottest load does: twice the step from 1 to 2.
    assert (times[2] - times[1]) / (times[1] - times[0]) == pytest.approx(2, rel=0.02)
    assert (peaks[2] - peaks[1]) / (peaks[1] - peaks[0]) == pytest.approx(2, rel=0.02)
    assert times[2] > 2 * times[0]


@pytest.mark.parametrize(
    ("model", "imbalance", "message"),
    [
        ("mixtral-8x7b", 0.5, "imbalance=0.5 is out of range; allowed 1 to 4, where each"),
        ("mixtral-8x7b", 5.0, "imbalance=5 is out of range; allowed 1 to 4, where each"),
        ("llama3-8b", 2.0, "imbalance=2 does not go with llama3-8b, which has no experts"),
    ],
)
def test_loads_that_cannot_be_are_refused(model: str, imbalance: float, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        TrainingJob(model=load_model(model), global_batch_size=8, seq_len=4096, imbalance=imbalance)


def test_a_dispatcher_is_the_stack_s_or_a_plan_s() -> None:
    cluster, times = load_cluster("dgx-h100"), {}
    for each in Dispatcher:
        shape = BlockShape.of(JOB, replace(PLAN, ep=4, dispatcher=each), STACK)
        cost = CostModel(cluster, STACK, 8).block_cost(shape, EXPERT_LAYER)
        times[each] = cost.forward.time_ps
    habit = BlockShape.of(JOB, PLAN, STACK)
    assert habit.dispatcher is Dispatcher.ALL_TO_ALL
    assert times[Dispatcher.ALL_TO_ALL] > times[Dispatcher.DEEPEP] == times[Dispatcher.HYBRIDEP]
    asked = ResolvedPlan(dp=8, dispatcher=Dispatcher.HYBRIDEP, stages=(32,))
    refusal = stack_refusal(JOB, asked, load_stack("torchtitan@0.2"))
    assert refusal is not None
    assert refusal.startswith("dispatcher=hybridep is not offered by stack torchtitan")


@pytest.mark.parametrize(
    "degrees", [{}, {"dp": 8, "ep": 8}, {"dp": 4, "tp": 2, "ep": 4, "etp": 1}, {"tp": 2}]
)
def test_experts_multiply_in_fp8_all_weights_but_the_router_s(degrees: dict[str, int]) -> None:
    job = replace(JOB, precision=Precision.FP8)
    has_tp = degrees.get("tp", 1) > 1
    plan = ResolvedPlan(**degrees, sequence_parallel=has_tp, stages=(32,))
    assert stack_refusal(job, replace(plan, attention=Attention.FLASH), STACK) is None
    shape = BlockShape.of(job, replace(plan, attention=Attention.FLASH), STACK)
    found = walk(shape, EXPERT_LAYER)
    weights = {
        each
        for op in found.tape.block.operators
        if op.eight_bits and op.kind in {Kind.PRODUCT, Kind.GROUPED}
        for each in op.inputs
        if each.is_weight
    }
    assert sum(int(each.numel) for each in weights) == num_linear_weights(shape)[EXPERT_LAYER]
    names = {each.name for each in found.tape.block.weights if len(each.dims) > 1} - {
        each.name for each in weights
    }
    assert names == {"router.weight"}


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.is_weight and len(tensor.dims) > 1


@pytest.mark.parametrize("model", ["deepseek-v3", "glm4.5", "mixtral-8x7b", "llama3-8b"])
@pytest.mark.parametrize("precision", [Precision.FP8, Precision.MXFP8])
def test_weights_of_8_bits_are_those_of_products_in_8_bits(
    model: str, precision: Precision
) -> None:
    """Of dense and expert layers, and of latent attention: the closed form against the blocks."""
    job = TrainingJob(
        model=load_model(model), global_batch_size=8, seq_len=4096, precision=precision
    )
    plan = ResolvedPlan(stages=(job.model.num_layers,), attention=Attention.FLASH)
    assert stack_refusal(job, plan, STACK) is None
    shape = BlockShape.of(job, plan, STACK)
    for kind, counted in num_linear_weights(shape).items():
        operators = walk(shape, kind).tape.block.operators
        products = (op for op in operators if op.eight_bits and op.kind is not Kind.PLACE)
        weights = {each for op in products for each in op.inputs if _is_matrix(each)}
        assert sum(int(each.numel) for each in weights) == counted


@pytest.mark.parametrize(
    ("stack", "waits_us"),
    [
        ("megatron-core", 150 + 2 * 50),
        ("megatron-core-capacity", 150),
        ("megatron-core-capacity-graphs", 0),
        ("megatron-core-fused", 0),
        ("megatron-core-graphs", 0),
        ("megatron-core-serial", 500 + 1400),
    ],
)
def test_passes_wait_for_the_host_by_the_experts_of_a_rank(stack: str, waits_us: int) -> None:
    known = load_stack(stack)
    shape = BlockShape.of(JOB, replace(PLAN, ep=4), known)
    cost = CostModel(load_cluster("dgx-h100"), known, 8).block_cost(shape, EXPERT_LAYER)
    passes = [each.category_ps(Category.HOST) for each in (cost.forward, cost.backward)]
    assert passes == [waits_us * 10**6, 2 * waits_us * 10**6]


@pytest.mark.parametrize(
    ("precision", "cluster", "expected_us"),
    [
        (Precision.BF16, "dgx-h100", 1200 + 16 * 130),
        # Four kernels cast the rows of an expert, for each of two products.
        (Precision.FP8, "dgx-h100", 1200 + 16 * (130 + 2 * 4 * 20)),
        (Precision.MXFP8, "dgx-b200", 0.75 * (1200 + 16 * (130 + 2 * 20))),
    ],
)
def test_a_pass_takes_no_less_than_its_host(
    precision: Precision, cluster: str, expected_us: float
) -> None:
    job = TrainingJob(
        model=load_model("qwen3-30b-a3b"), global_batch_size=8, seq_len=512, precision=precision
    )
    shape = BlockShape.of(job, replace(PLAN, stages=(48,)), STACK)
    costs = CostModel(load_cluster(cluster), STACK, 8)
    cost = costs.block_cost(shape, EXPERT_LAYER)
    assert cost.forward.time_ps == round(expected_us * 10**6)
    # What the device does is all in it.
    assert sum(cost.forward.by_category_ps) == cost.forward.time_ps
    long = BlockShape.of(replace(job, seq_len=32768), replace(PLAN, stages=(48,)), STACK)
    assert costs.block_cost(long, EXPERT_LAYER).forward.time_ps > 2 * cost.forward.time_ps


def test_fused_products_open_and_cast_what_they_make() -> None:
    """Bytes of a pass, by hand: activation, weighed; casts of its output, and of its gradient."""
    job = replace(JOB, precision=Precision.MXFP8)
    moved = {}
    for name in ("megatron-core-graphs", "megatron-core-fused"):
        plan = replace(PLAN, dispatcher=Dispatcher.HYBRIDEP)
        shape = BlockShape.of(job, plan, load_stack(name))
        operators = CostModel(load_cluster("gb200-nvl72"), shape.stack, 8).blocks.operators(
            shape, EXPERT_LAYER
        )
        moved[name] = [
            sum(each.size_bytes for each in phase if isinstance(each, MemoryBound))
            for phase in (operators.forward, operators.backward)
        ]
    rows, width = 8192, MIXTRAL.experts.hidden_size  # type: ignore[union-attr]
    apart, fused = moved.values()
    assert apart[0] - fused[0] == rows * width * (2 * 3 + 4)
    assert apart[1] - fused[1] == rows * width * (2 * 5 + 2 * 4)


def test_fused_products_bound_what_they_open_and_add_biases() -> None:
    """What is over slices there is turning queries and keys alone."""
    model = load_model("gpt-oss-120b")
    job = TrainingJob(model=model, global_batch_size=8, seq_len=4096, precision=Precision.MXFP8)
    shape = BlockShape.of(job, replace(PLAN, stages=(36,)), load_stack("megatron-core-fused"))
    found = CostModel(load_cluster("gb200-nvl72"), shape.stack, 8).blocks.operators(
        shape, EXPERT_LAYER
    )
    made = [
        sum(each.strided for each in phase if isinstance(each, MemoryBound))
        for phase in (found.forward, found.backward)
    ]
    turned = 4096 * (model.num_heads + model.num_kv_heads) * 64
    assert made == [turned * 5 // 2] * 2


@pytest.mark.parametrize(
    ("dispatcher", "moved"), [(Dispatcher.ALL_TO_ALL, 12 + 16), (Dispatcher.HYBRIDEP, 28 + 40)]
)
def test_biases_of_experts_are_added_in_the_format_of_shares(
    dispatcher: Dispatcher, moved: int
) -> None:
    model = load_model("gpt-oss-120b")
    job = TrainingJob(model=model, global_batch_size=8, seq_len=4096)
    plan = replace(PLAN, stages=(36,), dispatcher=dispatcher)
    names = {"rows with biases", "outputs with biases", "outputs cast"}
    steps = walk(BlockShape.of(job, plan, STACK), EXPERT_LAYER).tape.steps
    own = [
        each.work.nbytes
        for each in steps
        if isinstance(each.work, Traffic) and each.operator.outputs[0].name in names
    ]
    assert sum(own) == moved * 4096 * 4 * model.hidden_size


@pytest.mark.parametrize(
    ("stack", "dispatcher", "passes"),
    [
        ("megatron-core", Dispatcher.ALL_TO_ALL, 4),
        ("megatron-core", Dispatcher.HYBRIDEP, 0),
        ("megatron-core-capacity", Dispatcher.ALL_TO_ALL, 0),
    ],
)
def test_rows_of_experts_are_filled_up_in_8_bits(
    stack: str, dispatcher: Dispatcher, passes: int
) -> None:
    job = replace(JOB, precision=Precision.FP8)
    shape = BlockShape.of(job, replace(PLAN, dispatcher=dispatcher), load_stack(stack))
    steps = walk(shape, EXPERT_LAYER).tape.steps
    names = {"rows filled up", "rows as they came"}
    own = [each for each in steps if each.operator.outputs[0].name in names]
    # There and back, forward and backward: each reads and writes two bytes an element.
    assert len(own) == passes
    assert MIXTRAL.experts is not None
    rows = JOB.seq_len * MIXTRAL.experts.experts_per_token
    size = 4 * rows * MIXTRAL.hidden_size
    assert {each.work.nbytes for each in own if isinstance(each.work, Traffic)} <= {size}
