"""Many shapes in one walk: columns of sizes say what each shape alone says, and do not wrap."""

from dataclasses import replace
from itertools import product

import pytest

from meshwright.hwprofiles import Attention, ContextParallel, Precision, Recompute, load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.model import rank_parameters

KINDS = ("embedding", "layer", "head")
MILLION = 2**20
GPT = load_model("gpt2")
TRILLION = load_model("megatron-1t").model_copy(
    update={"seq_len": MILLION, "max_positions": MILLION}
)


def shapes_of(stack_name: str, *, seq_len: int, recompute: Recompute) -> list[BlockShape]:
    """Return shapes that differ in tensor-parallel ranks, batch and sequence parallelism."""
    stack = load_stack(stack_name)
    model = GPT if seq_len < MILLION else TRILLION
    one = BlockShape(
        trained=model,
        seq_len=seq_len,
        precision=Precision.BF16,
        microbatch_size=1,
        tp=1,
        sequence_parallel=False,
        recompute=recompute,
        attention=stack.attention,
        stack=stack,
        parameters=rank_parameters(model, 1, 128),
    )
    return [
        replace(
            one,
            tp=tp,
            microbatch_size=size,
            sequence_parallel=splits,
            parameters=rank_parameters(model, tp, 128),
        )
        for tp, size, splits in product((1, 2, 4), (1, 2, 3), (False, True))
        if stack.tensor_parallel or tp == 1
        if tp > 1 or not splits
    ]


@pytest.mark.parametrize("stack", ["megatron-core", "megatron-lm-2022", "torchtitan@0.2", "ddp"])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_a_column_says_what_each_shape_alone_says(stack: str, recompute: Recompute) -> None:
    shapes = shapes_of(stack, seq_len=512, recompute=recompute)
    table = BlockTable()
    table.prepare(shapes)
    for shape, kind in product(shapes, KINDS):
        alone = BlockTable()
        assert table.operators(shape, kind) == alone.operators(shape, kind)
        assert table.memory(shape, kind) == alone.memory(shape, kind)


@pytest.mark.parametrize("attention", [Attention.FLASH, Attention.UNFUSED])
def test_columns_do_not_wrap_at_a_million_tokens_of_a_trillion_parameters(
    attention: Attention,
) -> None:
    """A shape alone is of Python's whole numbers, which have no end; 2 ** 63 is that of a column's.

    The data-parallel ranks of 98,304 GPUs are no part of a block: only its own sizes can wrap.
    """
    shapes = [
        replace(shape, attention=attention)
        for shape in shapes_of("megatron-core", seq_len=MILLION, recompute=Recompute.NONE)
    ]
    table = BlockTable()
    table.prepare(shapes)
    for shape, kind in product(shapes, KINDS):
        alone = BlockTable()
        assert table.operators(shape, kind) == alone.operators(shape, kind)
        assert table.memory(shape, kind) == alone.memory(shape, kind)
        assert min(table.memory(shape, kind)[:1]) > 0


@pytest.mark.parametrize(
    ("stack", "precision", "imbalance"),
    [
        ("megatron-core", Precision.FP8, 1.0),
        ("megatron-core", Precision.BF16, 1.5),
        ("torchtitan@0.2", Precision.BF16, 1.0),
        ("fsdp", Precision.BF16, 1.0),
    ],
)
def test_a_column_of_experts_says_what_each_shape_alone_says(
    stack: str, precision: Precision, imbalance: float
) -> None:
    """Shapes differ in ranks of experts, of one expert, dispatchers and formats of gradients."""
    profile, job = (
        load_stack(stack),
        TrainingJob(
            model=load_model("mixtral-8x7b"),
            global_batch_size=64,
            seq_len=512,
            precision=precision,
            imbalance=imbalance,
        ),
    )
    plans = (
        ResolvedPlan(tp=tp, dp=16, ep=ep, etp=etp, dispatcher=way, gradient_precision=gradients)
        for tp, ep, way, gradients in product(
            (1, 2) if profile.tensor_parallel else (1,),
            (1, 2, 4, 8),
            profile.dispatchers or (None,),
            (None, Precision.FP32) if stack == "megatron-core" else (None,),
        )
        for etp in ({None, 1} if tp > 1 and ep > 1 else {None})
    )
    shapes = list(dict.fromkeys(BlockShape.of(job, plan, profile) for plan in plans))
    table = BlockTable()
    table.prepare(shapes)
    for shape in shapes:
        alone = BlockTable()
        kind = "expert layer"
        assert table.operators(shape, kind) == alone.operators(shape, kind)
        assert table.memory(shape, kind) == alone.memory(shape, kind)


def test_a_column_of_ranks_that_cut_sequences_says_what_each_shape_alone_says() -> None:
    """Windows, and layers that predict further tokens, have messages and gradients of their own."""
    profile = load_stack("megatron-core")
    model = load_model("mistral-7b").model_copy(update={"prediction_layers": 1})
    job = TrainingJob(model=model, global_batch_size=64, seq_len=8192)
    ways = (ContextParallel.ALL_GATHER, ContextParallel.ALL_TO_ALL)
    plans = [
        ResolvedPlan(tp=tp, cp=cp, dp=4, cp_type=way if cp > 1 else None)
        for tp, cp, way in product((1, 2), (1, 2, 4), ways)
    ]
    shapes = list(dict.fromkeys(BlockShape.of(job, plan, profile) for plan in plans))
    table = BlockTable()
    table.prepare(shapes)
    for shape in shapes:
        alone = BlockTable()
        for kind in shape.parameters:
            assert table.operators(shape, kind) == alone.operators(shape, kind)
            assert table.memory(shape, kind) == alone.memory(shape, kind)
