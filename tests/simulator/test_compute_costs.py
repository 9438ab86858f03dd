"""Times of operators on one device: closed forms on an ideal device, bounds on real ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    PS_PER_S,
    CollectiveOp,
    Device,
    Precision,
    Source,
    load_cluster,
    load_device,
    load_stack,
    to_ps,
)
from meshwright.simulator.blocks.operators import (
    Collective,
    FlashAttention,
    Gemm,
    HostPasses,
    ImplicitGemm,
    KernelLaunches,
    MemoryBound,
    Operator,
    RingMessages,
)
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.costs import Category, Cost, CostModel, PhaseCost
from meshwright.simulator.costs.compute import (
    constant_cost,
    convolution_cost,
    flash_attention_cost,
    gemm_cost,
    memory_bound_cost,
    memory_rate_bytes_per_s,
    peak_flops_per_s,
)
from meshwright.simulator.costs.spans import GroupSpans
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import ExpertAxis
from meshwright.simulator.layout.mesh import Axis, GroupSpan
from meshwright.simulator.layout.plan import ResolvedPlan, TrainingJob
from meshwright.simulator.model.catalogue import load_model

RELAXED = settings(deadline=None, max_examples=100)
DEVICE = load_device("a100-sxm4-80gb")
PEAK = 312_000_000_000_000
BF16, FP32 = Precision.BF16, Precision.FP32
DIMS = st.integers(1, 20_000)


def ideal_device(**changes: float) -> Device:
    """Return a device of 100 multiprocessors whose products cost their FLOPs, and *changes*."""
    perfect = {
        "plateau_fraction": 1.0,
        "prologue_k": 0.0,
        "half_rate_intensity": 0.0,
        "partial_wave_fraction": 0.0,
        "misaligned_fraction": 0.25,
        "misaligned_linear_fraction": None,
    }
    kernels = DEVICE.gemm.model_copy(update=perfect | changes)
    return DEVICE.model_copy(update={"gemm": kernels, "num_sms": 100})


def test_whole_tiles_on_an_ideal_device_cost_their_flops() -> None:
    gemm = Gemm("product", m=2560, n=3840, k=4096, batch=3)
    expected_ps = to_ps(2 * 3 * 2560 * 3840 * 4096 / PEAK)
    assert gemm_cost(gemm, ideal_device(), BF16).time_ps == expected_ps


def test_a_partial_wave_pays_its_share_of_the_idle_multiprocessors() -> None:
    # 256 x 128 tiles: 15 x 10 = 150 of them are one and a half waves of 100.
    gemm = Gemm("product", m=15 * 256, n=10 * 128, k=4096)
    for fraction, waves in ((0.0, 1.5), (0.5, 1.75)):
        device = ideal_device(partial_wave_fraction=fraction, half_rate_intensity=10_000.0)
        # So strong a preference for intensity leaves the largest tile alone.
        expected_s = waves * 100 * 2 * 256 * 128 * 4096 / PEAK
        got = gemm_cost(gemm, device, BF16).time_ps
        assert got == pytest.approx(to_ps(expected_s), rel=1e-9)


def test_small_tiles_fill_a_wave_that_large_ones_leave_half_empty() -> None:
    gemm = Gemm("product", m=15 * 256, n=10 * 128, k=4096)
    device = ideal_device(partial_wave_fraction=1.0)
    # 64 x 64 tiles: 60 x 20 = 1200 are 12 whole waves, so nothing is lost.
    assert gemm_cost(gemm, device, BF16).time_ps == to_ps(gemm.flops / PEAK)


def test_the_prologue_adds_steps_to_the_contraction() -> None:
    gemm = Gemm("product", m=2560, n=3840, k=4000)
    longer = Gemm("product", m=2560, n=3840, k=4128)
    with_prologue = gemm_cost(gemm, ideal_device(prologue_k=128.0), BF16)
    assert with_prologue.time_ps == gemm_cost(longer, ideal_device(), BF16).time_ps


def test_plateau_and_intensity_slow_a_tile_down() -> None:
    gemm = Gemm("product", m=2560, n=3840, k=4096)
    half = gemm_cost(gemm, ideal_device(plateau_fraction=0.5), BF16).time_ps
    assert half == pytest.approx(2 * gemm_cost(gemm, ideal_device(), BF16).time_ps, abs=1)
    # A width of 64 admits tiles of 256 x 64 at best: intensity 51.2 against 85.33.
    narrow = Gemm("product", m=25_600, n=64, k=4096)
    wide_memory = {"memory_bandwidth_bytes_per_s": 1e15}  # such a product is bound by traffic
    device = ideal_device(half_rate_intensity=50.0).model_copy(update=wide_memory)
    slow = gemm_cost(narrow, device, BF16).time_ps
    rate = (51.2 / 101.2) / ((256 * 128 / 384) / (256 * 128 / 384 + 50))
    assert slow == pytest.approx(to_ps(narrow.flops / PEAK / rate), rel=1e-9)


@pytest.mark.parametrize("axis", ["m", "n", "k"])
def test_a_dim_off_the_load_width_slows_16_bit_products_alone(axis: str) -> None:
    sizes = {"m": 2560, "n": 3840, "k": 4096}
    aligned, odd = (Gemm("p", **{**sizes, axis: sizes[axis] - less}) for less in (8, 4))
    slow, fast = ideal_device(), ideal_device(misaligned_fraction=1.0)
    assert gemm_cost(aligned, slow, BF16) == gemm_cost(aligned, fast, BF16)
    ratio = gemm_cost(odd, slow, BF16).time_ps / gemm_cost(odd, fast, BF16).time_ps
    assert ratio == pytest.approx(4, rel=1e-6)
    assert gemm_cost(odd, slow, FP32) == gemm_cost(odd, fast, FP32)
    # A linear layer's may have a share of their own, and attention's keep theirs.
    apart = ideal_device(misaligned_linear_fraction=0.5)
    ratio = gemm_cost(odd, apart, BF16).time_ps / gemm_cost(odd, fast, BF16).time_ps
    assert ratio == pytest.approx(2, rel=1e-6)
    scores = odd._replace(is_attention=True)
    assert gemm_cost(scores, apart, BF16) == gemm_cost(odd, slow, BF16)


def test_a_thin_product_costs_its_traffic() -> None:
    gemm = Gemm("product", m=8, n=8192, k=8192)
    elements = 8 * 8192 + 8192 * 8192 + 8 * 8192
    expected_s = elements * 2 / memory_rate_bytes_per_s(DEVICE)
    assert gemm_cost(gemm, ideal_device(), BF16).time_ps == to_ps(expected_s)


def test_a_product_of_eight_bits_reads_one_byte_and_writes_two() -> None:
    slow = {"memory_bandwidth_bytes_per_s": 1e11}
    device = load_device("h100-sxm5-80gb").model_copy(update=slow)
    gemm = Gemm("product", m=8192, n=8192, k=16, in_eight_bits=True)
    size_bytes = 2 * 8192 * 16 + 2 * 8192**2
    expected_s = size_bytes / memory_rate_bytes_per_s(device)
    assert gemm_cost(gemm, device, Precision.FP8).time_ps == to_ps(expected_s)


def test_a_convolution_takes_no_less_than_its_traffic() -> None:
    convolution = ImplicitGemm("1 x 1", pixels=64, inputs=64, outputs=64, taps=1, moved=10**9)
    for precision, width in ((BF16, 2), (FP32, 4)):
        expected_s = width * 10**9 / memory_rate_bytes_per_s(DEVICE)
        assert convolution_cost(convolution, DEVICE, precision).time_ps == to_ps(expected_s)


def test_products_of_experts_start_one_after_the_other() -> None:
    """Sixty-four of 9 us take longer than these small ones; products of heads start at once."""
    experts = Gemm("experts", m=8, n=8, k=8, batch=64, rows="m")
    assert gemm_cost(experts, DEVICE, BF16, 9e-6) == Cost(576_000_000, DEVICE.gemm.of(BF16).kind)
    assert gemm_cost(experts, DEVICE, BF16).time_ps < 576_000_000
    heads = experts._replace(rows="")
    assert gemm_cost(heads, DEVICE, BF16, 9e-6) == gemm_cost(heads, DEVICE, BF16)


@RELAXED
@given(m=DIMS, n=DIMS, k=DIMS, batch=st.integers(1, 64))
def test_no_product_beats_the_plateau_or_the_memory(m: int, n: int, k: int, batch: int) -> None:
    gemm = Gemm("product", m=m, n=n, k=k, batch=batch)
    time_s = gemm_cost(gemm, DEVICE, BF16).time_ps / PS_PER_S
    # Rounding to picoseconds may take half of one away.
    assert time_s * (1 + 1e-6) >= gemm.flops / (PEAK * DEVICE.gemm.plateau_fraction)
    assert time_s * (1 + 1e-6) >= gemm.num_elements * 2 / memory_rate_bytes_per_s(DEVICE)


@RELAXED
@given(m=DIMS, n=DIMS, k=DIMS, axis=st.sampled_from(["m", "n", "k"]), more=st.integers(1, 500))
def test_an_aligned_product_never_gets_cheaper_by_growing(
    m: int, n: int, k: int, axis: str, more: int
) -> None:
    sizes = {"m": 8 * m, "n": 8 * n, "k": 8 * k}
    small, large = Gemm("p", **sizes), Gemm("p", **{**sizes, axis: sizes[axis] + 8 * more})
    less, bigger = (gemm_cost(each, DEVICE, BF16).time_ps for each in (small, large))
    assert less <= bigger


def test_flash_attention_runs_at_the_kernels_share_of_the_peak() -> None:
    facts = DEVICE.flash["te-cudnn"]
    assert facts.forward_fraction != facts.backward_fraction  # else one could stand for the other
    forward = FlashAttention("attention", 32, 2048, 128)
    backward = FlashAttention("attention gradient", 32, 2048, 128, backward=True)
    assert forward.flops == 2 * 2 * 32 * 2048**2 * 128 // 2  # two products, the causal half
    assert 2 * backward.flops == 5 * forward.flops
    for call, fraction in ((forward, facts.forward_fraction), (backward, facts.backward_fraction)):
        cost = flash_attention_cost(call, DEVICE, BF16, "te-cudnn")
        assert cost == Cost(to_ps(call.flops / (PEAK * fraction)), facts.kind)


def test_narrow_heads_and_windows_run_at_shares_of_their_own() -> None:
    device = load_device("gb200")
    facts = device.flash["te-cudnn"]
    assert facts.narrow is not None
    assert facts.narrow_window is not None
    calls = {
        FlashAttention("wide", 32, 4096, 128, window=128): facts,
        FlashAttention("narrow", 32, 4096, 64): facts.narrow,
        FlashAttention("narrow, wide window", 32, 4096, 64, window=129): facts.narrow,
        FlashAttention("narrow, window", 32, 4096, 64, window=128): facts.narrow_window,
    }
    for call, own in calls.items():
        cost = flash_attention_cost(call, device, BF16, "te-cudnn")
        peak = device.peak_flops_per_s[BF16]
        assert cost == Cost(to_ps(call.flops / (peak * own.forward_fraction)), own.kind)


def test_an_unknown_attention_kernel_lists_those_of_the_device() -> None:
    with pytest.raises(PlanError) as caught:
        flash_attention_cost(FlashAttention("attention", 1, 8, 8), DEVICE, BF16, "fa9")
    known = ", ".join(sorted(DEVICE.flash))
    name = DEVICE.name
    assert str(caught.value) == (
        f"attention=flash: {name} has no kernel 'fa9'; known there: {known}"
    )


def test_a_precision_the_device_lacks_lists_what_it_has() -> None:
    old = load_device("v100-sxm2-32gb")
    with pytest.raises(PlanError) as caught:
        peak_flops_per_s(old, BF16)
    expected = f"precision=bf16 is not available on {old.name}; allowed: fp16, fp32"
    assert str(caught.value) == expected


def test_element_wise_traffic_runs_at_its_share_of_the_bandwidth() -> None:
    rate = 2_039_000_000_000 * DEVICE.memory.bandwidth_fraction
    cost = memory_bound_cost(MemoryBound("norm", 10**9), DEVICE)
    assert cost == Cost(to_ps(10**9 / rate), DEVICE.memory.kind)


@pytest.mark.parametrize(
    ("num_elements", "width", "measured_us"),
    [
        (16 * 256 * 56**2, 2, 46.1),
        (16 * 256 * 56**2, 1, 45.2),
        (16 * 256 * 56**2, 4, 49.2),
        (1024 * 10240, 2, 35.5),
    ],
    ids=["bf16", "bool", "fp32", "other version"],
)
def test_kernels_over_slices_take_a_time_an_element(
    num_elements: int, width: int, measured_us: float
) -> None:
    """What PyTorch took on H200 for an operand whose numbers are repeated (its `element_time`)."""
    kernel = MemoryBound("product", 2 * width * num_elements, num_elements)
    cost = memory_bound_cost(kernel, load_device("h200-sxm"))
    assert cost.time_ps / 10**6 == pytest.approx(measured_us, rel=0.08)
    assert cost.source is Source.MEASURED


@pytest.mark.parametrize(("device", "strided"), [("h200-sxm", 1), ("a100-sxm4-80gb", 10**9)])
def test_kernels_over_slices_take_no_less_than_their_traffic(device: str, strided: int) -> None:
    """Also on a device that says nothing of them."""
    whole = memory_bound_cost(MemoryBound("copy", 10**9), load_device(device))
    assert memory_bound_cost(MemoryBound("copy", 10**9, strided), load_device(device)) == whole


def test_constants_of_the_stack_are_multiplied_by_their_count() -> None:
    assert constant_cost(7, 3e-6) == Cost(21_000_000, Source.FITTED)


def a_shape(tp: int = 2) -> BlockShape:
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=1, seq_len=1024)
    return BlockShape.of(job, ResolvedPlan(tp=tp, stages=(12,)), load_stack("megatron-core"))


def test_a_collective_hides_its_share_under_the_shorter_of_itself_and_the_product() -> None:
    cluster = load_cluster("dgx-a100")
    costs = CostModel(cluster, load_stack("megatron-core"), 8)
    shape = a_shape()
    plain = Collective("tp", CollectiveOp.ALL_REDUCE, 10**8, Axis.TP)
    full_ps = costs.operator_cost(plain, shape)[1].time_ps
    assert full_ps == costs.collective(plain.op, 10**8, GroupSpan(2, 1, 2), Axis.TP).time_ps
    share = costs.stack.tp_overlap_fraction
    for size in (256, 16_384):
        cover = Gemm("cover", m=size, n=size, k=size)
        hidden = Collective("tp", CollectiveOp.ALL_REDUCE, 10**8, Axis.TP, cover)
        cover_ps = costs.operator_cost(cover, shape)[1].time_ps
        category, cost = costs.operator_cost(hidden, shape)
        assert category is Category.TP_COMM
        assert cost.time_ps == full_ps - int(share * min(full_ps, cover_ps))


def test_shares_of_the_network_are_the_stacks_for_replicas_and_for_messages() -> None:
    """A rank a node, with a port of 25 GB/s: half of 1 TB is gathered, all of it is sent."""
    cluster = load_cluster("dgx-a100")
    network = cluster.inter_node.model_copy(update={"busbw_fraction": 0.8})
    shares = {"dp_bandwidth_fraction": 0.5, "p2p_bandwidth_fraction": 0.25}
    stack = load_stack("megatron-core").model_copy(update=shares)
    costs = CostModel(cluster.model_copy(update={"inter_node": network}), stack, 16)
    for axis, seconds, source in (
        *((axis, 40, Source.FITTED) for axis in (Axis.DP, ExpertAxis.EDP)),
        *((axis, 25, network.kind) for axis in (Axis.TP, Axis.CP, ExpertAxis.EP)),
    ):
        cost = costs.collective(CollectiveOp.ALL_GATHER, 10**12, GroupSpan(2, 2, 1), axis)
        assert cost.time_ps / PS_PER_S == pytest.approx(seconds, rel=1e-4)
        assert cost.source is source
    message = costs.message(10**12, crosses_nodes=True)
    assert message.transfer.time_ps / PS_PER_S == pytest.approx(160)


def test_ranks_of_experts_lie_behind_those_that_split_one() -> None:
    """Of 16 ranks on two nodes four split each expert, side by side; others are four apart."""
    job = TrainingJob(model=load_model("mixtral-8x7b"), global_batch_size=8, seq_len=1024)
    plan = ResolvedPlan(tp=4, dp=4, ep=4, etp=4, stages=(32,))
    shape, spans = BlockShape.of(job, plan, load_stack("megatron-core")), GroupSpans(16, 8)
    assert spans.of_block(ExpertAxis.ETP, shape) == GroupSpan(4, 1, 4)
    assert spans.of_block(ExpertAxis.EP, shape) == GroupSpan(4, 2, 2)


def test_messages_of_a_step_go_at_the_same_time_over_the_same_link() -> None:
    costs = CostModel(load_cluster("dgx-a100"), load_stack("megatron-core"), 8)
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=1, seq_len=1024)
    shape = BlockShape.of(job, ResolvedPlan(cp=2, stages=(12,)), costs.stack)
    (fact,) = (
        each
        for each in costs.cluster.intra_node.collectives
        if each.op is CollectiveOp.P2P and each.num_ranks == 2
    )
    messages = RingMessages("ring", CollectiveOp.P2P, 10**9, Axis.CP, 3, beside_bytes=2 * 10**9)
    category, cost = costs.operator_cost(messages, shape)
    assert category is Category.CP_COMM
    expected_s = 3 * (3 * 10**9 / fact.busbw_bytes_per_s + fact.latency_s)
    assert cost.time_ps == pytest.approx(to_ps(expected_s), rel=1e-9)


@pytest.mark.parametrize(
    ("operator", "category"),
    [
        (Gemm("qkv", m=8, n=8, k=8), Category.MATMUL),
        (Gemm("attention output", m=8, n=8, k=8), Category.MATMUL),
        (Gemm("scores", m=8, n=8, k=8, is_attention=True), Category.ATTENTION),
        (FlashAttention("attention", 12, 8, 8), Category.ATTENTION),
        (MemoryBound("norms", 8), Category.ELEMENTWISE),
        (KernelLaunches("layer", 8), Category.KERNEL_LAUNCH),
        (HostPasses("layer", 1), Category.HOST),
        (Collective("tp", CollectiveOp.ALL_REDUCE, 8, Axis.TP), Category.TP_COMM),
    ],
)
def test_each_kind_of_operator_has_its_category(operator: Operator, category: Category) -> None:
    costs = CostModel(load_cluster("dgx-a100"), load_stack("megatron-core"), 8)
    assert costs.operator_cost(operator, a_shape())[0] is category


def test_a_shared_cost_model_gives_what_a_fresh_one_gives() -> None:
    cluster, stack = load_cluster("dgx-a100"), load_stack("megatron-core")
    shared = CostModel(cluster, stack, 16)
    for tp in (1, 2, 4, 1):
        shape = a_shape(tp)
        for block in ("embedding", "layer", "head"):
            kept, fresh = (
                model.block_cost(shape, block) for model in (shared, CostModel(cluster, stack, 16))
            )
            assert (kept.forward, kept.backward) == (fresh.forward, fresh.backward)


PARTS = st.lists(
    st.tuples(
        st.sampled_from(Category), st.builds(Cost, st.integers(0, 99), st.sampled_from(Source))
    ),
    max_size=6,
)


@given(one=PARTS, two=PARTS, count=st.integers(0, 9))
def test_sums_of_costs_keep_both_splits_equal_to_the_total(
    one: list[tuple[Category, Cost]], two: list[tuple[Category, Cost]], count: int
) -> None:
    both = PhaseCost.total(one) + PhaseCost.total(two) * count
    assert both == PhaseCost.total(one + two * count)
    assert both.time_ps == sum(both.by_category_ps) == sum(both.by_source_ps)
    for category in Category:
        expected = sum(cost.time_ps for each, cost in one + two * count if each is category)
        assert both.category_ps(category) == expected
    for source in Source:
        expected = sum(cost.time_ps for _, cost in one + two * count if cost.source is source)
        assert both.source_ps(source) == expected
