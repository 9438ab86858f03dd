"""What a rank computes and says in a step, against closed forms and walks over action lists."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    Attention,
    CollectiveOp,
    Precision,
    Recompute,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    SCHEDULES,
    CostModel,
    ModelSpec,
    Phase,
    ResolvedPlan,
    TrainingJob,
    load_model,
)
from meshwright.simulator.account.counts import (
    rank_flops,
)
from meshwright.simulator.account.traffic import (
    Traffic,
    closing_traffic,
    message_traffic,
    norm_ranks,
)
from meshwright.simulator.blocks import (
    BlockOperators,
    BlockShape,
    BlockTable,
    Collective,
    Operator,
    hardware_flops,
    model_flops,
)
from meshwright.simulator.layout.mesh import Axis, GroupSpan
from meshwright.simulator.model.parameters import padded_vocab_size
from meshwright.simulator.step.build import build_step

CORE, TITAN, FSDP = (load_stack(name) for name in ("megatron-core", "torchtitan@0.2", "fsdp"))
LM_2022 = load_stack("megatron-lm-2022")
RELAXED = settings(deadline=None, max_examples=30)
ALL_REDUCE, ALL_GATHER = CollectiveOp.ALL_REDUCE, CollectiveOp.ALL_GATHER


def plan_of(num_layers: int = 8, **fields: object) -> ResolvedPlan:
    """Return a plan with equal stages."""
    pp, vpp = (int(str(fields.get(name, 1))) for name in ("pp", "num_virtual_stages"))
    even = (num_layers // (pp * vpp),) * (pp * vpp)
    return replace(ResolvedPlan(stages=(num_layers,)), **{"stages": even, **fields})  # type: ignore[arg-type]


def job_of(name: str, batch: int, tp: int = 1) -> TrainingJob:
    """Return a job of eight layers whose vocabulary needs no padding on *tp* ranks."""
    model = load_model(name)
    changes = {"num_layers": 8, "vocab_size": padded_vocab_size(model, tp, 128)}
    return TrainingJob(
        model=model.model_copy(update=changes),
        global_batch_size=batch,
        seq_len=512,
        precision=Precision.BF16,
    )


@RELAXED
@given(
    name=st.sampled_from(["gpt2", "llama2-7b", "llama3-8b"]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.integers(1, 3),
    recompute=st.sampled_from(CORE.recompute_modes),
    sequence_parallel=st.booleans(),
    microbatches=st.integers(1, 4),
)
def test_flops_of_all_ranks_are_the_hardware_flops(
    name: str,
    tp: int,
    pp: int,
    dp: int,
    recompute: Recompute,
    *,
    sequence_parallel: bool,
    microbatches: int,
) -> None:
    job = job_of(name, dp * microbatches, tp)
    if job.model.num_heads % tp:
        return
    plan = plan_of(
        tp=tp, pp=pp, dp=dp, recompute=recompute, sequence_parallel=sequence_parallel and tp > 1
    )
    ranks = sum(
        rank_flops(job, plan, CORE, pp_rank, microbatches=microbatches) for pp_rank in range(pp)
    )
    assert ranks * tp * dp == hardware_flops(job, plan, CORE)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "bert-large"])
def test_flash_attention_counts_its_whole_square_and_the_scores_again(name: str) -> None:
    """Backward recomputes the scores, 2 s^2 h a sequence and layer, which the convention omits."""
    job = job_of(name, 3)
    plan = plan_of(attention=Attention.FLASH)
    scores = 3 * 8 * 2 * 512**2 * job.model.hidden_size
    assert rank_flops(job, plan, CORE, 0, microbatches=3) == model_flops(job) + scores


@pytest.mark.parametrize(("name", "skips"), [("llama2-7b", True), ("gpt2", False)])
def test_recomputation_that_stops_early_skips_the_last_product(name: str, *, skips: bool) -> None:
    """The mask of GPT-2's last dropout is kept, and made after that product."""
    job = job_of(name, 2)
    plan = plan_of(attention=Attention.FLASH, recompute=Recompute.FULL)
    stacks = FSDP, FSDP.model_copy(update={"recompute_stops_early": False})
    early, whole = (rank_flops(job, plan, stack, 0, microbatches=2) for stack in stacks)
    product = 2 * 512 * job.model.hidden_size * job.model.ffn_hidden_size
    assert whole - early == (2 * 8 * product if skips else 0)
    assert whole - early == hardware_flops(job, plan, stacks[1]) - hardware_flops(
        job, plan, stacks[0]
    )


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@given(pp=st.sampled_from([2, 4]), multiple=st.integers(1, 3))
def test_messages_are_those_of_the_action_lists(name: str, pp: int, multiple: int) -> None:
    schedule = SCHEDULES[name]
    vpp, microbatches = 2 if schedule.interleaves else 1, pp * multiple
    job = job_of("gpt2", microbatches)
    plan = plan_of(pp=pp, num_virtual_stages=vpp, schedule=name)
    size_bytes = 512 * 768 * 2
    total = [0, 0]
    for pp_rank, passes in enumerate(schedule.actions(pp, microbatches, vpp)):
        # The stage after the last one and the stage before the first one are not there.
        leaves = sum(
            0 <= virtual_stage * pp + pp_rank + (1 if phase is Phase.FORWARD else -1) < pp * vpp
            for phase, virtual_stage, _ in passes
        )
        sent, received = message_traffic(job, plan, CORE, pp_rank)
        assert sent == (Traffic(Axis.PP, CollectiveOp.P2P, size_bytes, 2, leaves),)
        total[0] += leaves
        total[1] += sum(each.num_calls for each in received)
    assert total == [2 * (pp * vpp - 1) * microbatches] * 2


def test_scatter_gather_sends_parts_and_receivers_gather_the_whole() -> None:
    job, plan = job_of("gpt2", 3), plan_of(pp=2, tp=2)
    whole = 512 * 768 * 2
    part = Traffic(Axis.PP, CollectiveOp.P2P, whole // 2, 2, 3)
    assert message_traffic(job, plan, LM_2022, 0) == (
        (part,),
        (part, Traffic(Axis.TP, ALL_GATHER, whole, 2, 3)),
    )
    # With sequence parallelism a rank has its part alone, and keeps it so.
    split = replace(plan, sequence_parallel=True)
    assert message_traffic(job, split, LM_2022, 0) == ((part,), (part,))
    plain = LM_2022.model_copy(update={"scatter_gather_p2p": False})
    message = part._replace(size_bytes=whole)
    assert message_traffic(job, plan, plain, 0) == ((message,), (message,))


def test_megatron_core_sends_whole_activations_unless_they_are_split() -> None:
    """What get_tensor_shapes of core 0.16 says: tokens x microbatch x hidden, no gather."""
    job, plan = job_of("gpt2", 3), plan_of(pp=2, tp=2)
    whole = Traffic(Axis.PP, CollectiveOp.P2P, 512 * 768 * 2, 2, 3)
    assert message_traffic(job, plan, CORE, 0) == ((whole,), (whole,))


def test_without_a_pipeline_there_are_no_messages() -> None:
    assert message_traffic(job_of("gpt2", 1), plan_of(), CORE, 0) == ((), ())


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_megatron_sums_what_saw_a_ranks_own_tokens_in_one_call(pp: int) -> None:
    """GPT-2: two norms (4 h) and two biases after sums (2 h) a layer; the final norm has 2 h."""
    job, plan = job_of("gpt2", 4, tp=2), plan_of(tp=2, pp=pp, sequence_parallel=True)
    for pp_rank in range(pp):
        is_last = pp_rank == pp - 1
        norms = 4 * 768 * (6 * 8 // pp + 2 * is_last)
        expected = [Traffic(Axis.TP, ALL_REDUCE, norms, 2, 1)]
        if pp > 1 and pp_rank in (0, pp - 1):
            table = 4 * 768 * job.model.vocab_size // 2
            expected.append(Traffic(Axis.PP, ALL_REDUCE, table, 2, 1))
        assert closing_traffic(job, plan, CORE, pp_rank) == tuple(expected)


def test_only_a_tied_table_in_a_pipeline_is_summed_between_its_ends() -> None:
    tied, untied = job_of("gpt2", 2), job_of("llama2-7b", 2)
    plan = plan_of(pp=2)
    assert closing_traffic(untied, plan, CORE, 0) == ()
    assert closing_traffic(tied, plan_of(), CORE, 0) == ()
    wide = closing_traffic(tied, plan, CORE, 1)
    assert wide == (Traffic(Axis.PP, ALL_REDUCE, 4 * 768 * 50_304, 2, 1),)


def collectives(operators: tuple[Operator, ...]) -> list[tuple[CollectiveOp, int]]:
    return [(op.op, op.size_bytes) for op in operators if isinstance(op, Collective)]


def block_of(shape: BlockShape, kind: str) -> BlockOperators:
    return BlockTable().operators(shape, kind)


def titan_shape(model: ModelSpec, *, pp: int = 1, sequence_parallel: bool = True) -> BlockShape:
    job = TrainingJob(model=model, global_batch_size=2, seq_len=512, precision=Precision.BF16)
    plan = plan_of(
        tp=2,
        pp=pp,
        dp=2,
        sequence_parallel=sequence_parallel,
        attention=Attention.FLASH,
        stages=(model.num_layers // pp,) * pp,
    )
    return BlockShape.of(job, plan, TITAN)


def test_dtensor_sums_norms_in_every_microbatch_but_at_the_end_of_a_pipeline() -> None:
    """Llama: two norms of h weights a layer and one in the head, 16-bit or at the end in fp32."""
    model = load_model("llama2-7b")
    norm = (ALL_REDUCE, 2 * 4096)
    shape = titan_shape(model)
    assert collectives(block_of(shape, "head").backward).count(norm) == 1
    assert norm not in collectives(block_of(titan_shape(model, pp=2), "head").backward)
    whole = titan_shape(model, sequence_parallel=False)
    assert norm not in collectives(block_of(whole, "head").backward)
    job = job_of("llama2-7b", 4)
    plan = plan_of(tp=2, dp=2, sequence_parallel=True, zero_stage=3, attention=Attention.FLASH)
    assert closing_traffic(job, plan, TITAN, 0) == ()
    for pp_rank in range(2):
        (sums,) = closing_traffic(job, replace(plan, pp=2, stages=(4, 4)), TITAN, pp_rank)
        assert sums == Traffic(Axis.TP, ALL_REDUCE, 4 * 4096, 2, 2 * 4 + pp_rank)


def test_norms_of_gradients_that_stay_whole_are_summed_in_the_last_microbatch() -> None:
    """As in a pipeline, in the format of the wire; a single microbatch sums them at once."""
    titan = plan_of(tp=2, dp=2, sequence_parallel=True, zero_stage=3, attention=Attention.FLASH)
    plan = replace(titan, sync_each_microbatch=False, reduce_precision=Precision.BF16)
    job = job_of("llama2-7b", 4)
    norm = (ALL_REDUCE, 2 * 4096)
    assert norm not in collectives(block_of(BlockShape.of(job, plan, TITAN), "head").backward)
    sums = Traffic(Axis.TP, ALL_REDUCE, 2 * 4096, 2, 2 * 8 + 1)
    assert closing_traffic(job, plan, TITAN, 0) == (sums,)
    one = job_of("llama2-7b", 2)
    assert norm in collectives(block_of(BlockShape.of(one, plan, TITAN), "head").backward)
    assert closing_traffic(one, plan, TITAN, 0) == ()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("stack", "zero_stage"), [(CORE, 1), (TITAN, 3)])
def test_what_is_summed_at_the_end_takes_the_time_of_its_calls(
    stack: StackProfile, zero_stage: int, *, sequence_parallel: bool
) -> None:
    cluster, job = load_cluster("dgx-a100"), job_of("llama2-7b", 4, tp=2)
    plan = plan_of(
        tp=2,
        pp=2,
        dp=2,
        sequence_parallel=sequence_parallel,
        zero_stage=zero_stage,
        attention=Attention.FLASH,
    )
    costs = CostModel(cluster, stack, plan.world_size)
    work = build_step(job, plan, costs).work
    for pp_rank, rank in enumerate(work.ranks):
        calls = closing_traffic(job, plan, stack, pp_rank)
        assert len(calls) == sequence_parallel
        assert rank.norm_all_reduce_ps == sum(
            each.num_calls
            * costs.collective(each.op, each.size_bytes, GroupSpan(2, 1, 2), Axis.TP).time_ps
            for each in calls
        )


@pytest.mark.parametrize("reduced", [None, Precision.BF16])
def test_units_sum_a_tied_table_as_they_keep_it(reduced: Precision | None) -> None:
    """Each rank has fp32 rows of it once it is reduced, in whatever format."""
    plan = plan_of(pp=2, dp=4, zero_stage=3, reduce_precision=reduced)
    (table,) = closing_traffic(job_of("gpt2", 4), plan, TITAN, 1)
    assert table == Traffic(Axis.PP, ALL_REDUCE, 4 * 768 * 50_304 // 4, 2, 1)


def test_learned_positions_are_scattered_and_their_gradient_summed() -> None:
    """Each rank adds positions to its own tokens, so that the table's gradient has two parts."""
    model = load_model("gpt2")
    tokens, table = 512 * 768 * 2, 1024 * 768 * 2
    embedding = block_of(titan_shape(model), "embedding")
    assert collectives(embedding.forward) == [(CollectiveOp.REDUCE_SCATTER, tokens)]
    assert collectives(embedding.backward) == [
        (ALL_GATHER, tokens),
        (ALL_REDUCE, table),
    ]
    rotary = block_of(titan_shape(load_model("llama2-7b")), "embedding")
    assert [op for op, _ in collectives(rotary.backward)] == [ALL_GATHER]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_fused_loss_gathers_three_numbers_a_token_from_every_rank(tp: int) -> None:
    """Maximum, target logit and sum in fp32: 12 bytes a token and rank."""
    job = TrainingJob(model=load_model("gpt3-175b"), global_batch_size=3, seq_len=512)
    shape = BlockShape.of(job, plan_of(tp=tp, microbatch_size=3), CORE)
    expected = [(ALL_GATHER, 12 * 3 * 512 * tp)] if tp > 1 else []
    assert collectives(block_of(shape, "head").forward) == expected


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({}, 2 * 4),  # every replica has all gradients
        ({"zero_stage": 1}, 2 * 4 * 6),
        ({"zero_stage": 3, "dp_shard": 3}, 2 * 4 * 3),
    ],
)
def test_a_gradient_norm_is_summed_over_one_set_of_shards(
    fields: dict[str, object], ranks: int
) -> None:
    assert norm_ranks(plan_of(tp=2, pp=4, dp=6, **fields)) == ranks
    assert norm_ranks(plan_of(dp=6)) == 1
