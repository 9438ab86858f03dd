"""What replicas add to a step: buckets, reductions, gathers, the update and the norm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    CollectiveOp,
    Precision,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.costs import Category, CostModel
from meshwright.simulator.layout import Stage
from meshwright.simulator.layout.mesh import Axis, GroupSpan, Mesh
from meshwright.simulator.layout.plan import ResolvedPlan, TrainingJob
from meshwright.simulator.ledger import (
    StepCollective,
    gradient_norm,
    gradient_reductions,
    parameter_gathers,
    price,
)
from meshwright.simulator.model import BlockRun
from meshwright.simulator.model.catalogue import load_model
from meshwright.simulator.replication.data_parallel import (
    ParametersByGroup,
    Replication,
    WireBytes,
    replication_of,
    spread,
    stage_parameters,
    sum_parameters,
    update_cost,
)

RELAXED = settings(deadline=None, max_examples=60)
CLUSTER = load_cluster("dgx-a100")
CORE = load_stack("megatron-core")
PARAMETERS = st.integers(1, 10**11)
SPANS = st.sampled_from(
    [GroupSpan(2, 1, 2), GroupSpan(8, 1, 8), GroupSpan(6, 6, 1), GroupSpan(64, 8, 8)]
)


def block_shape(name: str = "gpt2-xl", *, stack: StackProfile = CORE) -> BlockShape:
    job = TrainingJob(model=load_model(name), global_batch_size=1, seq_len=1024)
    return BlockShape.of(job, ResolvedPlan(stages=(1,)), stack)


INNER = Stage((BlockRun("layer", 5),), has_embedding=False, has_head=False)


def cost_model(stack: StackProfile = CORE, world_size: int = 64) -> CostModel:
    return CostModel(CLUSTER, stack, world_size)


@given(total=st.integers(0, 10**4), num_parts=st.integers(1, 500))
def test_a_spread_is_whole_even_and_complete(total: int, num_parts: int) -> None:
    parts = spread(total, num_parts)
    assert len(parts) == num_parts
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1
    assert parts == sorted(parts, reverse=True)


def test_parameters_of_a_rank_are_those_of_its_stages() -> None:
    shape = block_shape()
    stages = [INNER._replace(has_embedding=True), INNER, INNER._replace(has_head=True)]
    assert sum_parameters(shape, stages) == sum(stage_parameters(shape, each) for each in stages)


@RELAXED
@given(n=PARAMETERS, span=SPANS)
def test_zero_0_all_reduces_and_zero_1_scatters_and_gathers(n: int, span: GroupSpan) -> None:
    costs, wire = cost_model(), WireBytes.of(CORE, Precision.BF16)
    assert (wire.reduce_bytes, wire.gather_bytes) == (4, 2)
    plain, sharded = (Replication.of(stage, span) for stage in (0, 1))

    def expected(op: CollectiveOp, size_bytes: int) -> int:
        return costs.collective(op, size_bytes, span, Axis.DP).time_ps

    whole = price(costs, gradient_reductions(n, wire, plain))
    assert whole.time_ps == expected(CollectiveOp.ALL_REDUCE, 4 * n)
    assert parameter_gathers(n, wire, plain) == []
    scatter, gather = (
        price(costs, exchange(n, wire, sharded))
        for exchange in (gradient_reductions, parameter_gathers)
    )
    assert scatter.time_ps == expected(CollectiveOp.REDUCE_SCATTER, 4 * n)
    assert gather.time_ps == expected(CollectiveOp.ALL_GATHER, 2 * n)


def test_shards_that_do_not_divide_are_sent_filled_up() -> None:
    """Of 9 elements on 4 ranks 3 each, as reduce_scatter_tensor and all_gather_into_tensor need.

    Two bytes an element in both; a fourth of 18 bytes, rounded up, is priced, 3 elements are sent.
    """
    wire = WireBytes(reduce_bytes=2, gather_bytes=2, update_traffic_bytes=28)
    span, replicas = GroupSpan(4, 1, 4), GroupSpan(2, 2, 1)
    sharded = Replication.of(1, span, replica_span=replicas)
    scatter, over_replicas = gradient_reductions(9, wire, sharded)
    (gather,) = parameter_gathers(9, wire, sharded)
    (whole,) = gradient_reductions(9, wire, Replication.of(0, span))
    found = [
        (each.op, each.size_bytes, each.padding_bytes, each.span)
        for each in (scatter, over_replicas, gather, whole)
    ]
    assert found == [
        (CollectiveOp.REDUCE_SCATTER, 18, 6, span),
        (CollectiveOp.ALL_REDUCE, 5, 1, replicas),
        (CollectiveOp.ALL_GATHER, 18, 6, span),
        (CollectiveOp.ALL_REDUCE, 18, 0, span),
    ]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_one_replica_reduces_and_gathers_nothing(zero_stage: int) -> None:
    costs, wire = cost_model(), WireBytes.of(CORE, Precision.BF16)
    alone = Replication.of(zero_stage, GroupSpan(1, 1, 1))
    for exchange in (gradient_reductions, parameter_gathers):
        assert price(costs, exchange(10**9, wire, alone)).time_ps == 0


@RELAXED
@given(n=PARAMETERS, dp=st.integers(1, 4096))
def test_the_update_moves_the_share_of_a_rank_once(n: int, dp: int) -> None:
    costs, wire = cost_model(), WireBytes.of(CORE, Precision.BF16)
    span = GroupSpan(dp, dp, 1)
    for zero_stage, share in ((0, n), (1, -(-n // dp))):
        cost = update_cost(costs, ParametersByGroup(n), wire, Replication.of(zero_stage, span))
        expected = costs.memory_traffic(share * CORE.optimizer_traffic_bytes)
        assert cost.time_ps == cost.category_ps(Category.OPTIMIZER) == expected.time_ps
        assert cost.source_ps(expected.source) == expected.time_ps


def test_fp32_reduces_gathers_and_updates_fp32() -> None:
    wire = WireBytes.of(CORE, Precision.FP32)
    # Adam reads weight, gradient and two moments and writes all but the gradient: 7 x 4 bytes.
    assert wire == WireBytes(reduce_bytes=4, gather_bytes=4, update_traffic_bytes=28)


def norm_of(stack: StackProfile, plan: ResolvedPlan, mesh: Mesh) -> list[StepCollective]:
    job = TrainingJob(model=load_model("llama2-7b"), global_batch_size=plan.dp, seq_len=64)
    stages = (Stage((BlockRun("layer", 3),), has_embedding=True, has_head=False),)
    shape = BlockShape.of(job, plan, stack)
    return gradient_norm(shape, stages, mesh, replication_of(plan, stack, mesh))


def test_the_norm_is_one_number_reduced_over_all_ranks() -> None:
    for world_size, span in ((1, None), (8, GroupSpan(8, 1, 8)), (12, GroupSpan(12, 2, 4))):
        costs = cost_model(world_size=world_size)
        plan = ResolvedPlan(dp=world_size, stages=(32,))
        norm = norm_of(CORE, plan, Mesh.of(plan, costs.cluster.devices_per_node))
        if span is None:
            assert price(costs, norm).time_ps == 0
        else:
            same = costs.collective(CollectiveOp.ALL_REDUCE, 4, span, Axis.DP)
            assert price(costs, norm) == same


def test_dtensor_sums_a_norm_a_weight_over_one_axis_after_the_other() -> None:
    """Three layers of Llama with nine weights each, and the table; then the tokens, 8 bytes."""
    plan = ResolvedPlan(tp=2, dp=12, dp_shard=4, pp=4, zero_stage=3, stages=(8,) * 4)
    norm = norm_of(load_stack("torchtitan@0.2"), plan, Mesh.of(plan, 8))
    assert [(each.axis, each.size_bytes, each.span.num_ranks) for each in norm] == [
        (Axis.DP, 4 * 28, 4),
        (Axis.TP, 4 * 28, 2),
        (Axis.PP, 4, 4),
        (Axis.DP, 8, 12),
    ]
