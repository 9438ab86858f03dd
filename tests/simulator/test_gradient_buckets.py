"""Gradient buckets tensor by tensor, their times in a step, their formats and when they go out."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    MEBI,
    Attention,
    CollectiveOp,
    Precision,
    StackProfile,
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
from meshwright.simulator.account.traffic import Traffic, rank_traffic
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.engine import (
    SpanKind,
    StepWork,
    simulate_folded,
    simulate_unfolded,
    with_overhead,
)
from meshwright.simulator.layout import Stage, join_stages, rank_stages, whole_model
from meshwright.simulator.layout.mesh import Axis, Mesh
from meshwright.simulator.memory.rank import StateBytes
from meshwright.simulator.model import BlockRun
from meshwright.simulator.model.parameters import local_shape, padded_vocab_size, parameter_tensors
from meshwright.simulator.replication.buckets import (
    bucket_parts,
    gradient_buckets,
)
from meshwright.simulator.replication.data_parallel import stage_parameters, sum_parameters
from meshwright.simulator.replication.parts import GradientBucket, StagePart
from meshwright.simulator.schedules import Phase
from meshwright.simulator.step.build import build_step

RELAXED = settings(deadline=None, max_examples=80)
CLUSTER = load_cluster("dgx-a100")
DDP, CORE, TITAN = (load_stack(name) for name in ("ddp", "megatron-core", "torchtitan@0.2"))
FIXED = CORE.model_copy(update={"gradient_bucket_parameters_per_replica": 0})
IN_EACH_STAGE = FIXED.model_copy(update={"buckets_first_stage_only": False})
GPT2, LLAMA = load_model("gpt2"), load_model("llama2-7b")
WHOLE = Stage((BlockRun("layer", 12),), has_embedding=True, has_head=True)
FP32, BF16, FP16 = Precision.FP32, Precision.BF16, Precision.FP16
ONCE_A_STEP = 1


def shape_of(
    stack: StackProfile = DDP, model: ModelSpec = GPT2, *, tp: int = 1, batch: int = 1
) -> BlockShape:
    job = TrainingJob(model=model, global_batch_size=batch, seq_len=model.seq_len)
    return BlockShape.of(job, ResolvedPlan(tp=tp, stages=(1,)), stack)


def test_the_buckets_of_gpt2_under_ddp() -> None:
    """Limits of 262,144 and 6,553,600 parameters: 1 and 25 MiB of fp32.

    Backward begins with the final norm (1,536) and the last layer's second MLP matrix (2,359,296),
    the first bucket: under autocast a weight's gradient is there before its bias's.  What the
    layer has left (4,728,576) and the matrix of the layer before it are 7,087,872, and so on.  The
    last bucket has what layer 0 has left, the positions (786,432) and the table of words
    (50,257 x 768).
    """
    buckets = gradient_buckets(shape_of(), WHOLE)
    assert buckets[0] == GradientBucket(1536 + 2_359_296, 12)
    assert buckets[1:-1] == tuple(GradientBucket(7_087_872, place) for place in range(11, 0, -1))
    assert buckets[-1] == GradientBucket(4_728_576 + 786_432 + 50_257 * 768, 0)


def test_the_parts_of_gpt2_under_megatron_core() -> None:
    """40 million parameters: six layers less most of one and the final norm, then six, then all."""
    parts = bucket_parts(shape_of(CORE), WHOLE)
    assert [part.stage for part in parts] == [
        Stage((), has_embedding=True, has_head=False),
        Stage((BlockRun("layer", 6),), has_embedding=False, has_head=False),
        Stage((BlockRun("layer", 6),), has_embedding=False, has_head=True),
    ]
    held = [part.buckets for part in parts]
    assert sum(map(sum, held)) == stage_parameters(shape_of(CORE), WHOLE)
    assert [len(each) for each in held] == [1, 1, 1]


def test_buckets_of_megatron_core_grow_with_the_replicas() -> None:
    """A million parameters a replica: from 41 on more than 40 million; 100 hold all but the table.

    Twelve layers have 85,054,464; the table brings the only bucket of 126 replicas to 124,475,904.
    """
    shape = shape_of(CORE)
    few, many, most = (gradient_buckets(shape, WHOLE, dp) for dp in (40, 100, 126))
    assert few == gradient_buckets(shape, WHOLE)
    assert [len(buckets) for buckets in (few, many, most)] == [3, 1, 1]
    assert gradient_buckets(shape, WHOLE, 60)[0].num_parameters >= 60 * 10**6
    assert gradient_buckets(shape_of(FIXED), WHOLE, 126) == few


def test_a_bucket_that_is_just_full_is_complete() -> None:
    """A layer of GPT-2 has 7,087,872 parameters."""
    stack = DDP.model_copy(
        update={"gradient_bucket_parameters": 7_087_872, "first_gradient_bucket_parameters": 0}
    )
    inner = Stage((BlockRun("layer", 3),), has_embedding=False, has_head=False)
    layers = tuple(GradientBucket(7_087_872, place) for place in (2, 1, 0))
    assert gradient_buckets(shape_of(stack), inner) == layers


@pytest.mark.parametrize("num_layers", [1, 12])
def test_megatron_core_cuts_its_first_stage_alone(num_layers: int) -> None:
    """A layer has 7,087,872 parameters; a tied table is apart where two stages hold it."""
    shape = shape_of(FIXED.model_copy(update={"gradient_bucket_parameters": 10**6}))
    inner = Stage((BlockRun("layer", num_layers),), has_embedding=False, has_head=False)
    assert gradient_buckets(shape, inner) == (GradientBucket(num_layers * 7_087_872, 0),)
    last = inner._replace(has_head=True)
    assert gradient_buckets(shape, last) == (
        GradientBucket(50_304 * 768, num_layers),
        GradientBucket(2 * 768 + num_layers * 7_087_872, 0),
    )
    assert len(gradient_buckets(shape, inner._replace(has_embedding=True))) > 2 * num_layers


class Placed(NamedTuple):
    """A tensor of a stage and the place of its block among the stage's blocks."""

    size: int
    place: int


# Of a layer, as Megatron-Core's modules hold them (tests_outside/test_megatron_buckets.py).
HELD = ("attention_output", "attention_norm", "qkv", "mlp_norm", "mlp_in", "mlp_out")


def tensors_in_model_order(shape: BlockShape, stage: Stage) -> list[Placed]:
    """Return every tensor of a stage, as its modules hold them."""
    model, tp = shape.model, shape.tp
    padded = padded_vocab_size(model, tp, shape.stack.vocabulary_multiple)
    known = parameter_tensors(model, vocab_size=padded)
    layer = [each for each in known if each.block == "layer"]
    layer.sort(key=lambda each: HELD.index(each.name.partition(".")[0]))
    tensors = [*layer, *(each for each in known if each.block != "layer")]
    blocks = ["embedding"] * stage.has_embedding + ["layer"] * stage.num_layers
    blocks += ["head"] * stage.has_head
    placed = [
        Placed(prod(local_shape(model, tensor, tp=tp)), place)
        for place, block in enumerate(blocks)
        for tensor in tensors
        if tensor.block == block
    ]
    if stage.has_head and not stage.has_embedding and model.tied_embeddings:
        copy = prod(local_shape(model, known[0], tp=tp))
        placed.append(Placed(copy, len(blocks) - 1))
    return placed


def brute_force(
    tensors: list[Placed], first: int | None, limit: int, shared: Placed | None
) -> list[Placed]:
    """Return size and completing block of each bucket, by filling bucket after bucket.

    A table that two stages hold, *shared*, is a bucket by itself.
    """
    left = tensors[:]
    buckets: list[Placed] = []
    while left:
        wanted = first if first is not None and not buckets else limit
        bucket = [left.pop()]
        while left and not any(each is shared for each in (bucket[-1], left[-1])):
            if sum(each.size for each in bucket) >= wanted:
                break
            bucket.append(left.pop())
        buckets.append(Placed(sum(each.size for each in bucket), bucket[-1].place))
    return buckets


@RELAXED
@given(
    # A tied table, one that is as large as other weights (both are 3,072 x 768), and an untied one.
    model=st.sampled_from([GPT2, GPT2.model_copy(update={"vocab_size": 3072}), LLAMA]),
    tp=st.sampled_from([1, 2, 4]),
    num_layers=st.integers(0, 16),
    ends=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    limits=st.tuples(st.none() | st.integers(1, 10**7), st.integers(1, 10**9)),
    shards=st.booleans(),
)
def test_buckets_are_those_of_a_brute_force(
    model: ModelSpec,
    tp: int,
    num_layers: int,
    ends: tuple[bool, bool],
    limits: tuple[int | None, int],
    *,
    shards: bool,
) -> None:
    first, limit = limits
    num_layers = max(num_layers, not any(ends))
    stage = Stage((BlockRun("layer", num_layers),) if num_layers else (), *ends)
    changes = {"gradient_bucket_parameters": limit, "first_gradient_bucket_parameters": first}
    shape = shape_of(IN_EACH_STAGE.model_copy(update=changes), model, tp=tp)
    is_shared = shards and model.tied_embeddings and ends[0] != ends[1]
    tensors = tensors_in_model_order(shape, stage)
    table = tensors[0 if stage.has_embedding else -1] if is_shared else None
    expected = brute_force(tensors, first, limit, table)
    buckets = gradient_buckets(shape, stage, shards=shards)
    assert [*map(tuple, buckets)] == expected
    assert sum(each.num_parameters for each in buckets) == stage_parameters(shape, stage)
    parts = bucket_parts(shape, stage, shards=shards)
    # Parts are the stage, in order, and each starts with the block that completes its buckets.
    assert join_stages([part.stage for part in parts]) == stage
    starts, start = Counter[int](), 0
    for part in parts:
        starts[start] += len(part.buckets)
        start += part.stage.num_blocks
    assert starts == Counter(place for _, place in expected)


def arriving_in_gpt2(*, autocast: bool) -> list[int]:
    """Return GPT-2's tensors as their gradients arrive, queries, keys and values as one product.

    Of a norm the weight comes first; of a product the bias, which is added after it, but not
    under autocast, where both are casts.
    """
    h = 768

    def linear(width: int) -> list[int]:
        weight, bias = h * width, h if width == 4 * h else width
        return [weight, bias] if autocast else [bias, weight]

    norm = [h, h]
    mlp_in, qkv = (
        [width * h, width] if autocast else [width, width * h] for width in (4 * h, 3 * h)
    )
    layer = [*linear(4 * h), *mlp_in, *norm, *linear(h), *qkv, *norm]
    return [*norm, *layer * 12, 1024 * h, 50_257 * h]


def arriving_in_llama2_7b() -> list[int]:
    """Return Llama 2 7B's tensors as their gradients arrive: all weights, heads of equal number."""
    h, f = 4096, 11_008
    layer = [f * h, f * h, f * h, h, h * h, h * h, h * h, h * h, h]
    return [32_000 * h, h, *layer * 32, 32_000 * h]


@pytest.mark.parametrize(
    ("model", "precision", "sizes"),
    [
        ("gpt2", BF16, arriving_in_gpt2(autocast=True)),
        ("gpt2", FP32, arriving_in_gpt2(autocast=False)),
        ("llama2-7b", BF16, arriving_in_llama2_7b()),
    ],
    ids=["gpt2-bf16", "gpt2-fp32", "llama2-7b"],
)
@pytest.mark.parametrize("megabytes", [1, 25, 100])
def test_buckets_of_ddp_are_those_of_pytorch(
    model: str, precision: Precision, sizes: list[int], megabytes: int
) -> None:
    """The reducer's own function, given sizes alone, in the order in which gradients arrive."""
    torch = pytest.importorskip("torch")
    limit = megabytes * MEBI // 4
    stack = DDP.model_copy(update={"gradient_bucket_parameters": limit})
    shape = replace(shape_of(stack, load_model(model)), precision=precision)
    stage = whole_model(load_model(model))
    assert sum(sizes) == stage_parameters(shape, stage)
    tensors = [torch.empty(size, device="meta") for size in sizes]
    limits = [torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, 4 * limit]
    assigned, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits)
    expected = [sum(sizes[index] for index in indices) for indices in assigned]
    assert [each.num_parameters for each in gradient_buckets(shape, stage)] == expected


def test_a_stack_without_buckets_reduces_a_stage_in_one() -> None:
    old = load_stack("megatron-lm-2021")
    inner = Stage((BlockRun("layer", 5),), has_embedding=False, has_head=False)
    parts = bucket_parts(shape_of(old), inner)
    assert parts == (StagePart(inner, (stage_parameters(shape_of(old), inner),)),)


def ddp_plan(dp: int = 8, **fields: object) -> ResolvedPlan:
    settled = {"attention": Attention.FLASH, **fields}
    return replace(ResolvedPlan(dp=dp, stages=(12,)), **settled)  # type: ignore[arg-type]


def ddp_job(batch: int, precision: Precision = BF16) -> TrainingJob:
    return TrainingJob(model=GPT2, global_batch_size=batch, seq_len=1024, precision=precision)


class Passes(NamedTuple):
    """A microbatch of a DDP step by hand."""

    compute_ps: int
    reduced_ps: int


def one_microbatch(costs: CostModel, plan: ResolvedPlan, *, reduce_bytes: int = 4) -> Passes:
    """Return when a microbatch's passes end, and its reductions, block by block."""
    shape = BlockShape.of(ddp_job(plan.dp), plan, DDP)
    blocks = {name: costs.block_cost(shape, name) for name in ("embedding", "layer", "head")}
    order = ["head", *["layer"] * 12, "embedding"]
    now = sum(blocks[name].forward.time_ps for name in order)
    span = Mesh(tp=1, dp=plan.dp, pp=1, node_size=8).span(Axis.DP)
    waiting = list(gradient_buckets(shape, WHOLE))
    free = 0
    for index, name in enumerate(order):
        now += blocks[name].backward.time_ps
        while waiting and 13 - waiting[0].place == index:
            bucket = waiting.pop(0)
            size_bytes = reduce_bytes * bucket.num_parameters
            call = costs.collective(CollectiveOp.ALL_REDUCE, size_bytes, span, Axis.DP)
            casts = 2 * (4 + reduce_bytes) * bucket.num_parameters * (reduce_bytes != 4)
            free = max(free, now) + call.time_ps + costs.memory_traffic(casts).time_ps
    assert not waiting
    return Passes(now, max(now, free))


def step_of(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile = DDP) -> StepResult:
    return simulate(job, plan, CLUSTER, stack)


def work_of(result: StepResult) -> StepWork:
    assert result.work is not None
    return result.work


def after_passes_ps(result: StepResult, reduced_ps: int) -> int:
    """Return the step time if gradients are reduced at *reduced_ps*."""
    work = work_of(result)
    end_ps = reduced_ps + work.norm_ps + work.ranks[0].optimizer_ps
    return with_overhead(end_ps, work.overhead_per_million)


@pytest.mark.parametrize("dp", [8, 64])
@pytest.mark.parametrize("reduced", [None, BF16, FP16])
def test_a_ddp_step_exposes_the_last_bucket_and_what_queues_before_it(
    dp: int, reduced: Precision | None
) -> None:
    plan = ddp_plan(dp, reduce_precision=reduced)
    result = step_of(ddp_job(dp), plan)
    costs = CostModel(CLUSTER, DDP, dp)
    passes = one_microbatch(costs, plan, reduce_bytes=4 if reduced is None else 2)
    assert result.times is not None
    rank = result.times.ranks[0]
    assert rank.passes_end_ps == passes.compute_ps
    assert rank.reduce_wait_ps == passes.reduced_ps - passes.compute_ps > 0
    assert result.step_ps == after_passes_ps(result, passes.reduced_ps)


@pytest.mark.parametrize("dp", [8, 64])
def test_without_no_sync_each_microbatch_waits_for_its_reductions(dp: int) -> None:
    plan = ddp_plan(dp, sync_each_microbatch=True)
    result = step_of(ddp_job(4 * dp), plan)
    passes = one_microbatch(CostModel(CLUSTER, DDP, dp), plan)
    assert result.step_ps == after_passes_ps(result, 4 * passes.reduced_ps)
    assert result.times is not None
    streams = result.times.ranks[0].streams()
    reductions = [s for s in streams.data_parallel if s.kind is SpanKind.GRADIENT_REDUCTION]
    assert len(reductions) == 4 * 13
    assert reductions[-1].end_ps == 4 * passes.reduced_ps
    assert sum(span.end_ps - span.start_ps for span in streams.compute[:8]) == (
        3 * passes.reduced_ps + passes.compute_ps
    )


def reductions_of(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> list[Traffic]:
    ops = (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER)
    traffic = rank_traffic(job, plan, stack, 0)
    return [each for each in traffic if each.op in ops and each.axis is Axis.DP]


@pytest.mark.parametrize("microbatches", [2, 5])
@pytest.mark.parametrize(("stack", "zero_stage"), [(DDP, 0), (TITAN, 3)])
def test_no_sync_leaves_one_reduction_of_m(
    stack: StackProfile, zero_stage: int, microbatches: int
) -> None:
    job = ddp_job(8 * microbatches)
    each, once = (
        reductions_of(job, ddp_plan(sync_each_microbatch=syncs, zero_stage=zero_stage), stack)
        for syncs in (True, False)
    )
    assert [item._replace(num_calls=item.num_calls * microbatches) for item in once] == each
    calls = [sum(item.num_calls for item in items) for items in (each, once)]
    assert calls[0] - calls[1] == calls[0] * (microbatches - 1) // microbatches
    usual = reductions_of(job, ddp_plan(zero_stage=zero_stage), stack)
    assert usual == (once if zero_stage == 0 else each)


def test_traffic_lists_every_bucket_with_its_size() -> None:
    """Megatron-Core, two virtual stages: each bucket is scattered in fp32 and gathered in bf16."""
    plan = ResolvedPlan(
        tp=2,
        pp=2,
        dp=4,
        num_virtual_stages=2,
        schedule="interleaved",
        zero_stage=1,
        stages=(3,) * 4,
    )
    job = ddp_job(16)
    shape = BlockShape.of(job, plan, CORE)
    for pp_rank in range(2):
        buckets = Counter(
            bucket.num_parameters
            for stage in rank_stages(job.model, plan, pp_rank)
            for bucket in gradient_buckets(shape, stage)
        )
        traffic = [t for t in rank_traffic(job, plan, CORE, pp_rank) if t.axis is Axis.DP]
        scatter, gather = CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_GATHER
        assert {(t.op, t.size_bytes): t.num_calls for t in traffic} == {
            (op, width * size): count
            for op, width in ((scatter, 4), (gather, 2))
            for size, count in buckets.items()
        }
        assert {t.num_ranks for t in traffic} == {4}


def test_a_stack_that_hides_nothing_reduces_a_rank_at_once() -> None:
    stack = load_stack("megatron-lm-2022")
    plan = ResolvedPlan(pp=2, dp=4, stages=(6, 6))
    job = ddp_job(16)
    whole = sum_parameters(BlockShape.of(job, plan, stack), rank_stages(job.model, plan, 0))
    assert reductions_of(job, plan, stack) == [
        Traffic(Axis.DP, CollectiveOp.ALL_REDUCE, 4 * whole, 4, ONCE_A_STEP)
    ]
    may = stack.model_copy(update={"optional_microbatch_sync": True})
    plan = replace(plan, pp=1, stages=(12,), sync_each_microbatch=True)
    (each,) = reductions_of(job, plan, may)
    assert (each.num_calls, each.size_bytes) == (4, 4 * stage_parameters(shape_of(may), WHOLE))
    once, every = (
        build_step(job, replace(plan, sync_each_microbatch=syncs), CostModel(CLUSTER, may, 4)).work
        for syncs in (False, True)
    )
    assert simulate_folded(once).step_ps < simulate_folded(every).step_ps
    reduce_ps = once.ranks[0].reduce_ps
    (segment,) = every.ranks[0].virtual_stages[0][Phase.BACKWARD].reductions
    assert (segment.compute_ps, segment.collective_ps, every.ranks[0].reduce_ps) == (
        once.ranks[0].virtual_stages[0][Phase.BACKWARD].compute_ps,
        reduce_ps,
        0,
    )


@pytest.mark.parametrize("syncs", [True, False])
def test_folded_equals_unfolded_with_and_without_no_sync(*, syncs: bool) -> None:
    work = work_of(step_of(ddp_job(12), ddp_plan(4, sync_each_microbatch=syncs)))
    unfolded = simulate_unfolded(work, Mesh(tp=1, dp=4, pp=1, node_size=8))
    assert unfolded.step_ps == simulate_folded(work).step_ps


def test_a_16_bit_wire_halves_the_bytes_and_not_the_gradients() -> None:
    job = ddp_job(8)
    plain, cast = ddp_plan(), ddp_plan(reduce_precision=BF16)
    pairs = zip(reductions_of(job, plain, DDP), reductions_of(job, cast, DDP), strict=True)
    for before, after in pairs:
        assert after == before._replace(size_bytes=before.size_bytes // 2)
    costs = CostModel(CLUSTER, DDP, 8)
    before, after = (build_step(job, plan, costs).memory[0] for plan in (plain, cast))
    assert before.gradients_bytes == after.gradients_bytes


def test_without_overlap_the_cast_holds_all_gradients_at_once() -> None:
    stack = DDP.model_copy(update={"overlap_gradient_reduce": False})
    costs = CostModel(CLUSTER, stack, 8)
    built = build_step(ddp_job(8), ddp_plan(reduce_precision=FP16), costs)
    parameters = stage_parameters(shape_of(), WHOLE)
    assert built.memory[0].update_temporary_bytes == 2 * parameters
    fp32 = build_step(ddp_job(8), ddp_plan(), costs)
    traffic_ps = costs.memory_traffic(2 * (4 + 2) * parameters).time_ps
    span = Mesh(tp=1, dp=8, pp=1, node_size=8).span(Axis.DP)
    call = costs.collective(CollectiveOp.ALL_REDUCE, 2 * parameters, span, Axis.DP)
    assert built.work.ranks[0].reduce_ps == call.time_ps + traffic_ps
    assert fp32.memory[0].update_temporary_bytes == 0


def test_bf16_gradients_of_megatron_core_save_two_bytes_a_parameter() -> None:
    """As NeMo with grad_reduce_in_fp32 off: 16 bytes a parameter for 18, and half on the wire."""
    plan = ddp_plan(zero_stage=1)
    in_bf16 = replace(plan, gradient_precision=BF16)
    job = ddp_job(8)
    before, after = (step_of(job, each, CORE).memory for each in (plan, in_bf16))
    parameters = stage_parameters(shape_of(CORE), WHOLE)
    assert before.peak_bytes - after.peak_bytes == 2 * parameters
    sizes = [[t.size_bytes for t in reductions_of(job, p, CORE)] for p in (plan, in_bf16)]
    assert sizes[0] == [2 * size for size in sizes[1]]
    assert StateBytes.of(CORE, BF16).gradient == 4


def test_fsdp_without_sync_keeps_whole_gradients() -> None:
    job = ddp_job(32)
    plan = ddp_plan(zero_stage=3)
    on, off = (
        step_of(job, replace(plan, sync_each_microbatch=syncs), TITAN) for syncs in (True, False)
    )
    parameters = stage_parameters(shape_of(TITAN), WHOLE)
    assert off.memory.worst_stage.gradients_bytes == 4 * parameters
    assert on.memory.worst_stage.gradients_bytes == 4 * -(-parameters // 8)
    assert on.step_ps == step_of(job, plan, TITAN).step_ps


def test_a_sharded_gradient_is_cast_as_backward_makes_it() -> None:
    """FSDP2 in bf16: gradients are bf16 already, so that only the shard is cast."""
    costs = CostModel(CLUSTER, TITAN, 8)
    job = ddp_job(8)
    (plain, half) = (
        build_step(job, ddp_plan(zero_stage=3, reduce_precision=wire), costs)
        for wire in (FP32, BF16)
    )
    assert plain.memory == half.memory
    span = Mesh(tp=1, dp=8, pp=1, node_size=8).span(Axis.DP)
    layer = shape_of(TITAN).parameters["layer"]
    scatter = costs.collective(CollectiveOp.REDUCE_SCATTER, 2 * layer, span, Axis.DP)
    cast = costs.memory_traffic((2 + 4) * -(-layer // 8))
    unit = half.work.ranks[0].virtual_stages[0][Phase.BACKWARD].units[1]
    assert unit.reduce_ps == scatter.time_ps + cast.time_ps
    # fp32 on the wire is what the stack does: its constants were fitted with that cast.
    default = build_step(job, ddp_plan(zero_stage=3), costs)
    assert plain.work == default.work


@pytest.mark.parametrize(
    ("stack", "fields", "says"),
    [
        (
            "ddp",
            {"gradient_precision": BF16},
            "gradient_precision=bf16 is not offered by stack ddp",
        ),
        (
            "megatron-core",
            {"reduce_precision": BF16},
            "is not offered by stack megatron-core@0.18 with gradients kept in fp32; allowed: fp32",
        ),
        (
            "megatron-core",
            {"gradient_precision": FP16},
            "in bf16 training; allowed: fp32, bf16",
        ),
        (
            "megatron-lm-2022",
            {"gradient_precision": BF16, "attention": Attention.UNFUSED},
            "in bf16 training; allowed: fp32",
        ),
        (
            "megatron-deepspeed-2022-bf16",
            {"gradient_precision": BF16, "attention": Attention.UNFUSED},
            "allowed: none beside its own",
        ),
        (
            "megatron-core",
            {"sync_each_microbatch": True},
            "allowed: False (at zero_stage=0 it reduces",
        ),
        (
            "deepspeed",
            {"sync_each_microbatch": False, "zero_stage": 2, "attention": Attention.UNFUSED},
            "allowed: True (at zero_stage=2 it keeps",
        ),
        (
            "torchtitan@0.2",
            {"sync_each_microbatch": True, "zero_stage": 3, "pp": 2, "stages": (6, 6)},
            "sync_each_microbatch=True does not go with pp=2; allowed: False",
        ),
        (
            "parameter-server",
            {"sync_each_microbatch": False, "attention": Attention.UNFUSED},
            "not offered by stack parameter-server@2014; allowed: with a stack of strategy mesh",
        ),
    ],
)
def test_what_a_stack_cannot_do_with_gradients_is_refused(
    stack: str, fields: dict[str, object], says: str
) -> None:
    job = ddp_job(16, FP16 if stack == "parameter-server" else BF16)
    with pytest.raises(PlanError) as caught:
        step_of(job, ddp_plan(4, **fields), load_stack(stack))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_wire_of_deepspeed_may_be_wider_than_its_buffer() -> None:
    plan = ddp_plan(4, zero_stage=1, attention=Attention.UNFUSED)
    stack = load_stack("deepspeed")
    wide = replace(plan, reduce_precision=FP32)
    job = ddp_job(4, FP16)
    before, after = (step_of(job, each, stack) for each in (plan, wide))
    assert before.step_ps < after.step_ps
    sizes = [sum(t.size_bytes for t in reductions_of(job, each, stack)) for each in (plan, wide)]
    assert sizes[1] == 2 * sizes[0]
    stages = [result.memory.worst_stage for result in (before, after)]
    assert stages[0].gradients_bytes == stages[1].gradients_bytes
