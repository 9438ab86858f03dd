"""Activations that wait on the host from forward to backward."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from meshwright.hwprofiles import (
    Attention,
    OffloadModule,
    Precision,
    Recompute,
    RecomputeModule,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    CostModel,
    ModelSpec,
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.account import critical_path
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.engine import (
    CopyPoint,
    PassWork,
    RankWork,
    StepWork,
    simulate_folded,
)
from meshwright.simulator.model import EMBEDDING, HEAD, TRANSFORMER_LAYER, OffloadedLayer
from meshwright.simulator.schedules import Phase, get_schedule
from meshwright.simulator.step import build_step
from meshwright.simulator.step.offload import copy_cost

STACK, CLUSTER = load_stack("megatron-core-2026"), load_cluster("dgx-h100")
LLAMA = load_model("llama3-8b")
MIXTRAL = load_model("mixtral-8x7b")
assert isinstance(LLAMA, ModelSpec)
assert isinstance(MIXTRAL, ModelSpec)
PLAN = ResolvedPlan(dp=8, attention=Attention.FLASH, zero_stage=1, stages=(32,))
TOKENS, WIDTH, LAYERS = LLAMA.seq_len, LLAMA.hidden_size, LLAMA.num_layers
KEYS = LLAMA.num_kv_heads * LLAMA.head_dim
CORE, PROJECTION = OffloadModule.CORE_ATTN, OffloadModule.ATTN_PROJ


def job_of(model: ModelSpec = LLAMA, batch: int = 8, **facts: object) -> TrainingJob:
    words = {"global_batch_size": batch, "seq_len": model.seq_len, **facts}
    return TrainingJob(model=model, **words)  # type: ignore[arg-type]


def ran(plan: ResolvedPlan, **facts: object) -> StepResult:
    return simulate(job_of(**facts), plan, CLUSTER, STACK)  # type: ignore[arg-type]


def layer_bytes(plan: ResolvedPlan, job: TrainingJob | None = None) -> tuple[int, int]:
    """Return what a layer keeps on the host, and what it copies there."""
    shape = BlockShape.of(job or job_of(), plan, STACK)
    memory = BlockTable().memory(shape, OffloadedLayer(TRANSFORMER_LAYER))
    return memory.moved, memory.copied


def test_a_layer_leaves_each_of_its_tensors_once_but_for_small_ones() -> None:
    # In 16 bits: its input and that of its MLP, both normalised, too; what makes queries, keys and
    # values, into which the values look, and the others as they are turned; attention; gate, up
    # and what the last product reads. In fp32: a number for each head and token. Deviations of
    # norms, one for each token, are fewer than 256 Ki elements.
    attention = 2 * TOKENS * WIDTH
    numbers = 4 * TOKENS * LLAMA.num_heads
    moved = 2 * TOKENS * (4 * WIDTH + 2 * WIDTH + 3 * KEYS + 3 * LLAMA.ffn_hidden_size)
    moved += attention + numbers
    assert layer_bytes(replace(PLAN, offload_layers=1)) == (moved, moved)


def test_what_attention_and_its_projection_leave_is_theirs_alone() -> None:
    # Values look into the product of queries, keys and values, which goes with them; of it they
    # alone are copied. Of 32 heads and 8,192 tokens softmax has fewer numbers than 1 Mi.
    # Attention saves what it gives out, and the projection the same as what it reads.
    attention, given = 2 * TOKENS * WIDTH, 2 * TOKENS * (WIDTH + 2 * KEYS)
    product = 2 * TOKENS * (WIDTH + KEYS)
    assert layer_bytes(replace(PLAN, offload_modules=(CORE, PROJECTION))) == (
        given + product + attention,
        given + 2 * attention,
    )
    # The projection still reads what attention gives out: a copy on the host frees nothing.
    alone = layer_bytes(replace(PLAN, offload_modules=(CORE,)))
    assert alone == (given + product, given + attention)


def test_a_norm_in_a_product_leaves_with_it() -> None:
    moved, copied = layer_bytes(replace(PLAN, offload_modules=(OffloadModule.QKV_LINEAR,)))
    assert moved == copied == 2 * 2 * TOKENS * WIDTH  # what it reads and what it gives out


def test_scales_and_copies_in_eight_bits_leave_by_their_own_sizes() -> None:
    plan = replace(PLAN, offload_layers=1)
    bf16, fp8 = (
        layer_bytes(plan, job_of(precision=each))[0] for each in (Precision.BF16, Precision.FP8)
    )
    # Inputs of the four products of a layer are kept in 8 bits, but for what attention gave out,
    # which it keeps in 16 itself: its copy in 8 bits comes beside that.
    narrowed = TOKENS * (2 * WIDTH + LLAMA.ffn_hidden_size)
    assert bf16 - fp8 == narrowed - TOKENS * WIDTH


def test_parts_of_experts_leave_rows_before_and_behind_their_first_product() -> None:
    parts = (OffloadModule.EXPERT_FC1, OffloadModule.MOE_ACT)
    plan = replace(PLAN, offload_modules=parts)
    shape = BlockShape.of(job_of(MIXTRAL), plan, STACK)
    memory = BlockTable().memory(shape, OffloadedLayer("expert layer"))
    experts = MIXTRAL.experts
    assert experts is not None
    rows = MIXTRAL.seq_len * experts.experts_per_token
    assert memory.moved == 2 * rows * (MIXTRAL.hidden_size + 2 * experts.hidden_size)


def test_queries_that_are_made_again_are_copied_all_the_same() -> None:
    model = load_model("deepseek-v3")
    assert isinstance(model, ModelSpec)
    plan = ResolvedPlan(
        dp=8,
        stages=(model.num_layers,),
        attention=Attention.FLASH,
        recompute=Recompute.SELECTIVE,
        recompute_modules=(RecomputeModule.MLA_UP_PROJ,),
    )
    again = replace(plan, offload_modules=(CORE, PROJECTION))
    kept, gone = (
        BlockTable().memory(BlockShape.of(job_of(model), each, STACK), OffloadedLayer("layer"))
        for each in (replace(again, recompute=Recompute.NONE, recompute_modules=()), again)
    )
    assert gone.copied == kept.copied
    assert gone.moved < kept.moved


def test_of_layers_that_leave_as_much_less_lives_when_backward_begins() -> None:
    whole, some = ran(PLAN), ran(replace(PLAN, offload_layers=20))
    moved, copied = layer_bytes(replace(PLAN, offload_layers=20))
    assert whole.memory.worst_stage.peak_moment == some.memory.worst_stage.peak_moment == "B0.0"
    assert whole.memory.peak_bytes - some.memory.peak_bytes == 20 * moved
    assert some.memory.host_bytes == 8 * 20 * copied  # eight devices of a node


def test_with_all_but_one_layer_away_backward_holds_one_as_it_came_back() -> None:
    """Nothing of a layer that came back goes before the next one's backward begins."""
    one = ran(replace(PLAN, offload_layers=LAYERS - 1)).memory.worst_stage
    _, copied = layer_bytes(replace(PLAN, offload_layers=LAYERS - 1))
    assert one.activations_bytes + one.buffers_bytes > copied


def test_copies_stall_a_pass_where_the_link_is_slower_than_its_layers() -> None:
    """Four layers of 10 and 20 ps, the first two of which take 15 ps to copy.

    Forward: copies run from 10 to 25 and from 25 to 40 ps, for which the third layer, at 20, and
    the fourth, at 35, wait.  Backward begins at 50: the second layer's copy runs from 70 to 85 ps
    and the first one's from 90 on, when the second layer's backward begins.
    """
    forward = (
        CopyPoint(10, 0, 15),
        CopyPoint(20, 1, 15),
        CopyPoint(20, 0),
        CopyPoint(30, 1),
    )
    backward = (CopyPoint(20, 1, 15), CopyPoint(40, 0, 15), CopyPoint(40, 1), CopyPoint(60, 0))
    stage = {
        Phase.FORWARD: PassWork(40, copies=forward),
        Phase.BACKWARD: PassWork(80, copies=backward),
    }
    work = StepWork(
        ranks=(RankWork(virtual_stages=(stage,)),),
        actions=get_schedule("1f1b").actions(1, 1, 1),
        num_microbatches=1,
    )
    times = simulate_folded(work)
    assert times.ranks[0].copy_waits_ps == [10, 0]
    assert times.step_ps == 40 + 10 + 80
    slow = [each._replace(copy_ps=4 * each.copy_ps) for each in backward]
    stalled = stage | {Phase.BACKWARD: PassWork(80, copies=tuple(slow))}
    times = simulate_folded(work._replace(ranks=(RankWork(virtual_stages=(stalled,)),)))
    # Layer 1 waits from 90 to 130, and layer 0, whose copy runs from 130 to 190, from 150 on.
    assert times.ranks[0].copy_waits_ps == [10, 80]


def by_layers(
    layers: Sequence[tuple[int, int]], ends: tuple[int, int], copy_ps: int, away: tuple[int, int]
) -> int:
    """Return the time of two microbatches, layer by layer on three clocks.

    Args:
        layers: Forward and backward of each.
        ends: Time ahead of the first forward and behind the first layer's backward, with that of
            head and loss, forward and backward, in both.
        copy_ps: Of each layer whose tensors leave.
        away: How many do, and so many that are there at a time.
    """
    now = out_ps = back_ps = 0
    (number, depth), left, there = away, {}, {}  # type: ignore[var-annotated]
    for _ in range(2):
        now += ends[0]
        for place, (forward_ps, _) in enumerate(layers):
            if 0 <= place - depth < number:
                now = max(now, left[place - depth])
            now += forward_ps
            if place < number:
                left[place] = out_ps = max(now, out_ps) + copy_ps
        now += ends[1]
        for place, (_, backward_ps) in reversed([*enumerate(layers)]):
            back = place - depth + 1
            if 0 <= back < number:
                there[back] = back_ps = max(now, back_ps, left[back]) + copy_ps
            now = max(now, there.get(place, 0)) if place < number else now
            now += backward_ps
    return now


@pytest.mark.parametrize("number", [1, 12, 20, 31])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_step_takes_as_long_as_layers_and_copies_one_by_one(number: int, zero_stage: int) -> None:
    plan = ResolvedPlan(
        tp=8, attention=Attention.FLASH, stages=(32,), offload_layers=number, zero_stage=zero_stage
    )
    job, costs = job_of(batch=2), CostModel(CLUSTER, STACK, 8)
    result = simulate(job, plan, CLUSTER, STACK)
    shape = BlockShape.of(job, plan, STACK)
    cost = {each: costs.block_cost(shape, each) for each in (EMBEDDING, TRANSFORMER_LAYER, HEAD)}
    layer, first, last = (cost[each] for each in (TRANSFORMER_LAYER, EMBEDDING, HEAD))
    _, copied = layer_bytes(plan, job)
    expected = by_layers(
        [(layer.forward.time_ps, layer.backward.time_ps)] * LAYERS,
        (first.forward.time_ps, last.forward.time_ps + last.backward.time_ps),
        copy_cost(costs, copied).time_ps,
        (number, LAYERS - number),
    )
    # Backward of the embedding follows that of the first layer in each microbatch.
    waits = sum(result.times.ranks[0].copy_waits_ps)
    alone = simulate(job, replace(plan, offload_layers=None), CLUSTER, STACK)
    assert waits == expected - by_layers(
        [(layer.forward.time_ps, layer.backward.time_ps)] * LAYERS,
        (first.forward.time_ps, last.forward.time_ps + last.backward.time_ps),
        0,
        (0, LAYERS),
    )
    ends = result.times.ranks[0].passes_end_ps, alone.times.ranks[0].passes_end_ps
    assert ends[0] - ends[1] == waits


def test_buckets_and_shards_cut_passes_without_a_copy_more_or_less() -> None:
    """Parts of passes end where a layer does, so that copies start, and are awaited, alike."""
    for zero_stage in (1, 3):
        plan = replace(PLAN, zero_stage=zero_stage, offload_layers=20)
        job = job_of(batch=16)
        built = build_step(job, plan, CostModel(CLUSTER, STACK, 8))
        ((forward, backward),) = (stage.values() for stage in built.work.ranks[0].virtual_stages)
        assert [each.after_ps for each in forward.copies] == sorted(
            each.after_ps for each in forward.copies
        )
        assert backward.copies[-1].after_ps < backward.compute_ps
        units = forward.units or forward.gathers
        edges = {*accumulate((each.compute_ps for each in units), initial=0)}
        if zero_stage == 3:
            assert {each.after_ps for each in forward.copies} <= edges
        waits = simulate_folded(built.work).ranks[0].copy_waits_ps
        assert len(waits) == 4
        assert min(waits) > 0


def test_the_critical_path_and_the_breakdown_tell_stalls_alike() -> None:
    job, plan = job_of(batch=16), replace(PLAN, offload_layers=20)
    costs = CostModel(CLUSTER, STACK, 8)
    built = build_step(job, plan, costs)
    times = simulate_folded(built.work)
    result = simulate(job, plan, CLUSTER, STACK)
    path = critical_path(built, times).time_ps
    assert sum(path.values()) == result.step_ps
    (host,) = [each for each in path if each.name == "HOST_COPY"]
    assert path[host] == result.breakdown_ps[host] == sum(times.ranks[0].copy_waits_ps)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"offload_layers": 32}, "fewer than the layers"),
        ({"offload_layers": 0}, "must be >= 1"),
        ({"offload_layers": 2, "recompute": Recompute.FULL}, "recompute=none"),
        ({"offload_layers": 2, "pp": 2, "dp": 4, "stages": (16, 16)}, "pp=1"),
        ({"offload_layers": 2, "offload_modules": (CORE,)}, "allowed: one of them"),
        ({"offload_modules": (PROJECTION,)}, "core_attn,attn_proj"),
        ({"offload_modules": (CORE,), "recompute": Recompute.SELECTIVE}, "offloads nothing"),
        ({"offload_modules": (CORE,), "recompute": Recompute.FULL}, "recompute=selective"),
        ({"offload_modules": (CORE,), "pp": 2, "dp": 4, "stages": (16, 16)}, "pp=1"),
        ({"offload_modules": (OffloadModule.MOE_ACT,)}, "has no experts"),
        ({"offload_modules": (OffloadModule.ATTN_NORM,)}, "have that norm in qkv_linear"),
    ],
)
def test_megatron_cores_own_rules_refuse(fields: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ran(replace(PLAN, **fields))  # type: ignore[arg-type]


def test_other_stacks_and_clusters_without_hosts_have_none() -> None:
    plan = replace(PLAN, offload_layers=2)
    for stack in ("megatron-core@0.12", "fsdp"):
        with pytest.raises(PlanError, match="offload_layers=2 is not offered by stack"):
            simulate(job_of(), plan, CLUSTER, stack)
    silent = CLUSTER.model_copy(update={"host_link": None})
    with pytest.raises(PlanError, match="says nothing of its hosts"):
        simulate(job_of(), plan, silent, STACK)
