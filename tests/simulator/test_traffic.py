"""Bytes on the wire, exactly, for a buffer of W bytes and N ranks."""

from dataclasses import replace
from fractions import Fraction

import pytest

from meshwright.hwprofiles import (
    Attention,
    CollectiveOp,
    Precision,
    Recompute,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    Axis,
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.account.traffic import rank_traffic, sent_bytes
from meshwright.simulator.blocks import BlockTable, Collective
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import BlockKind, BlockRun
from meshwright.simulator.replication.data_parallel import stage_parameters

MODEL = ModelSpec(
    name="small", num_layers=4, hidden_size=256, num_heads=8, vocab_size=1024, seq_len=128
)


def job_of(batch: int, precision: Precision = Precision.FP16) -> TrainingJob:
    return TrainingJob(
        model=MODEL, global_batch_size=batch, seq_len=MODEL.seq_len, precision=precision
    )


def weights_bytes(job: TrainingJob, plan: ResolvedPlan, stack_name: str) -> int:
    """Return W: the 16-bit weights, and as many bytes of 16-bit gradients."""
    shape = BlockShape.of(job, plan, load_stack(stack_name))
    return 2 * stage_parameters(
        shape, Stage((BlockRun("layer", 4),), has_embedding=True, has_head=True)
    )


@pytest.mark.parametrize("dp", [2, 3, 8])
@pytest.mark.parametrize(("zero_stage", "factor"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_sends_what_its_paper_says(dp: int, zero_stage: int, factor: int) -> None:
    """Rajbhandari et al. 2020, section 7: stages 1 and 2 as plain data parallel, stage 3 x 1.5."""
    plan = ResolvedPlan(dp=dp, zero_stage=zero_stage, stages=(4,))
    job = job_of(dp)
    traffic = rank_traffic(job, plan, load_stack("deepspeed"), 0)
    share = Fraction(dp - 1, dp)
    exact = factor * share * weights_bytes(job, plan, "deepspeed")
    # Where the ranks do not divide a unit, its shards are filled up to one size.
    # Only what is sharded, and at most by one 16-bit number less than a rank has for each.
    fills = zero_stage > 0 and dp == 3
    filled = sum(2 * (dp - 1) * each.num_calls for each in traffic) if fills else 0
    assert 0 <= sent_bytes(traffic, Axis.DP) - exact <= filled
    if zero_stage:
        assert all(each.size_bytes % (2 * dp) == 0 for each in traffic if each.axis is Axis.DP)


def test_sharded_gradients_are_reduced_in_every_microbatch_others_once() -> None:
    for zero_stage, reductions in ((1, 1), (2, 4), (3, 4)):
        plan = ResolvedPlan(dp=2, zero_stage=zero_stage, stages=(4,))
        traffic = rank_traffic(job_of(8), plan, load_stack("deepspeed"), 0)
        shape = BlockShape.of(job_of(8), plan, load_stack("deepspeed"))
        whole = stage_parameters(
            shape, Stage((BlockRun("layer", 4),), has_embedding=True, has_head=True)
        )
        reduced = [each for each in traffic if each.op is CollectiveOp.REDUCE_SCATTER]
        assert sum(each.num_calls * each.size_bytes for each in reduced) == reductions * 2 * whole


def test_backward_gathers_beside_the_gradient_of_an_input_and_sums_beside_that_of_a_weight() -> (
    None
):
    """Megatron-Core's ``LinearWithGradAccumulationAndAsyncCommunication``."""
    plan = ResolvedPlan(tp=2, sequence_parallel=True, stages=(4,))
    stack = load_stack("megatron-core").model_copy(update={"tp_in_pieces": False})
    shape = BlockShape.of(job_of(1), plan, stack)
    operators = BlockTable().operators(shape, "layer")
    assert not any(getattr(each, "overlapped_with", None) for each in operators.forward)
    calls = [each for each in operators.backward if isinstance(each, Collective)]
    calls = [each for each in calls if each.overlapped_with]
    contracted = [
        each.overlapped_with.k
        for each in calls
        if each.op is CollectiveOp.ALL_GATHER and each.overlapped_with
    ]
    tokens = [
        each.overlapped_with.k
        for each in calls
        if each.op is CollectiveOp.REDUCE_SCATTER and each.overlapped_with
    ]
    assert sorted(contracted) == [3 * 256 // 2, 4 * 256 // 2]  # outputs of a rank
    assert tokens == [MODEL.seq_len] * 2


def covers(model: ModelSpec, kind: BlockKind, phase: str) -> list[tuple[str, str | None]]:
    """Return a block's collectives over tensor ranks, with the products that hide them."""
    job = TrainingJob(model=model, global_batch_size=1, seq_len=128, precision=Precision.BF16)
    plan = ResolvedPlan(tp=2, sequence_parallel=True, stages=(model.num_layers,))
    operators = BlockTable().operators(BlockShape.of(job, plan, load_stack("megatron-core")), kind)
    calls = (each for each in getattr(operators, phase) if isinstance(each, Collective))
    return [
        (each.op.value, each.overlapped_with and each.overlapped_with.name)
        for each in calls
        if each.axis is Axis.TP
    ]


def test_in_pieces_tokens_move_beside_the_products_that_have_buffers() -> None:
    """Transformer Engine's of attention and of MLPs: not the output matrix, not shared experts.

    Latent attention has linear layers without buffers, and then Megatron-Core has none at all.
    """
    gather, scatter = "all_gather", "reduce_scatter"
    attention = [(gather, "queries, keys, values"), (scatter, "attention output")]
    assert covers(MODEL, "layer", "forward") == [
        *attention,
        (gather, "mlp in"),
        (scatter, "mlp out"),
    ]
    backward = covers(MODEL, "layer", "backward")
    assert len(backward) == 6
    assert all(cover for _, cover in backward)
    assert {cover for _, cover in covers(MODEL, "head", "forward")} == {None}
    shared = covers(load_model("glm4.5"), "expert layer", "forward")
    assert shared[:2] == attention
    assert {cover for _, cover in shared[2:]} == {None}
    assert {cover for _, cover in covers(load_model("deepseek-v3"), "layer", "forward")} == {None}


def test_tensor_parallelism_sends_four_all_reduces_of_the_activations_a_layer() -> None:
    plan = ResolvedPlan(tp=4, pp=4, microbatch_size=2, stages=(1,) * 4)
    traffic = rank_traffic(job_of(6), plan, load_stack("megatron-lm-2022"), 1)
    activations = 2 * 128 * 256 * 2
    assert [(each.op, each.size_bytes, each.num_calls) for each in traffic] == [
        (CollectiveOp.ALL_REDUCE, activations, 4 * 3)
    ]


def test_sequence_parallelism_makes_four_and_six_collectives_a_layer() -> None:
    plan = ResolvedPlan(tp=4, pp=4, sequence_parallel=True, stages=(1,) * 4)
    traffic = rank_traffic(job_of(1), plan, load_stack("megatron-lm-2022"), 1)
    counts = {each.op: each.num_calls for each in traffic}
    assert counts == {CollectiveOp.ALL_GATHER: 6, CollectiveOp.REDUCE_SCATTER: 4}
    saved = sent_bytes(traffic, Axis.TP) - 2 * Fraction(3, 4) * 128 * 256 * 2
    plain = rank_traffic(
        job_of(1), ResolvedPlan(tp=4, pp=4, stages=(1,) * 4), load_stack("megatron-lm-2022"), 1
    )
    assert saved == sent_bytes(plain, Axis.TP)


def test_full_recompute_repeats_the_forward_collectives() -> None:
    plan = ResolvedPlan(tp=2, pp=4, recompute=Recompute.FULL, stages=(1,) * 4)
    traffic = rank_traffic(job_of(1), plan, load_stack("megatron-lm-2021"), 2)
    assert [each.num_calls for each in traffic] == [6]


@pytest.mark.parametrize("dp_shard", [1, 2, 4, 8])
def test_hybrid_sharding_sums_a_shard_over_its_replicas(dp_shard: int) -> None:
    """Gathers stay inside a set of shards; a shard's gradient is all-reduced over the sets."""
    plan = ResolvedPlan(dp=8, dp_shard=dp_shard, zero_stage=3, stages=(4,))
    job = job_of(8, Precision.BF16)
    stack = load_stack("torchtitan@0.2")
    traffic = rank_traffic(job, plan, stack, 0)
    shape = BlockShape.of(job, plan, stack)
    count = stage_parameters(
        shape, Stage((BlockRun("layer", 4),), has_embedding=True, has_head=True)
    )
    inside = Fraction(dp_shard - 1, dp_shard)
    replicas = 8 // dp_shard
    across = 2 * Fraction(replicas - 1, replicas) * Fraction(4 * count, dp_shard)
    # Layers are gathered for both passes, the root (embedding, final norm, head) for the first.
    gathered = count + 4 * shape.parameters["layer"]
    expected = inside * (2 * gathered + 4 * count) + across
    assert abs(sent_bytes(traffic, Axis.DP) - expected) <= 64


@pytest.mark.parametrize("dp", [2, 8])
@pytest.mark.parametrize("reshards", [True, False])
def test_fsdp_gathers_layers_once_more_where_it_reshards(dp: int, *, reshards: bool) -> None:
    """W: 16-bit parameters gathered and 16-bit gradients reduced; of L layers, gathered again.

    A layer has 12 h^2 weights, 9 h biases and two norms of 2 h; W has also the table and final
    norm, which stay gathered, and learned positions.
    """
    plan = ResolvedPlan(dp=dp, zero_stage=3, reshard_after_forward=reshards, stages=(4,))
    job = job_of(dp, Precision.BF16)
    traffic = rank_traffic(job, plan, load_stack("fsdp"), 0)
    share = Fraction(dp - 1, dp)
    again = reshards * 2 * 4 * (12 * 256**2 + 13 * 256)
    expected = share * (2 * weights_bytes(job, plan, "fsdp") + again)
    assert sent_bytes(traffic, Axis.DP) == expected


def test_a_search_of_unused_weights_sums_a_number_for_each_tensor() -> None:
    job = TrainingJob(model=load_model("gpt2"), global_batch_size=16, seq_len=1024)
    cluster, stack = load_cluster("dgx-a100"), load_stack("ddp")
    plain = ResolvedPlan(dp=8, stages=(12,), attention=Attention.FLASH)
    searching = replace(plain, find_unused=True)
    # Two tables and the final norm; in a layer two norms and four products with weight and bias
    # each. Buckets are as transformers' Trainer was counted to reduce them (docs/count.md): as the
    # model lists its weights, so that the table is the one of 1 MiB.
    sizes = {4 * (2 + 2 + 12 * 12): 1, 154_389_504: 1, 31_494_144: 1, 28_351_488: 11, 9_216: 1}
    reduced = {each.size_bytes: each.num_calls for each in rank_traffic(job, searching, stack, 0)}
    assert reduced == sizes
    steps = [simulate(job, plan, cluster, stack).step_ps for plan in (plain, searching)]
    assert steps[0] < steps[1]
    with pytest.raises(PlanError, match="find_unused=True is not offered by stack fsdp"):
        simulate(job, replace(searching, zero_stage=3), cluster, load_stack("fsdp"))
