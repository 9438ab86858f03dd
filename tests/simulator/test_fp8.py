"""Training with fp8 linear layers: what runs in 8 bits, what it costs and what it keeps."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    Attention,
    CollectiveOp,
    Device,
    Offload,
    Precision,
    Recompute,
    list_stacks,
    load_cluster,
    load_device,
    load_stack,
    to_ps,
)
from meshwright.simulator import (
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.account import rank_traffic
from meshwright.simulator.blocks import (
    BlockShape,
    BlockTable,
    Collective,
    Gemm,
    KernelLaunches,
    MemoryBound,
    Operator,
    step_cast_bytes,
    walk,
)
from meshwright.simulator.blocks.fp8_casts import num_linear_weights, weight_copy_bytes
from meshwright.simulator.costs import Category, CostModel
from meshwright.simulator.costs.compute import gemm_cost, memory_rate_bytes_per_s
from meshwright.simulator.graph import PARTIAL, Transfer
from meshwright.simulator.layout import stack_refusal
from meshwright.simulator.layout.formats import Formats, casts_of, formats_refusal, gradient_bytes
from meshwright.simulator.model import HEAD, TRANSFORMER_LAYER, BlockRun
from meshwright.simulator.model.parameters import count_parameters
from meshwright.simulator.step.build import build_step

FP8, BF16 = Precision.FP8, Precision.BF16
DEVICE = load_device("h100-sxm5-80gb")
MODEL = load_model("llama3-8b")
STACKS = ("fsdp", "megatron-core", "torchtitan@0.2", "torchtitan-2024-12")
FUSED = ("fused", "fused-attention", "fused-head")
TABLE = BlockTable()
SIZES = st.integers(1, 200).map(lambda count: 16 * count)


def ideal_device() -> Device:
    """Return 100 multiprocessors whose products cost their FLOPs at the peak of their precision."""
    assert DEVICE.gemm.fp8 is not None
    perfect = {"plateau_fraction": 1.0, "prologue_k": 0.0}
    kernels = DEVICE.gemm.model_copy(
        update=perfect
        | {
            "half_rate_intensity": 0.0,
            "misaligned_fraction": 0.25,
            "misaligned_linear_fraction": None,
            "fp8": DEVICE.gemm.fp8.model_copy(update=perfect),
        }
    )
    return DEVICE.model_copy(update={"gemm": kernels, "num_sms": 100})


def block_shape(
    stack: str = "megatron-core", *, precision: Precision = FP8, tp: int = 1, batch: int = 1
) -> BlockShape:
    plan = ResolvedPlan(
        tp=tp,
        microbatch_size=batch,
        sequence_parallel=tp > 1,
        attention=Attention.FLASH,
        stages=(MODEL.num_layers,),
    )
    job = TrainingJob(model=MODEL, global_batch_size=batch, seq_len=8192, precision=precision)
    return BlockShape.of(job, plan, load_stack(stack))


def step(precision: Precision, stack: str, cluster: str = "dgx-h100", tp: int = 1) -> StepResult:
    profile = load_stack(stack)
    plan = ResolvedPlan(
        tp=tp,
        dp=8 // tp,
        zero_stage=profile.zero_stage,
        sequence_parallel=tp > 1,
        attention=Attention.FLASH,
        stages=(MODEL.num_layers,),
    )
    job = TrainingJob(model=MODEL, global_batch_size=32, seq_len=8192, precision=precision)
    return simulate(job, plan, load_cluster(cluster), profile)


def named(operators: tuple[Operator, ...], kind: type[Operator], part: str) -> list[Operator]:
    return [item for item in operators if isinstance(item, kind) and part in item.name]


def gemms(operators: tuple[Operator, ...]) -> list[Gemm]:
    return [item for item in operators if isinstance(item, Gemm)]


@pytest.mark.parametrize(("in_eight_bits", "peak"), [(True, 1979e12), (False, 989e12)])
def test_whole_tiles_cost_their_flops_at_the_peak_of_their_format(
    *, in_eight_bits: bool, peak: float
) -> None:
    gemm = Gemm("product", m=2560, n=1280 * 10, k=4096, in_eight_bits=in_eight_bits)
    expected_ps = to_ps(2 * 2560 * 12800 * 4096 / peak)
    # Any product that is not marked is one of bf16, whatever the layers around it are.
    assert gemm_cost(gemm, ideal_device(), FP8).time_ps == expected_ps


@given(m=SIZES, n=SIZES, k=SIZES)
@settings(deadline=None, max_examples=100)
def test_an_fp8_product_costs_its_waves_with_constants_of_its_own(m: int, n: int, k: int) -> None:
    facts = DEVICE.gemm.fp8
    assert facts is not None
    as_bf16 = Gemm("product", m=m, n=n, k=k)
    cost = gemm_cost(as_bf16._replace(in_eight_bits=True), DEVICE, FP8)
    floor_s = (m * k + k * n + 2 * m * n) / memory_rate_bytes_per_s(DEVICE)
    # The same tiles with the constants and the peak of fp8 in the place of those of bf16.
    swapped = DEVICE.gemm.model_copy(
        update={"plateau_fraction": facts.plateau_fraction, "prologue_k": facts.prologue_k}
    )
    peaks = {**DEVICE.peak_flops_per_s, BF16: 1979e12}
    endless = {"memory_bandwidth_bytes_per_s": 1e30}
    fast = DEVICE.model_copy(update={"gemm": swapped, "peak_flops_per_s": peaks} | endless)
    assert cost.time_ps == max(to_ps(floor_s), gemm_cost(as_bf16, fast, BF16).time_ps)
    assert cost.source is facts.kind


def test_an_fp8_product_needs_multiples_of_sixteen() -> None:
    def time_ps(size: int, *, in_eight_bits: bool) -> int:
        gemm = Gemm("product", m=2560, n=12800, k=size, in_eight_bits=in_eight_bits)
        return gemm_cost(gemm, ideal_device(), FP8).time_ps

    assert time_ps(4104, in_eight_bits=True) > 3.9 * time_ps(4096, in_eight_bits=True)
    assert time_ps(4104, in_eight_bits=False) < 1.1 * time_ps(4096, in_eight_bits=False)


def test_only_the_linear_layers_multiply_in_fp8() -> None:
    shape = block_shape()
    layer, head = (TABLE.operators(shape, kind) for kind in ("layer", "head"))
    assert [item.in_eight_bits for item in gemms(layer.forward)] == [True] * 4
    assert [item.in_eight_bits for item in gemms(layer.backward)] == [True] * 8
    assert not any(item.in_eight_bits for item in gemms((*head.forward, *head.backward)))
    unfused = TABLE.operators(replace(shape, attention=Attention.UNFUSED), "layer")
    core = [item for item in gemms((*unfused.forward, *unfused.backward)) if item.is_attention]
    assert len(core) == 6
    assert not any(item.in_eight_bits for item in core)


@pytest.mark.parametrize("precision", [BF16, Precision.FP16, Precision.FP32])
def test_other_formats_cast_nothing(precision: Precision) -> None:
    shape = block_shape(precision=precision)
    layer = TABLE.operators(shape, "layer")
    assert named((*layer.forward, *layer.backward), MemoryBound, "casts") == []
    assert not any(item.in_eight_bits for item in gemms(layer.forward))
    assert step_cast_bytes(shape, LAYERS) == weight_copy_bytes(shape, LAYERS) == 0


# Llama 3 8B: inputs of 4,096, 4,096, 4,096 and 14,336; outputs of 6,144, 4,096, 28,672 and 4,096.
INPUTS, OUTPUTS = 8192 * 26_624, 8192 * 43_008
WEIGHTS = 4096 * (6144 + 4096 + 3 * 14_336)
LAYERS = (BlockRun(TRANSFORMER_LAYER, 32),)


@pytest.mark.parametrize(
    ("stack", "forward", "backward", "kernels"),
    [
        ("megatron-core", INPUTS, OUTPUTS, (4, 4)),
        ("fsdp", INPUTS + WEIGHTS, OUTPUTS, (8, 4)),
        ("torchtitan@0.2", INPUTS + WEIGHTS, OUTPUTS + WEIGHTS, (8, 8)),
    ],
)
def test_a_cast_reads_two_bytes_and_writes_two(
    stack: str, forward: int, backward: int, kernels: tuple[int, int]
) -> None:
    layer = TABLE.operators(block_shape(stack), "layer")
    phases = (layer.forward, layer.backward)
    assert [named(phase, MemoryBound, "casts") for phase in phases] == [
        [MemoryBound("fp8 casts forward", 4 * forward)],
        [MemoryBound("fp8 casts backward", 4 * backward)],
    ]
    launches = [named(phase, KernelLaunches, "casts") for phase in phases]
    assert launches == [
        [KernelLaunches("fp8 casts forward", kernels[0])],
        [KernelLaunches("fp8 casts backward", kernels[1])],
    ]


def test_mxfp8_keeps_a_scale_for_every_32_elements() -> None:
    """As Transformer Engine allocates them (pytorch/tensor/mxfp8_tensor.py), whole blocks."""
    tapes = [
        walk(block_shape(precision=each, tp=4), TRANSFORMER_LAYER).tape
        for each in (FP8, Precision.MXFP8)
    ]
    made = [[out for op in tape.block.operators for out in op.outputs] for tape in tapes]
    copies = 0
    for one, other in zip(*made, strict=True):
        is_copy = one.width == 1
        copies += is_copy
        assert other.nbytes == one.nbytes + is_copy * (one.numel // 32)
    assert copies == 6  # of the inputs of four linear layers, and of the two that are gathered
    gathers = [
        [
            (step, step.work.nbytes)
            for step in tape.steps
            if isinstance(step.work, Transfer) and step.work.op is CollectiveOp.ALL_GATHER
        ]
        for tape in tapes
    ]
    # Of an output's gradient both copies go, along rows and along columns (`_all_gather_mxfp8` of
    # pytorch/distributed.py; the gradient's quantizer has both usages in pytorch/module/base.py).
    of_rows = [PARTIAL in step.operator.inputs[0].at.values() for step, _ in gathers[0]]
    assert (len(of_rows), sum(of_rows)) == (6, 2)
    assert [count for _, count in gathers[1]] == [
        (1 + is_row) * (count + count // 32)
        for is_row, (_, count) in zip(of_rows, gathers[0], strict=True)
    ]
    of_copies = [
        weight_copy_bytes(block_shape(precision=each), LAYERS) for each in (FP8, Precision.MXFP8)
    ]
    # Two copies of a byte each for a parameter of two bytes: what is more are the scales.
    assert of_copies == [0, 32 * 2 * WEIGHTS // 32]


def test_an_output_matrix_in_8_bits_is_one_more_linear_layer() -> None:
    """``TELMHeadColumnParallelLinear`` of Megatron-Core: products and copies as of others."""
    shape = block_shape("megatron-core-fused", precision=Precision.MXFP8)
    head = TABLE.operators(shape, "head")
    assert [item.in_eight_bits for item in gemms((*head.forward, *head.backward))] == [True] * 3
    tokens, weights = shape.seq_len, MODEL.vocab_size * MODEL.hidden_size
    assert named((*head.forward, *head.backward), MemoryBound, "casts") == [
        MemoryBound("fp8 casts forward", 4 * tokens * MODEL.hidden_size),
        MemoryBound("fp8 casts backward", 4 * tokens * MODEL.vocab_size),
    ]
    blocks = (BlockRun(HEAD, 1),)
    assert weight_copy_bytes(shape, blocks) == 2 * weights // 32
    assert step_cast_bytes(shape, blocks) == 4 * weights
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    job = TrainingJob(model=tied, global_batch_size=1, seq_len=32, precision=Precision.MXFP8)
    plan = ResolvedPlan(stages=(32,), attention=Attention.FLASH)
    refusals = [stack_refusal(job, plan, load_stack(f"megatron-core-{name}")) for name in FUSED]
    assert [each and "tied_embeddings=true of llama3-8b" in each for each in refusals] == [
        True,
        None,
        True,
    ]


@pytest.mark.parametrize("sizes", [{"seq_len": 8200}, {"ffn_hidden_size": 14_344}])
def test_mxfp8_takes_multiples_of_32(sizes: dict[str, int]) -> None:
    """Transformer Engine quantizes no others (`is_quantizable` of MXFP8Quantizer)."""
    model = MODEL.model_copy(update=sizes)
    job = TrainingJob(
        model=model, global_batch_size=1, seq_len=model.seq_len, precision=Precision.MXFP8
    )
    plan = ResolvedPlan(stages=(32,), attention=Attention.FLASH)
    refusal = stack_refusal(job, plan, load_stack("megatron-core"))
    field, value = next(iter(sizes.items()))
    assert refusal == (
        f"precision=mxfp8 does not go with {field}={value}; "
        "allowed: multiples of 32, which share a scale"
    )


def test_weights_that_are_kept_are_cast_once_a_step() -> None:
    shape = block_shape(tp=4)
    assert num_linear_weights(shape) == {TRANSFORMER_LAYER: WEIGHTS // 4}
    assert step_cast_bytes(shape, LAYERS) == 4 * 32 * WEIGHTS // 4
    assert step_cast_bytes(block_shape("torchtitan@0.2"), LAYERS) == 0
    cast_s = 4 * 32 * WEIGHTS / memory_rate_bytes_per_s(DEVICE)
    longer_ps = [step(each, "megatron-core").breakdown_ps for each in (FP8, BF16)]
    update_ps = longer_ps[0][Category.OPTIMIZER] - longer_ps[1][Category.OPTIMIZER]
    assert update_ps == pytest.approx(to_ps(cast_s), abs=2)


def test_gathers_of_linear_operands_are_halved_and_nothing_else() -> None:
    def sizes(block: str, precision: Precision, stack: str) -> list[tuple[CollectiveOp, int]]:
        operators = TABLE.operators(block_shape(stack, precision=precision, tp=4), block)
        both = (*operators.forward, *operators.backward)
        return [(item.op, item.size_bytes) for item in both if isinstance(item, Collective)]

    for stack in ("megatron-core", "torchtitan@0.2"):
        for block in ("head", "embedding"):
            assert sizes(block, FP8, stack) == sizes(block, BF16, stack)
        halved = [
            (op, size // (2 if op is CollectiveOp.ALL_GATHER else 1))
            for op, size in sizes("layer", BF16, stack)
        ]
        assert sizes("layer", FP8, stack) == halved
        assert CollectiveOp.ALL_GATHER in dict(halved)


def kept(shape: BlockShape) -> Counter[tuple[str, int]]:
    """Return the tensors that a layer keeps, and their bytes."""
    return Counter(TABLE.saved_tensors(shape, "layer"))


def test_transformer_engine_keeps_the_fp8_copy_of_a_linear_layers_input() -> None:
    in_fp8, in_bf16 = (kept(block_shape(precision=each)) for each in (FP8, BF16))
    inputs = ("attention norm", "mlp norm", "attention", "activation")
    sizes = dict(in_bf16.keys())
    assert in_fp8 - in_bf16 == Counter((f"{each} in fp8", sizes[each] // 2) for each in inputs)
    # The backward of flash attention reads its output, which in bf16 both of them share.
    assert in_bf16 - in_fp8 == Counter(
        (each, sizes[each]) for each in inputs if each != "attention"
    )


def test_the_product_behind_attention_keeps_its_output_and_no_copy_where_both_would_stay() -> None:
    """`set_save_original_input` of Megatron-Core 0.14 and later, where scaling is not delayed."""
    stacks = "megatron-core@0.12", "megatron-core@0.16"
    old, new = (kept(block_shape(each, precision=Precision.MXFP8, tp=4)) for each in stacks)
    numbers = 8192 * MODEL.hidden_size // 4
    assert old - new == Counter([("attention in fp8", numbers + numbers // 32)])
    assert not new - old
    assert kept(block_shape("megatron-core@0.12")) == kept(block_shape("megatron-core@0.16"))


def test_selective_recompute_drops_the_bf16_output_of_the_attention_core() -> None:
    dropped = kept(block_shape()) - kept(replace(block_shape(), recompute=Recompute.SELECTIVE))
    assert {name for name, _ in dropped} == {"log-sum-exp", "attention"}


def test_torchtitan_keeps_the_bf16_input() -> None:
    assert kept(block_shape("torchtitan@0.2")) == kept(
        block_shape("torchtitan@0.2", precision=BF16)
    )


@pytest.mark.parametrize("attention", list(Attention))
@pytest.mark.parametrize("recompute", list(Recompute))
@pytest.mark.parametrize("stack", STACKS)
def test_of_a_layers_passes_the_gradient_of_its_input_is_left(
    stack: str, recompute: Recompute, attention: Attention
) -> None:
    for tp, precision in product((1, 4), (FP8, BF16)):
        shape = block_shape(stack, precision=precision, tp=tp)
        shape = replace(shape, recompute=recompute, attention=attention)
        assert TABLE.memory(shape, "layer").left == shape.message_bytes


TOKENS, H, F = 8192, 4096, 14_336
# One matrix of the MLP: of a gradient both copies, of torchtitan's input and weight, too.
GRADIENT, AGAIN = 2 * TOKENS * F, 2 * H * (TOKENS + F)


@pytest.mark.parametrize(
    ("stack", "tp", "name", "size"),
    [
        ("megatron-core", 1, "mlp gate, mlp in", 2 * GRADIENT),  # one product
        ("fsdp", 1, "mlp gate", GRADIENT),
        ("torchtitan@0.2", 1, "mlp gate", GRADIENT + AGAIN),
        # A gradient that is gathered in fp8 is one of its copies.
        ("megatron-core", 4, "mlp out", TOKENS * H),
        ("torchtitan@0.2", 4, "mlp out", TOKENS * H + F // 4 * 2 * (TOKENS + H)),
    ],
)
def test_backward_holds_both_copies_of_an_operand(
    stack: str, tp: int, name: str, size: int
) -> None:
    operators = walk(block_shape(stack, tp=tp), "layer").tape.block.operators
    (found,) = [each for each in operators if each.name == name]
    assert sum(int(each.nbytes) for each in found.backward_scratch) == size


def test_passes_need_copies_beside_what_outweighs_them_in_bf16() -> None:
    fp8, bf16 = (
        {each: TABLE.memory(block_shape(each, precision=precision), "layer") for each in STACKS}
        for precision in (FP8, BF16)
    )
    # Gradients of the layer's output, of both products and of the activation, which is freed; an
    # fp8 copy of that frees half as much.
    backward = 2 * TOKENS * (H + 2 * F)
    assert {each.backward for each in bf16.values()} == {backward}
    assert {fp8[each].backward for each in ("megatron-core", "fsdp")} == {backward + TOKENS * F}
    # The last product: gradients of output, input and weight, and two copies of each operand.
    assert fp8["torchtitan@0.2"].backward == (2 + 2) * (TOKENS * H + TOKENS * F + H * F)
    # Forward: the product's output and its sum with the residual stream; before the sum the bf16
    # inputs of the MLP and of the product, and the other copy; or both copies of both operands.
    forward = 2 * 2 * TOKENS * H
    assert {each.forward for each in bf16.values()} == {forward}
    assert fp8["megatron-core"].forward == forward + 3 * TOKENS * F
    assert fp8["torchtitan@0.2"].forward == 2 * TOKENS * H + 2 * F * (TOKENS + H)


def test_offloaded_weights_leave_their_fp8_copies() -> None:
    job = TrainingJob(model=MODEL, global_batch_size=8, seq_len=8192, precision=FP8)
    plan = ResolvedPlan(
        dp=8,
        zero_stage=3,
        attention=Attention.FLASH,
        offload=Offload.PARAMETERS,
        stages=(MODEL.num_layers,),
    )
    stage = simulate(job, plan, load_cluster("dgx-h100"), load_stack("fsdp")).memory.by_stage[0]
    assert stage.parameters_bytes == 2 * 32 * WEIGHTS


def test_offloaded_states_leave_the_cast_of_a_step_on_the_device() -> None:
    stack = load_stack("megatron-core").model_copy(
        update={
            "offload_modes": (Offload.NONE, Offload.OPTIMIZER),
            "host_bandwidth_fraction": 0.43,
        }
    )
    job = TrainingJob(model=MODEL, global_batch_size=8, seq_len=2048, precision=FP8)
    plan = ResolvedPlan(
        dp=8,
        zero_stage=1,
        attention=Attention.FLASH,
        offload=Offload.OPTIMIZER,
        stages=(MODEL.num_layers,),
    )
    updates_ps = [
        simulate(replace(job, precision=each), plan, load_cluster("dgx-h100"), stack).breakdown_ps[
            Category.OPTIMIZER
        ]
        for each in (FP8, BF16)
    ]
    cast_s = 4 * 32 * WEIGHTS / memory_rate_bytes_per_s(DEVICE)
    assert updates_ps[0] - updates_ps[1] == pytest.approx(to_ps(cast_s), abs=2)


@pytest.mark.parametrize("reduce", [None, BF16])
def test_gradients_of_fp8_training_are_those_of_bf16(reduce: Precision | None) -> None:
    found = []
    stack = load_stack("torchtitan@0.2")
    costs = CostModel(load_cluster("dgx-h100"), stack, 8)
    for precision in (FP8, BF16):
        job = TrainingJob(model=MODEL, global_batch_size=8, seq_len=2048, precision=precision)
        plan = ResolvedPlan(
            dp=8,
            zero_stage=3,
            attention=Attention.FLASH,
            reduce_precision=reduce,
            stages=(MODEL.num_layers,),
        )
        built = build_step(job, plan, costs)
        found.append((built.memory[0].gradients_bytes, built.setting.plan.gradient_formats))
    assert found[0] == found[1]
    assert found[0][0] == 4 * -(-count_parameters(MODEL) // 8)
    stack = load_stack("megatron-core")
    formats = Formats(BF16, None)
    assert casts_of(stack, FP8, formats) == casts_of(stack, BF16, formats)
    assert gradient_bytes(stack, FP8, formats) == (2, 2)
    refused = formats_refusal(stack, FP8, Formats(FP8, None))
    assert refused is not None
    assert "allowed: fp32, bf16 (--grad-reduce" in refused


@pytest.mark.parametrize("stack", ["megatron-core", "fsdp"])
def test_copies_of_weights_are_whole_on_every_rank(stack: str) -> None:
    fp8, bf16 = (step(each, stack).memory.by_stage[0] for each in (FP8, BF16))
    # Where fp8 copies are the weights, they take as much as these did in bf16.
    copies = 0 if stack == "megatron-core" else 2 * 32 * WEIGHTS
    assert fp8.parameters_bytes - bf16.parameters_bytes == copies
    assert fp8.gradients_bytes == bf16.gradients_bytes
    assert fp8.optimizer_states_bytes == bf16.optimizer_states_bytes


@pytest.mark.parametrize(("stack", "tp"), [*((name, 1) for name in STACKS), ("megatron-core", 4)])
def test_an_fp8_step_is_faster_but_less_than_twice_as_fast(stack: str, tp: int) -> None:
    for cluster in ("dgx-h100", "dgx-h200"):
        fp8, bf16 = (step(each, stack, cluster, tp) for each in (FP8, BF16))
        assert bf16.step_ps / 2 < fp8.step_ps < 0.95 * bf16.step_ps
        for category in (Category.ATTENTION, Category.BUBBLE):
            assert fp8.breakdown_ps[category] == bf16.breakdown_ps[category]
        assert fp8.breakdown_ps[Category.ELEMENTWISE] > bf16.breakdown_ps[Category.ELEMENTWISE]


def test_full_recompute_casts_again() -> None:
    shape = replace(block_shape(), recompute=Recompute.FULL)
    assert len(named(TABLE.operators(shape, "layer").recompute, MemoryBound, "casts")) == 1


def test_utilisation_is_that_of_the_fp8_peak() -> None:
    result = step(FP8, "megatron-core")
    assert result.peak_flops_per_s == 1979e12
    assert result.mfu_fraction == pytest.approx(result.model_flops_per_s_per_gpu / 1979e12)


@pytest.mark.parametrize(
    ("cluster", "allowed"),
    [
        ("dgx-a100", "a100-sxm4-80gb; allowed: bf16, fp16, fp32"),
        ("dgx-1v", "v100-sxm2-32gb; allowed: fp16, fp32"),
        ("localhost-cpu", "cpu-generic; allowed: bf16, fp32"),
    ],
)
def test_devices_without_fp8_refuse_it_by_name(cluster: str, allowed: str) -> None:
    with pytest.raises(PlanError) as caught:
        step(FP8, "megatron-core", cluster)
    assert str(caught.value).startswith("precision=fp8 is not available on ")
    assert str(caught.value).endswith(allowed)


@pytest.mark.parametrize(
    "name", [each for each in list_stacks() if FP8 not in load_stack(each).precisions]
)
def test_stacks_without_fp8_refuse_it_by_name(name: str) -> None:
    stack = load_stack(name)
    plan = ResolvedPlan(
        attention=stack.attention, zero_stage=stack.zero_stage, stages=(MODEL.num_layers,)
    )
    job = TrainingJob(model=MODEL, global_batch_size=1, seq_len=2048, precision=FP8)
    with pytest.raises(PlanError, match=f"precision=fp8 is not offered by stack {name}; allowed"):
        simulate(job, plan, load_cluster("dgx-h100"), stack)


def test_an_odd_width_is_warned_about() -> None:
    model = MODEL.model_copy(update={"ffn_hidden_size": 14_344, "name": "odd"})
    plan = ResolvedPlan(dp=8, attention=Attention.FLASH, stages=(32,))
    warned = []
    for precision in (FP8, BF16):
        job = TrainingJob(model=model, global_batch_size=8, seq_len=2048, precision=precision)
        result = simulate(job, plan, load_cluster("dgx-h100"), load_stack("megatron-core"))
        warned.append([line for line in result.warnings if "multiple of 16" in line])
    assert [len(lines) for lines in warned] == [1, 0]


def test_a_layer_is_gathered_in_8_bits_but_for_its_norms() -> None:
    """Of Llama 3 8B a layer has 218,103,808 weights of seven matrices and 8,192 of norms.

    torchao 0.18 under torchtitan 0.2.2 was counted to gather them so, each scale one all-reduce.
    """
    job = TrainingJob(
        model=load_model("llama3-8b"), global_batch_size=8, seq_len=128, precision=Precision.FP8
    )
    titan = load_stack("torchtitan@0.2")
    calls = {}
    for precomputes in (False, True):
        recipe = titan.fp8.model_copy(
            update={"gathers_parameters": True, "precomputes_scales": precomputes}
        )
        stack = titan.model_copy(update={"fp8": recipe})
        plan = ResolvedPlan(dp=8, zero_stage=3, attention=Attention.FLASH, stages=(32,))
        calls[precomputes] = {
            (each.op, each.size_bytes): each.num_calls for each in rank_traffic(job, plan, stack, 0)
        }
    gather = CollectiveOp.ALL_GATHER, 218_103_808 + 2 * 8_192
    assert {each[gather] for each in calls.values()} == {64}
    assert calls[False][CollectiveOp.ALL_REDUCE, 4] == 64 * 7
    assert calls[True][CollectiveOp.ALL_REDUCE, 4 * 32 * 7] == 1
