"""The units of sharded parameters: what they hold, and how often they are gathered in a step."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hwprofiles import Attention, CollectiveOp, Precision, load_cluster, load_stack
from meshwright.simulator import (
    SCHEDULES,
    Action,
    CostModel,
    ModelSpec,
    Phase,
    ResolvedPlan,
    TrainingJob,
    load_model,
)
from meshwright.simulator.account.traffic import rank_traffic
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.engine import SpanKind, simulate_folded
from meshwright.simulator.engine.work import num_gathers
from meshwright.simulator.layout import Stage, rank_stages
from meshwright.simulator.layout.mesh import Axis, GroupSpan
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.model import EXPERT_LAYER, BlockRun
from meshwright.simulator.replication.data_parallel import Replication
from meshwright.simulator.replication.parts import StagePart, part_gathers
from meshwright.simulator.replication.unit_parts import unit_parts
from meshwright.simulator.step.build import build_step
from meshwright.simulator.units.bytes import PassBytes, StageWeights, UnitBytes
from meshwright.simulator.units.memory import unit_rank_memory
from meshwright.simulator.units.passes import StagePass
from meshwright.simulator.units.sharding import ParameterBytes, Sharding
from meshwright.simulator.units.sums import SumBytes, _SummingPass

TITAN, DEEPSPEED = load_stack("torchtitan@0.2"), load_stack("deepspeed")
ROOT, ENDS = "torchtitan-2024-12", "torchtitan@0.2"
LLAMA = load_model("llama2-7b")
# Counted by hand: four h x h, three h x f and two norms a layer; table, output matrix, norm.
H, F, TABLE = 4096, 11_008, 32_000 * 4096
LAYER = 4 * H * H + 3 * H * F + 2 * H
ONE_LAYER = Stage((BlockRun("layer", 1),), has_embedding=False, has_head=False)
FIRST = Stage((), has_embedding=True, has_head=False)
LAST = Stage((), has_embedding=False, has_head=True)
NEITHER = Stage((), has_embedding=False, has_head=False)
WHOLE = Stage((BlockRun("layer", 3),), has_embedding=True, has_head=True)


def shape_of(model: ModelSpec = LLAMA, stack: str = ENDS) -> BlockShape:
    job = TrainingJob(model=model, global_batch_size=1, seq_len=model.seq_len)
    return BlockShape.of(job, ResolvedPlan(stages=(model.num_layers,)), load_stack(stack))


def test_embedding_and_head_were_one_unit_gathered_before_all_layers() -> None:
    assert unit_parts(shape_of(stack=ROOT), WHOLE) == (
        StagePart(FIRST, (2 * TABLE + H,), stays=True),
        *[StagePart(ONE_LAYER, (LAYER,))] * 2,
        StagePart(ONE_LAYER, (LAYER,), stays=True),  # its backward follows soon
        StagePart(LAST, ()),  # computes with what the root has gathered
    )


def test_the_table_is_freed_between_its_passes_and_the_head_is_not() -> None:
    """``apply_fsdp`` of torchtitan 0.2.2, and ``fsdp2_prepare_model`` of Accelerate."""
    assert unit_parts(shape_of(), WHOLE) == (
        StagePart(FIRST, (TABLE,)),
        *[StagePart(ONE_LAYER, (LAYER,))] * 3,
        StagePart(LAST, (TABLE + H,), stays=True),
    )


def test_positions_and_a_tied_table_stay_from_the_first_layer_on() -> None:
    """GPT-2: table of 50,257 and positions of 1,024 rows of 768, final norm of 2 x 768."""
    gpt2, table = shape_of(load_model("gpt2")), 50_257 * 768
    norm, positions = 2 * 768, 1024 * 768
    first, *_, last = unit_parts(gpt2, WHOLE)
    assert first == StagePart(FIRST, (positions, table + norm), stays=True)
    assert last == StagePart(LAST, ())
    root, words, *_ = unit_parts(gpt2, WHOLE._replace(has_head=False))
    assert root == StagePart(NEITHER, (positions,), stays=True)
    assert words == StagePart(FIRST, (table,))
    *_, head = unit_parts(gpt2, WHOLE._replace(has_embedding=False))
    assert head == StagePart(LAST, (table + norm,), stays=True)


def test_a_stage_in_the_middle_has_no_root_and_each_end_has_its_own() -> None:
    layers = [StagePart(ONE_LAYER, (LAYER,))] * 2
    inner = Stage((BlockRun("layer", 2),), has_embedding=False, has_head=False)
    for stack in (ROOT, ENDS):
        assert unit_parts(shape_of(stack=stack), inner) == (*layers,)
        first = unit_parts(shape_of(stack=stack), inner._replace(has_embedding=True))
        assert first == (StagePart(FIRST, (TABLE,), stays=stack == ROOT), *layers)
    assert unit_parts(shape_of(stack=ROOT), inner._replace(has_head=True)) == (
        StagePart(NEITHER, (TABLE + H,), stays=True),
        *layers,
        StagePart(LAST, ()),
    )
    assert unit_parts(shape_of(), inner._replace(has_head=True)) == (
        *layers,
        StagePart(LAST, (TABLE + H,), stays=True),
    )


def test_a_shard_that_is_no_whole_number_is_filled_up() -> None:
    replication = Replication.of(3, GroupSpan(7, 1, 7), reduces_each_microbatch=True)
    assert LAYER % 7
    state = StateBytes.of(TITAN, Precision.BF16)
    shape, sharding = shape_of(), Sharding.of(replication, ParameterBytes(state, 4))
    units = UnitBytes.of(shape, ONE_LAYER, StageWeights.of(shape, ONE_LAYER), sharding)
    assert units.gradients == units.layers[0].whole.kept == (LAYER // 7 + 1) * state.gradient
    assert units.shard == (LAYER // 7 + 1) * state.sharded_parameter
    assert (units.layers[0].whole.weights, units.layers[0].whole.wire) == (2 * LAYER, 4 * LAYER)


# Mixtral by hand: two h x h and two of h x 1024 of attention, two norms, a router of 8 rows and
# three of h x 14336 for each expert.
MIXTRAL, EXPERT = load_model("mixtral-8x7b"), 3 * 4096 * 14_336
BESIDE = 2 * H * H + 2 * H * 1024 + 2 * H


@pytest.mark.parametrize("stack", ["fsdp", "torchtitan@0.2"])
def test_ranks_share_whole_experts_filled_up(stack: str) -> None:
    """FSDPParam of PyTorch 2.13: of 16 ranks 8 have one of 8 experts, and 8 none; all send one."""
    layer = ONE_LAYER._replace(layers=(BlockRun(EXPERT_LAYER, 1),))
    whole = 16 * (EXPERT + H) + BESIDE
    assert unit_parts(shape_of(MIXTRAL, stack), layer, 16)[0].buckets == (whole,)
    state = StateBytes.of(load_stack(stack), Precision.BF16)
    replication = Replication.of(3, GroupSpan(16, 1, 16), reduces_each_microbatch=True)
    shape, sizes = shape_of(MIXTRAL, stack), ParameterBytes(state, 4)
    passes = PassBytes.of(BlockTable(), shape)
    memory = unit_rank_memory(shape, passes, (layer,), replication, sizes)
    assert memory.parameters_bytes == 4 * whole // 16
    assert memory.optimizer_states_bytes == 8 * whole // 16


@pytest.mark.parametrize(
    ("stack", "num_ranks", "gathered"),
    [
        ("fsdp", 3, 6 * EXPERT),  # of 4 experts 2, 2 and none
        ("torchtitan@0.2", 3, 6 * EXPERT),
        ("fsdp", 8, 8 * EXPERT),
        ("torchtitan@0.2", 8, 4 * EXPERT),  # an eighth of each: Shard(1)
    ],
)
def test_experts_of_several_ranks_are_filled_up_or_split(
    stack: str, num_ranks: int, gathered: int
) -> None:
    plan = ResolvedPlan(ep=2, dp=2 * num_ranks, zero_stage=3, stages=(32,))
    job = TrainingJob(model=MIXTRAL, global_batch_size=2 * num_ranks, seq_len=128)
    shape = BlockShape.of(job, plan, load_stack(stack))
    layer = ONE_LAYER._replace(layers=(BlockRun(EXPERT_LAYER, 1),))
    (part,) = unit_parts(shape, layer, 2 * num_ranks, num_ranks)
    assert part.expert_buckets == (gathered,)


def test_units_that_are_flattened_divide_experts() -> None:
    """FullyShardedDataParallel of PyTorch: an expert lies on two of 16 ranks."""
    shape = shape_of(MIXTRAL)
    flat = replace(shape, stack=shape.stack.model_copy(update={"norm_by_axis": False}))
    layer = ONE_LAYER._replace(layers=(BlockRun(EXPERT_LAYER, 1),))
    assert unit_parts(flat, layer, 16)[0].buckets == (8 * EXPERT + 8 * H + BESIDE,)


@pytest.mark.parametrize(
    ("stack", "has_head", "stays"),
    [(ROOT, False, TABLE), (ENDS, False, 0), (ROOT, True, TABLE + H), (ENDS, True, TABLE + H)],
)
def test_what_stays_after_a_forward_pass_and_all_after_a_backward_pass(
    stack: str,
    has_head: bool,  # noqa: FBT001 - a parameter of pytest
    stays: int,
) -> None:
    shape = shape_of(stack=stack)
    first = Stage((BlockRun("layer", 2),), has_embedding=not has_head, has_head=has_head)
    frees = Replication.of(3, GroupSpan(8, 1, 8))._replace(keeps_units=True)
    sizes = (StateBytes.of(TITAN, Precision.BF16), 4)
    whole = 2 * (TABLE + H * has_head + 2 * LAYER)
    for replication, after_forward in ((frees, 2 * stays), (frees._replace(reshards=False), whole)):
        (virtual_stage,) = unit_rank_memory(
            shape, PassBytes.of(BlockTable(), shape), (first,), replication, ParameterBytes(*sizes)
        ).virtual_stages
        assert virtual_stage.after_forward_bytes == after_forward
        assert virtual_stage.after_backward_bytes == whole


def test_gradients_that_are_added_to_sums_at_once_do_not_stay() -> None:
    """In fp32, where sums have the format of gradients; the first pass makes the sums."""
    shape = replace(shape_of(stack=ROOT), precision=Precision.FP32)
    whole = Stage((BlockRun("layer", 2),), has_embedding=True, has_head=True)
    replication = Replication.of(3, GroupSpan(8, 1, 8))._replace(reshards=False)
    sizes = ParameterBytes(StateBytes.of(TITAN, Precision.FP32), 4)
    passes = PassBytes.of(BlockTable(), shape)
    weights, sharding = StageWeights.of(shape, whole), Sharding.of(replication, sizes)
    held = StagePass(passes, whole, sharding, UnitBytes.of(shape, whole, weights, sharding))
    sums = SumBytes.of(shape, held, weights)
    first, later = (
        next(_SummingPass(held, sums, is_first, is_last=False)._layer_peaks())
        for is_first in (True, False)
    )
    # The gradients of the head and of a layer's matrices, as far as they live together.
    assert 4 * TABLE < first.buffers_bytes - later.buffers_bytes <= 4 * (TABLE + LAYER)
    assert passes.layers[0][0].adding < passes.layers[0][0].work[1]


def test_a_tied_table_is_in_the_root_once_and_in_each_of_two() -> None:
    """GPT-2: table of 50,257 and positions of 1,024 rows of 768, final norm of 2 x 768."""
    shape, table = shape_of(load_model("gpt2"), ROOT), 50_257 * 768
    whole = Stage((BlockRun("layer", 1),), has_embedding=True, has_head=True)
    for stage, root in (
        (whole, table + 1024 * 768 + 2 * 768),
        (whole._replace(has_head=False), table + 1024 * 768),
        (whole._replace(has_embedding=False), table + 2 * 768),
    ):
        assert unit_parts(shape, stage)[0].buckets == (root,)


def test_without_a_root_the_ends_belong_to_the_outer_layers() -> None:
    whole = Stage((BlockRun("layer", 3),), has_embedding=True, has_head=True)
    parts = unit_parts(shape_of(stack="deepspeed"), whole)
    assert [part.buckets for part in parts] == [(LAYER + TABLE,), (LAYER,), (LAYER + TABLE + H,)]
    assert [part.stage for part in parts] == [
        Stage((BlockRun("layer", 1),), has_embedding=True, has_head=False),
        ONE_LAYER,
        Stage((BlockRun("layer", 1),), has_embedding=False, has_head=True),
    ]
    assert not any(part.stays for part in parts)


def walked_gathers(
    passes: list[Action], virtual_stage: int, *, stays: bool, keeps_units: bool
) -> int:
    """Return how often a unit of *virtual_stage* is gathered, by following what lies on the device.

    A unit is freed after a forward pass unless it stays, after a backward pass unless all do.
    """
    gathers, is_there = 0, False
    for phase, of_virtual_stage, _ in passes:
        if of_virtual_stage != virtual_stage:
            continue
        gathers += not is_there
        is_there = stays if phase is Phase.FORWARD else keeps_units
    return gathers


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("stays", [True, False])
@given(pp=st.integers(2, 5), multiple=st.integers(1, 4))
def test_a_pipeline_gathers_once_more_than_it_has_microbatches(
    name: str, pp: int, multiple: int, *, stays: bool
) -> None:
    schedule = SCHEDULES[name]
    vpp, microbatches = 3 if schedule.interleaves else 1, pp * multiple
    expected = 1 if stays else microbatches + 1
    assert num_gathers(microbatches, stays=stays, keeps_units=True) == expected
    for passes in schedule.actions(pp, microbatches, vpp):
        for virtual_stage in range(vpp):
            assert walked_gathers(passes, virtual_stage, stays=stays, keeps_units=True) == expected


@pytest.mark.parametrize("stays", [True, False])
@given(microbatches=st.integers(1, 12))
def test_without_a_pipeline_every_microbatch_gathers_anew(
    microbatches: int, *, stays: bool
) -> None:
    (passes,) = SCHEDULES["1f1b"].actions(1, microbatches, 1)
    counted = num_gathers(microbatches, stays=stays, keeps_units=False)
    assert counted == walked_gathers(passes, 0, stays=stays, keeps_units=False)
    assert counted == microbatches * (1 if stays else 2)


@pytest.mark.parametrize("keeps_units", [True, False])
def test_what_does_not_reshard_stays_as_the_root_does(*, keeps_units: bool) -> None:
    replication = Replication.of(3, GroupSpan(8, 1, 8))._replace(keeps_units=keeps_units)
    layer = StagePart(ONE_LAYER, (LAYER,))
    root = StagePart(FIRST, (TABLE,), stays=True)
    once = 1 if keeps_units else 5
    assert part_gathers(root, replication, 5) == once
    assert part_gathers(layer, replication, 5) == (6 if keeps_units else 10)
    assert part_gathers(layer, replication._replace(reshards=False), 5) == once


PIPELINES = [(1, "1f1b", 1), (2, "1f1b", 1), (2, "gpipe", 1), (4, "1f1b", 1), (2, "interleaved", 2)]


def sharded_plan(pp: int, schedule: str, vpp: int, *, reshards: bool = True) -> ResolvedPlan:
    return ResolvedPlan(
        pp=pp,
        dp=4,
        num_virtual_stages=vpp,
        schedule=schedule,
        zero_stage=3,
        attention=Attention.FLASH,
        reshard_after_forward=reshards,
        stages=(8 // (pp * vpp),) * (pp * vpp),
    )


def small_job(plan: ResolvedPlan, microbatches: int) -> TrainingJob:
    model = LLAMA.model_copy(update={"num_layers": 8, "seq_len": 512})
    return TrainingJob(
        model=model,
        global_batch_size=plan.dp * microbatches,
        seq_len=512,
        precision=Precision.BF16,
    )


@pytest.mark.parametrize(("pp", "schedule", "vpp"), PIPELINES)
@pytest.mark.parametrize("reshards", [True, False])
def test_the_engine_runs_every_gather_that_is_counted(
    pp: int, schedule: str, vpp: int, *, reshards: bool
) -> None:
    plan = sharded_plan(pp, schedule, vpp, reshards=reshards)
    job = small_job(plan, 4)
    work = build_step(job, plan, CostModel(load_cluster("dgx-h100"), TITAN, plan.world_size)).work
    for pp_rank, rank in enumerate(simulate_folded(work).ranks):
        run = Counter(each.kind for each in rank.collectives)
        counted = Counter[CollectiveOp]()
        for each in rank_traffic(job, plan, TITAN, pp_rank):
            if each.axis is Axis.DP:
                counted[each.op] += each.num_calls
        assert run[SpanKind.PARAMETER_GATHER] == counted[CollectiveOp.ALL_GATHER]
        assert run[SpanKind.GRADIENT_REDUCTION] == counted[CollectiveOp.REDUCE_SCATTER]


def test_traffic_of_a_pipeline_of_units() -> None:
    """Two stages of four layers, four microbatches, each unit once: torchtitan's default.

    Freed after forward passes, layers are gathered five times.
    """
    plan = replace(sharded_plan(2, "1f1b", 1), reshard_after_forward=None)
    job = small_job(plan, 4)
    for pp_rank, root in enumerate((TABLE, TABLE + H)):
        assert len(rank_stages(job.model, plan, pp_rank)) == 1
        traffic = {
            (each.op, each.size_bytes): each.num_calls
            for each in rank_traffic(job, plan, TITAN, pp_rank)
        }
        assert traffic == {
            (CollectiveOp.REDUCE_SCATTER, 4 * root): 1,
            (CollectiveOp.REDUCE_SCATTER, 4 * LAYER): 4,
            (CollectiveOp.ALL_GATHER, 2 * root): 1,
            (CollectiveOp.ALL_GATHER, 2 * LAYER): 4,
        }
        freed = rank_traffic(job, replace(plan, reshard_after_forward=True), TITAN, pp_rank)
        gathers = {
            each.size_bytes: each.num_calls for each in freed if each.op is CollectiveOp.ALL_GATHER
        }
        assert gathers == {2 * root: 1 if pp_rank else 5, 2 * LAYER: 4 * 5}


@pytest.mark.parametrize(
    ("batch", "each", "gradient"), [(8, True, 2), (16, True, 2), (16, False, 4)]
)
def test_a_unit_is_copied_from_its_gathers_buffer_and_into_its_reductions(
    batch: int, gradient: int, *, each: bool
) -> None:
    """Read and written in bf16, then read as the gradient is kept and written in fp32."""
    cluster = load_cluster("dgx-a100")
    job = TrainingJob(model=LLAMA, global_batch_size=batch, seq_len=1024)
    plan = ResolvedPlan(
        dp=8, zero_stage=3, attention=Attention.FLASH, stages=(32,), sync_each_microbatch=each
    )
    rate = cluster.device.memory_bandwidth_bytes_per_s * cluster.device.memory.bandwidth_fraction
    work = build_step(job, plan, CostModel(cluster, TITAN, 8)).work.ranks[0].virtual_stages[0]
    forward, backward = (work[phase].units for phase in (Phase.FORWARD, Phase.BACKWARD))
    for unit in (forward[1], backward[1]):
        assert unit.unpack_ps == pytest.approx(LAYER * (2 + 2) / rate * 1e12, rel=1e-9)
    packed = backward[1]
    assert packed.pack_ps == pytest.approx(LAYER * (gradient + 4) / rate * 1e12, rel=1e-9)
    assert forward[0].unpack_ps > 0  # the root, which stays for its backward pass
    flat = TITAN.model_copy(update={"copies_units": False})
    for unit in (
        build_step(job, plan, CostModel(cluster, flat, 8))
        .work.ranks[0]
        .virtual_stages[0][Phase.BACKWARD]
        .units
    ):
        assert (unit.unpack_ps, unit.pack_ps) == (0, 0)
