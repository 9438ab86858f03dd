"""Selective recomputation per operator against closed forms, and between no and full recompute."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    Attention,
    CollectiveOp,
    Precision,
    Recompute,
    load_cluster,
    load_stack,
)
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob, load_model, simulate
from meshwright.simulator.blocks import (
    BlockShape,
    BlockTable,
    BorderGradients,
    Collective,
    Gemm,
    MemoryBound,
    Operator,
    hardware_flops,
    model_flops,
    sum_flops,
)
from meshwright.simulator.layout.mesh import Axis

RELAXED = settings(deadline=None, max_examples=40)
TITAN = load_stack("torchtitan-2024-12")  # recomputation stops early
LLAMA, GPT = load_model("llama3-8b"), load_model("gpt2")
OP = Recompute.SELECTIVE_OP
TABLE = BlockTable()


def llama(heads: int, kv_heads: int, ffn: int, **fields: object) -> ModelSpec:
    sizes = {
        "num_layers": 4,
        "hidden_size": 8 * heads,
        "num_heads": heads,
        "head_dim": 8,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
    }
    return LLAMA.model_copy(update=sizes | fields)


def shape_of(model: ModelSpec, **fields: Any) -> BlockShape:
    """Return a shape of *model* on torchtitan that chooses operators unless told otherwise."""
    seq_len = fields.pop("seq_len", 64)
    precision = fields.pop("precision", Precision.BF16)
    job = TrainingJob(model=model, global_batch_size=12, seq_len=seq_len, precision=precision)
    usual = {"stages": (model.num_layers,), "attention": Attention.FLASH, "recompute": OP}
    return BlockShape.of(job, ResolvedPlan(**(usual | fields)), TITAN)


def recomputed(shape: BlockShape) -> tuple[Operator, ...]:
    return TABLE.operators(shape, "layer").recompute


def saved(shape: BlockShape) -> int:
    return TABLE.memory(shape, "layer").saved


def collectives(operators: tuple[Operator, ...]) -> list[tuple[CollectiveOp, Axis]]:
    return [(each.op, each.axis) for each in operators if isinstance(each, Collective)]


SIZES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "kv_per_rank": st.integers(1, 3),
        "queries": st.integers(1, 3),
        "ffn_per_rank": st.integers(1, 60),
        "chunks": st.integers(1, 6),
        "microbatch_size": st.sampled_from([1, 2, 3]),
    }
)


@RELAXED
@given(sizes=SIZES, sequence=st.booleans())
def test_a_llama_layer_keeps_and_repeats_its_closed_forms(
    sizes: dict[str, int], *, sequence: bool
) -> None:
    """Kept of the products: queries, values, gate, output of the MLP; repeated: the others."""
    tp, b, s = sizes["tp"], sizes["microbatch_size"], 4 * sizes["chunks"]
    kv_heads = tp * sizes["kv_per_rank"]
    a, f = kv_heads * sizes["queries"], tp * sizes["ffn_per_rank"]
    h, g, t = 8 * a, 8 * kv_heads, s * b
    shape = shape_of(
        llama(a, kv_heads, f), tp=tp, sequence_parallel=sequence, microbatch_size=b, seq_len=s
    )
    parts = sequence and tp > 1
    local = 2 * t * h // tp if parts else 2 * t * h  # the input, and each sum that is scattered
    inside = 2 * t * (h + g + h + f) // tp + 4 * a * s * b // tp
    assert saved(shape) == local + inside + 2 * t * h + 2 * local * parts
    again = recomputed(shape)
    assert sum_flops(again) == 2 * t * (h * g + h * h + h * f) // tp
    reduced = [CollectiveOp.ALL_REDUCE] if tp > 1 else []
    calls = [CollectiveOp.ALL_GATHER] * 2 if parts else reduced
    assert collectives(again) == [(each, Axis.TP) for each in calls]


def test_hardware_flops_repeat_the_three_products_of_every_layer() -> None:
    job = TrainingJob(model=LLAMA, global_batch_size=4, seq_len=8192, precision=Precision.BF16)
    plan = ResolvedPlan(stages=(32,), recompute=OP)
    h, g, f = 4096, 1024, 14_336
    repeated = hardware_flops(job, plan, TITAN) - model_flops(job)
    assert repeated == 32 * 2 * 4 * 8192 * (h * g + h * h + h * f)
    every = 2 * h * (h + g) + 3 * h * f
    assert (h * g + h * h + h * f) / every == pytest.approx(0.365, abs=5e-4)


@pytest.mark.parametrize(
    ("model", "kept", "repeated"),
    [
        (
            "llama3-8b",
            ["queries", "values", "mlp gate", "mlp out"],
            ["keys", "attention output", "mlp in"],
        ),
        # Biased products are another operator, and dropout's mask comes after the last one.
        (
            "gpt2",
            [],
            ["queries", "keys", "values", "attention output", "mlp in", "mlp out"],
        ),
        # Biases on queries, keys and values alone: the count starts at the output.
        (
            "qwen2-0.5b",
            ["attention output", "mlp in"],
            ["queries", "keys", "values", "mlp gate"],
        ),
    ],
)
def test_every_second_product_without_a_bias_is_kept(
    model: str, kept: list[str], repeated: list[str]
) -> None:
    spec = load_model(model)
    shape = shape_of(spec)
    assert [each.name for each in recomputed(shape) if isinstance(each, Gemm)] == repeated
    names = [each.name for each in TABLE.saved_tensors(shape, "layer")]
    assert [each for each in names if each in (*kept, *repeated)] == kept


def test_an_fp8_product_has_its_bias_behind_it() -> None:
    shapes = [shape_of(GPT, precision=each) for each in (Precision.FP8, Precision.BF16)]
    tokens, h = 64, 768
    assert saved(shapes[0]) - saved(shapes[1]) == 2 * tokens * 6 * h
    again = recomputed(shapes[0])
    products = [(each.name, each.in_eight_bits) for each in again if isinstance(each, Gemm)]
    assert products == [(name, True) for name in ("keys", "attention output", "mlp out")]
    # Inputs of keys, attention output and MLP output, and their weights: 4 bytes an element.
    (casts,) = [each for each in again if isinstance(each, MemoryBound) and "cast" in each.name]
    assert casts.size_bytes == 4 * (tokens * (h + h + 4 * h) + h * h + h * h + 4 * h * h)


def test_dropout_needs_the_second_sum() -> None:
    for dropout, sums in ((True, 2), (False, 1)):
        again = recomputed(shape_of(GPT.model_copy(update={"dropout": dropout}), tp=2))
        assert collectives(again) == [(CollectiveOp.ALL_REDUCE, Axis.TP)] * sums


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_backward_holds_all_tensors_and_what_nobody_reads(
    model: ModelSpec,
    keeps: bool,  # noqa: FBT001 - a parameter of pytest
) -> None:
    """Without dropout nothing reads what the last product gave out, nor its sum."""
    shape = shape_of(model, tp=2, sequence_parallel=True, seq_len=1024)
    ending = BorderGradients(keeps_gradients=keeps)
    op, none = (
        TABLE.memory(replace(shape, recompute=each), "layer", ending)
        for each in (OP, Recompute.NONE)
    )
    unread = 0 if model.dropout else 2 * shape.message_bytes + shape.message_bytes
    assert op.saved + op.backward == none.saved + none.backward + unread


def test_forward_needs_the_widest_moment_of_the_mlp() -> None:
    """Beside all that is kept, but for the MLP's output, live: norm, value and product."""
    s, h, f = 1024, 4096, 14_336
    forward = TABLE.memory(shape_of(LLAMA, seq_len=s), "layer").forward
    # The residual, the norm's output, both products of which one is kept, and the activation.
    assert forward == 2 * s * (h + h + f + f) - 2 * s * h


def test_time_and_memory_lie_between_none_and_full() -> None:
    job = TrainingJob(model=LLAMA, global_batch_size=16, seq_len=8192, precision=Precision.BF16)
    cluster = load_cluster("dgx-h100")
    steps = []
    for mode in (Recompute.NONE, OP, Recompute.FULL):
        plan = ResolvedPlan(
            dp=8, zero_stage=3, stages=(32,), attention=Attention.FLASH, recompute=mode
        )
        steps.append(simulate(job, plan, cluster, TITAN))
    times = [step.step_ps for step in steps]
    peaks = [step.memory.peak_bytes for step in steps]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)
    assert len({*times}) == len({*peaks}) == 3
