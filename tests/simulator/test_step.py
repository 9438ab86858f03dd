"""From a plan to the work of a step: FLOPs, collectives, messages and collectives of replicas."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    Attention,
    Cluster,
    CollectiveOp,
    LossKernel,
    Precision,
    Recompute,
    Source,
    StackProfile,
    StageSplit,
    load_cluster,
    load_stack,
)
from meshwright.simulator.blocks import (
    BlockOperators,
    BlockShape,
    BlockTable,
    Collective,
    Gemm,
    Operator,
    hardware_flops,
    model_flops,
    sum_flops,
)
from meshwright.simulator.costs import Category, CostModel, PhaseCost
from meshwright.simulator.engine import Message, PassSegment
from meshwright.simulator.layout import Stage, rank_stages
from meshwright.simulator.layout.mesh import Axis, GroupSpan, Mesh
from meshwright.simulator.layout.plan import ResolvedPlan, TrainingJob
from meshwright.simulator.layout.stages import resolve_stages
from meshwright.simulator.ledger import (
    bucket_exchanges,
    gradient_reductions,
    parameter_gathers,
    price,
    tied_embedding_sums,
)
from meshwright.simulator.model import BlockRun
from meshwright.simulator.model.catalogue import load_model
from meshwright.simulator.model.parameters import padded_vocab_size
from meshwright.simulator.model.spec import ModelSpec
from meshwright.simulator.replication.buckets import bucket_parts
from meshwright.simulator.replication.data_parallel import (
    Replication,
    WireBytes,
)
from meshwright.simulator.schedules import Phase
from meshwright.simulator.step.build import BuiltStep, build_step
from meshwright.simulator.step.rank import message_between, virtual_stage_cost

TABLE = BlockTable()
RELAXED = settings(deadline=None, max_examples=40)
CLUSTER = load_cluster("dgx-a100")
CORE, OLD = load_stack("megatron-core"), load_stack("megatron-lm-2021")
MODELS = ["gpt2", "gpt3-175b", "megatron-1t", "llama2-7b", "llama3-8b", "llama3-70b"]


def make_plan(model: ModelSpec, **fields: object) -> ResolvedPlan:
    """Return a plan with even stages."""
    plan = ResolvedPlan(**{**fields, "pp": 1, "num_virtual_stages": 1}, stages=(1,))
    pp, vpp = (int(str(fields.get(name, 1))) for name in ("pp", "num_virtual_stages"))
    stages = resolve_stages(model, model.seq_len, pp * vpp, StageSplit.EVEN)
    return replace(plan, pp=pp, num_virtual_stages=vpp, stages=stages)


def make_job(
    model: ModelSpec, global_batch_size: int, precision: Precision = Precision.BF16
) -> TrainingJob:
    return TrainingJob(
        model=model,
        global_batch_size=global_batch_size,
        seq_len=min(model.seq_len, 2048),
        precision=precision,
    )


def built_step(
    job: TrainingJob,
    plan: ResolvedPlan,
    *,
    stack: StackProfile = CORE,
    cluster: Cluster = CLUSTER,
) -> BuiltStep:
    return build_step(job, plan, CostModel(cluster, stack, plan.world_size))


def changed_model(name: str, **changes: object) -> ModelSpec:
    return load_model(name).model_copy(update=changes)


def blocks_of(shape: BlockShape) -> list[BlockOperators]:
    """Return the embedding, a layer and the head."""
    return [TABLE.operators(shape, kind) for kind in ("embedding", "layer", "head")]


def step_flops(job: TrainingJob, plan: ResolvedPlan) -> int:
    """Return the FLOPs of every operator that any rank runs in a step."""
    shape = BlockShape.of(job, plan, CORE)
    embedding, layer, head = (
        sum_flops(block.forward + block.recompute + block.backward) for block in blocks_of(shape)
    )
    total = embedding + job.model.num_layers * layer + head
    return total * plan.num_microbatches(job) * plan.dp * plan.tp


@st.composite
def flops_cases(draw: st.DrawFn) -> tuple[TrainingJob, ResolvedPlan]:
    model = load_model(draw(st.sampled_from(MODELS)))
    degrees = [tp for tp in (1, 2, 4, 8, 12) if model.num_heads % tp == 0]
    tp = draw(st.sampled_from([tp for tp in degrees if model.num_kv_heads % tp == 0]))
    padded = model.model_copy(update={"vocab_size": padded_vocab_size(model, tp, 128)})
    dp, microbatch_size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    job = make_job(padded, dp * microbatch_size * draw(st.integers(1, 5)))
    plan = make_plan(
        padded,
        tp=tp,
        dp=dp,
        microbatch_size=microbatch_size,
        sequence_parallel=draw(st.booleans()) and tp > 1,
        recompute=draw(st.sampled_from(CORE.recompute_modes)),
    )
    return job, plan


@RELAXED
@given(case=flops_cases())
def test_operators_add_up_to_the_hardware_flops(case: tuple[TrainingJob, ResolvedPlan]) -> None:
    job, plan = case
    assert step_flops(job, plan) == hardware_flops(job, plan, CORE)
    assert step_flops(job, replace(plan, recompute=Recompute.NONE)) == model_flops(job)


@pytest.mark.parametrize("name", MODELS)
def test_flash_attention_halves_the_core_and_repeats_its_scores(name: str) -> None:
    model = load_model(name)
    padded = model.model_copy(update={"vocab_size": padded_vocab_size(model, 1, 128)})
    job, plan = make_job(padded, 8), make_plan(padded)
    core = 4 * job.tokens_per_step * job.seq_len * model.hidden_size * model.num_layers
    # Half of forward and backward (3 x), and half of one more product (a quarter of the core).
    expected = model_flops(job) - 3 * core + (3 * core) // 2 + core // 4
    assert step_flops(job, replace(plan, attention=Attention.FLASH)) == expected


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b"])
def test_full_recomputation_adds_exactly_one_forward_of_the_layers(name: str, tp: int) -> None:
    model = load_model(name)
    job = make_job(model, 4)
    shape = BlockShape.of(job, make_plan(model, tp=tp, recompute=Recompute.FULL), CORE)
    embedding, layer, head = blocks_of(shape)
    assert Counter(layer.recompute) == Counter(layer.forward)
    none = blocks_of(replace(shape, recompute=Recompute.NONE))
    assert [each.recompute for each in (embedding, head, *none)] == [()] * 5
    gemms = [each for each in layer.forward if isinstance(each, Gemm)]
    assert sum_flops(layer.backward) == 2 * sum(each.flops for each in gemms)


def collectives(operators: tuple[Operator, ...]) -> list[Collective]:
    return [each for each in operators if isinstance(each, Collective)]


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-70b"])
def test_a_layer_communicates_2_plus_2_times_or_4_plus_6_with_sequence_parallelism(
    name: str,
) -> None:
    model = load_model(name)
    job = make_job(model, 3)
    plan = make_plan(model, tp=4, microbatch_size=3)
    plain = TABLE.operators(BlockShape.of(job, plan, CORE), "layer")
    split_plan = replace(plan, sequence_parallel=True)
    split = TABLE.operators(BlockShape.of(job, split_plan, CORE), "layer")

    def ops(operators: tuple[Operator, ...]) -> Counter[CollectiveOp]:
        return Counter(each.op for each in collectives(operators))

    reduce, gather, scatter = (
        CollectiveOp.ALL_REDUCE,
        CollectiveOp.ALL_GATHER,
        CollectiveOp.REDUCE_SCATTER,
    )
    assert ops(plain.forward) == ops(plain.backward) == {reduce: 2}
    assert ops(split.forward) == {gather: 2, scatter: 2}
    assert ops(split.backward) == {gather: 4, scatter: 2}
    sbh_bytes = job.seq_len * 3 * model.hidden_size * 2
    for layer in (plain, split):
        for each in collectives(layer.forward + layer.backward):
            assert (each.size_bytes, each.axis) == (sbh_bytes, Axis.TP)


def test_without_tensor_parallelism_no_block_communicates() -> None:
    model = load_model("gpt2")
    shape = BlockShape.of(make_job(model, 1), make_plan(model), CORE)
    for block in blocks_of(shape):
        assert collectives(block.forward + block.backward + block.recompute) == []


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding_and_head_communicate_what_vocabulary_parallelism_needs(
    *, sequence_parallel: bool
) -> None:
    model = load_model("gpt3-175b")
    job = make_job(model, 2)
    plan = make_plan(model, tp=8, microbatch_size=2, sequence_parallel=sequence_parallel)
    shape = BlockShape.of(job, plan, CORE)
    tokens = 2 * job.seq_len
    activations, loss = tokens * model.hidden_size * 2, tokens * 4

    def listed(operators: tuple[Operator, ...]) -> list[tuple[str, int]]:
        return [(each.op.value, each.size_bytes) for each in collectives(operators)]

    # Fused, each rank's maximum, target logit and sum of every token go to all in one gather.
    losses = [("all_gather", 3 * loss * 8)]
    head, embedding = TABLE.operators(shape, "head"), TABLE.operators(shape, "embedding")
    unfused = shape.stack.model_copy(update={"loss": LossKernel.IN_PLACE})
    chain = TABLE.operators(replace(shape, stack=unfused), "head").forward
    assert listed(chain)[-3:] == [("all_reduce", loss)] * 3
    if sequence_parallel:
        # Positions are added to all tokens, of which a rank then keeps its own.
        assert listed(embedding.forward) == [("all_reduce", activations)]
        assert listed(embedding.backward) == [("all_gather", activations)]
        assert listed(head.forward) == [("all_gather", activations), *losses]
        assert sorted(listed(head.backward)) == [
            ("all_gather", activations),
            ("reduce_scatter", activations),
        ]
    else:
        assert listed(embedding.forward) == [("all_reduce", activations)]
        assert listed(embedding.backward) == []
        assert listed(head.forward) == losses
        assert listed(head.backward) == [("all_reduce", activations)]


@RELAXED
@given(
    name=st.sampled_from(["gpt2", "llama3-8b"]),
    pp=st.integers(1, 4),
    vpp=st.integers(1, 3),
    num_microbatches=st.integers(1, 3),
)
def test_virtual_stages_hold_the_model_in_order(
    name: str, pp: int, vpp: int, num_microbatches: int
) -> None:
    model = load_model(name)
    plan = make_plan(model, pp=pp, num_virtual_stages=vpp)
    held = [rank_stages(model, plan, rank) for rank in range(pp)]
    order = [held[index % pp][index // pp] for index in range(pp * vpp)]
    assert [stage.num_layers for stage in order] == list(plan.stages)
    assert [stage.has_embedding for stage in order] == [i == 0 for i in range(pp * vpp)]
    assert [stage.has_head for stage in order] == [i == pp * vpp - 1 for i in range(pp * vpp)]


def test_a_pass_costs_its_layers_and_the_ends_of_the_model() -> None:
    model = load_model("gpt2")
    shape = BlockShape.of(make_job(model, 1), make_plan(model, tp=2), CORE)
    costs = CostModel(CLUSTER, CORE, 2)
    embedding, layer, head = (
        costs.block_cost(shape, each) for each in ("embedding", "layer", "head")
    )
    inside = Stage((BlockRun("layer", 5),), has_embedding=False, has_head=False)
    both_ends = Stage((BlockRun("layer", 5),), has_embedding=True, has_head=True)
    whole = virtual_stage_cost(costs, shape, both_ends)
    assert whole.forward == layer.forward * 5 + embedding.forward + head.forward
    assert whole.backward == layer.backward * 5 + embedding.backward + head.backward
    inner = virtual_stage_cost(costs, shape, inside)
    assert inner.forward == layer.forward * 5


def test_recomputed_work_is_marked_as_such() -> None:
    model = load_model("gpt2")
    shape = BlockShape.of(make_job(model, 1), make_plan(model, recompute=Recompute.FULL), CORE)
    costs = CostModel(CLUSTER, CORE, 1)
    full = costs.block_cost(shape, "layer")
    none = costs.block_cost(replace(shape, recompute=Recompute.NONE), "layer")
    assert full.forward == none.forward
    assert full.backward.time_ps - none.backward.time_ps == full.forward.time_ps
    assert full.backward.category_ps(Category.RECOMPUTE) == full.forward.time_ps


@pytest.mark.parametrize("crosses_nodes", [False, True])
def test_scatter_gather_sends_a_part_and_gathers_it_inside_the_node(*, crosses_nodes: bool) -> None:
    model = load_model("gpt3-175b")
    job = make_job(model, 1)
    shape = BlockShape.of(job, make_plan(model, tp=8), OLD)
    whole_bytes = job.seq_len * model.hidden_size * 2
    whole_stack = OLD.model_copy(update={"scatter_gather_p2p": False})
    parts, whole = CostModel(CLUSTER, OLD, 64), CostModel(CLUSTER, whole_stack, 64)

    def expected(costs: CostModel, size_bytes: int, gather_ps: int) -> Message:
        cost = costs.message(size_bytes, crosses_nodes=crosses_nodes)
        return Message(cost.transfer.time_ps, cost.latency.time_ps + gather_ps)

    span = GroupSpan(8, 1, 8)
    gather = parts.collective(CollectiveOp.ALL_GATHER, whole_bytes, span, Axis.TP)
    message = message_between(parts, shape, whole_bytes, crosses_nodes=crosses_nodes)
    assert message == expected(parts, whole_bytes // 8, gather.time_ps)
    plain = replace(shape, stack=whole_stack)
    message = message_between(whole, plain, whole_bytes, crosses_nodes=crosses_nodes)
    assert message == expected(whole, whole_bytes, 0)
    # Sequence parallelism keeps activations split, so a part is all there is to send.
    split = replace(shape, sequence_parallel=True)
    message = message_between(parts, split, split.message_bytes, crosses_nodes=crosses_nodes)
    assert message == expected(parts, whole_bytes // 8, 0)


def test_messages_cross_nodes_exactly_where_stages_do() -> None:
    model = load_model("gpt2")
    plan = make_plan(model, tp=4, pp=4, num_virtual_stages=1)
    ranks = built_step(make_job(model, 8), plan).work.ranks
    costs = CostModel(CLUSTER, CORE, 16)
    shape = BlockShape.of(make_job(model, 8), plan, CORE)
    near, far = (
        message_between(costs, shape, shape.message_bytes, crosses_nodes=each)
        for each in (False, True)
    )
    assert near != far
    # Two stages of 4 ranks share a node: 0 1 | 2 3.
    forward = [rank.virtual_stages[0][Phase.FORWARD].message for rank in ranks]
    backward = [rank.virtual_stages[0][Phase.BACKWARD].message for rank in ranks]
    assert forward == [near, far, near, Message()]  # the last sends nothing on
    assert backward == [Message(), near, far, near]


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("stack", [CORE, OLD], ids=lambda stack: stack.name)
def test_overlap_moves_collectives_into_passes_and_changes_no_compute(
    stack: StackProfile, zero_stage: int
) -> None:
    model = load_model("gpt2-xl")
    plan = make_plan(model, pp=2, dp=8, zero_stage=zero_stage)
    work = built_step(make_job(model, 16), plan, stack=stack).work
    overlaps = stack.overlap_gradient_reduce
    assert overlaps == stack.overlap_parameter_gather
    for rank in work.ranks:
        forward, backward = rank.virtual_stages[0].values()
        assert bool(backward.reductions) == overlaps
        assert bool(forward.gathers) == (overlaps and zero_stage == 1)
        if forward.gathers:
            assert sum(each.compute_ps for each in forward.gathers) == forward.compute_ps
        if backward.reductions:
            assert sum(each.compute_ps for each in backward.reductions) == backward.compute_ps
        assert (rank.reduce_ps == 0) == overlaps
        assert (rank.gather_ps == 0) == (overlaps or zero_stage == 0)


def test_gathers_run_in_model_order_and_reductions_from_the_last_layers_on() -> None:
    model = load_model("gpt2-xl")
    plan = make_plan(model, pp=2, dp=8, zero_stage=1)
    job, costs = make_job(model, 16), CostModel(CLUSTER, CORE, 16)
    shape, wire = BlockShape.of(job, plan, CORE), WireBytes.of(CORE, Precision.BF16)
    virtual_stages = [rank.virtual_stages[0] for rank in build_step(job, plan, costs).work.ranks]
    replicas = Replication.of(1, Mesh(tp=1, dp=8, pp=2, node_size=8).span(Axis.DP))
    for pp_rank, virtual_stage in enumerate(virtual_stages):
        (stage,) = rank_stages(model, plan, pp_rank)
        parts = bucket_parts(shape, stage)
        # The first stage is cut, of the last one only the tied table is apart.
        assert (len(parts) > 10) if stage.has_embedding else (len(parts) == 2)
        passes = [virtual_stage_cost(costs, shape, part.stage) for part in parts]
        reduces, gathers = (
            [
                price(costs, bucket_exchanges(exchange, part, wire, replicas)).time_ps
                for part in parts
            ]
            for exchange in (gradient_reductions, parameter_gathers)
        )
        assert list(virtual_stage[Phase.FORWARD].gathers) == [
            PassSegment(each.forward.time_ps, time_ps)
            for each, time_ps in zip(passes, gathers, strict=True)
        ]
        assert list(virtual_stage[Phase.BACKWARD].reductions) == [
            PassSegment(each.backward.time_ps, time_ps)
            for each, time_ps in list(zip(passes, reduces, strict=True))[::-1]
        ]
    # The embedding is gathered first; the head's table is reduced first.
    gathers = virtual_stages[0][Phase.FORWARD].gathers
    assert gathers[0].collective_ps == max(each.collective_ps for each in gathers)
    table = price(
        costs, gradient_reductions(padded_vocab_size(model, 1, 128) * 1600, wire, replicas)
    )
    assert virtual_stages[1][Phase.BACKWARD].reductions[0].collective_ps == table.time_ps


def test_one_replica_has_no_collectives_of_its_own() -> None:
    model = load_model("gpt2")
    for stack in (CORE, OLD):
        work = built_step(make_job(model, 4), make_plan(model, pp=2), stack=stack).work
        for rank in work.ranks:
            assert (rank.reduce_ps, rank.gather_ps) == (0, 0)
            assert all(
                not passes.gathers and not passes.reductions
                for virtual_stage in rank.virtual_stages
                for passes in virtual_stage.values()
            )


def test_only_a_tied_table_on_two_ranks_is_reduced_between_them() -> None:
    tied = load_model("gpt2")
    untied = changed_model("gpt2", tied_embeddings=False)
    costs = CostModel(CLUSTER, CORE, 16)

    def shared_ps(model: ModelSpec, pp: int, dp: int) -> int:
        plan = make_plan(model, pp=pp, dp=dp)
        shape = BlockShape.of(make_job(model, dp), plan, CORE)
        mesh = Mesh(tp=1, dp=dp, pp=pp, node_size=8)
        wire = WireBytes.of(CORE, shape.precision)
        return price(costs, tied_embedding_sums(shape, wire, mesh, plan)).time_ps

    assert shared_ps(untied, 2, 2) == shared_ps(tied, 1, 2) == 0
    table_bytes = padded_vocab_size(tied, 1, 128) * 768 * 4
    for dp, span in ((2, GroupSpan(2, 1, 2)), (8, GroupSpan(2, 2, 1))):
        expected = costs.collective(CollectiveOp.ALL_REDUCE, table_bytes, span, Axis.PP)
        assert shared_ps(tied, 2, dp) == expected.time_ps


@pytest.mark.parametrize(
    ("pp", "dp", "shared"),
    [
        (2, 8, True),  # both over the network
        (2, 4, False),  # 8 ranks: replicas and stages inside one node use NVLink
        (8, 2, False),  # replicas are neighbours, the stages cross
    ],
)
def test_a_port_is_shared_where_messages_and_collectives_use_the_same_links(
    pp: int, dp: int, *, shared: bool
) -> None:
    model = load_model("gpt2")
    plan = make_plan(model, tp=2 if (pp, dp) == (2, 8) else 1, pp=pp, dp=dp)
    mesh = built_step(make_job(model, dp), plan).setting.mesh
    same = mesh.span(Axis.DP).crosses_nodes == mesh.crosses_nodes(0, pp - 1)
    work = built_step(make_job(model, dp), plan).work
    assert work.shared_port == same
    assert (mesh.span(Axis.DP).crosses_nodes and same) == shared
    assert not built_step(make_job(model, dp), plan, stack=OLD).work.shared_port


@pytest.mark.parametrize(("pp", "source"), [(2, Source.MEASURED), (8, Source.FITTED)])
def test_messages_rest_on_the_links_that_they_take(pp: int, source: Source) -> None:
    """Two stages of four ranks share a node, whose hops were measured; eight do not."""
    model = load_model("gpt2")
    plan = make_plan(model, tp=4, pp=pp)
    assert built_step(make_job(model, 8), plan).evidence.messages is source


def test_sharded_gradients_reduced_in_fp32_need_a_cast_copy_in_backward() -> None:
    """DeepSpeed's ZeRO-2 reduces GPT-2's 124,439,808 gradients as one bucket."""
    model, deepspeed = load_model("gpt2"), load_stack("deepspeed")
    plan = make_plan(model, dp=8, zero_stage=2)
    plain, cast = (
        built_step(make_job(model, 8), each, stack=deepspeed).memory[0].virtual_stages[0]
        for each in (plan, replace(plan, reduce_precision=Precision.FP32))
    )
    more = cast.backward_workspace_bytes - plain.backward_workspace_bytes
    assert more == 4 * 124_439_808
    assert cast.forward_workspace_bytes == plain.forward_workspace_bytes


def test_chunks_and_updates_report_what_the_engine_runs() -> None:
    model = load_model("gpt2")
    plan = make_plan(model, tp=2, pp=2, dp=2, num_virtual_stages=3, schedule="interleaved")
    built = built_step(make_job(model, 8), plan)
    for pp_rank, rank in enumerate(built.work.ranks):
        for virtual_stage, cost in zip(
            rank.virtual_stages, built.virtual_stage_costs[pp_rank], strict=True
        ):
            for phase, passes in virtual_stage.items():
                assert passes.compute_ps == cost[phase].time_ps
        assert rank.optimizer_ps == built.update_costs[pp_rank].time_ps
        update: PhaseCost = built.update_costs[pp_rank]
        assert update.category_ps(Category.OPTIMIZER) == update.time_ps
    assert built.work.overhead_per_million == 4_000
    assert built.work.num_microbatches == 4
    assert not built.work.blocking_messages
