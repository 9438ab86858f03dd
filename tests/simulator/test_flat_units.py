"""Megatron-FSDP's units: what is gathered and reduced, and how often."""

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.hwprofiles import (
    Precision,
    Recompute,
    RecomputeMethod,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, load_model, simulate
from meshwright.simulator.ledger import StepPoint, StepSetting, rank_ledger
from meshwright.simulator.replication.flat_units import bucket_size

CORE, CLUSTER = load_stack("megatron-core@0.16"), load_cluster("dgx-h100")


def job_of(name: str, batch: int, *, precision: Precision = Precision.BF16) -> TrainingJob:
    return TrainingJob(
        model=load_model(name), global_batch_size=batch, seq_len=1024, precision=precision
    )


OF_REPLICAS = {
    StepPoint.GATHER,
    StepPoint.AHEAD,
    StepPoint.REDUCE,
    StepPoint.REPLICAS,
    StepPoint.UPDATED,
}


def calls(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile = CORE
) -> Counter[tuple[str, int]]:
    """Return the calls of replicas in a step, by bytes."""
    plan = replace(plan, zero_stage=3, stages=(job.model.num_layers,))
    setting = StepSetting.of(job, plan, stack, 8)
    found: Counter[tuple[str, int]] = Counter()
    for entry in rank_ledger(setting, 0).entries:
        if entry.moment in OF_REPLICAS:
            for each in entry.collectives:
                sent = each.size_bytes + each.padding_bytes
                found[each.op.value, sent] += each.num_calls * entry.num_times
    return found


LAYER = 218_103_808  # elements of the weights of a layer's four products
BUCKET = 218_136_576  # in cells of 4 ranks x 28,672, which rows of 4,096 and 14,336 divide
NORMS = 8192  # of a layer


def test_llama_gathers_three_layers_in_vain() -> None:
    # As Megatron-FSDP of core 0.16.1 was counted to do on fake tensors (docs/agreement.md): 32
    # layers twice a microbatch, and 3 before the head, which the last layer's gather frees.
    assert calls(job_of("llama3-8b", 8), ResolvedPlan(dp=4)) == {
        ("all_gather", 436_273_152): 2 * (2 * 32 + 3),
        ("all_gather", 1_050_673_152): 1,
        ("all_gather", 1_050_705_920): 1,
        ("reduce_scatter", 872_546_304): 2 * 32,
        ("reduce_scatter", 2_101_346_304): 2,
        ("reduce_scatter", 2_101_411_840): 2,
    }


def test_from_core_0_18_on_no_layer_is_gathered_in_vain() -> None:
    later = CORE.model_copy(update={"ends_gather_ahead": False})
    found = calls(job_of("llama3-8b", 8), ResolvedPlan(dp=4), later)
    assert found["all_gather", 436_273_152] == 2 * 2 * 32


def test_weights_in_8_bits_are_gathered_so_and_scaled_together() -> None:
    """Norms, table and head are not; four products of each layer have a scale."""
    job = job_of("llama3-8b", 8, precision=Precision.FP8)
    found = calls(job, ResolvedPlan(dp=4))
    times = 2 * (2 * 32 + 3)  # in microbatches; as many layers are ahead of the head as in 16 bits
    assert found["all_gather", BUCKET] == times
    assert found["all_gather", 2 * NORMS] == times
    assert found["reduce_scatter", 4 * BUCKET] == 2 * 32
    assert found["all_reduce", 4 * 4 * 32] == 1


def test_scales_of_blocks_are_those_of_tiles() -> None:
    """Each product's scales, one of 32 along rows and along columns, in two bytes."""
    job = job_of("llama3-8b", 8, precision=Precision.MXFP8)
    found = calls(job, ResolvedPlan(dp=4))
    assert found["all_reduce", 2 * 2 * LAYER // 32 * 32] == 1
    assert found["all_gather", BUCKET] == 2 * 2 * 32  # along rows, and along columns


def test_sets_of_shards_sum_them_in_the_last_microbatch_alone() -> None:
    whole = calls(job_of("llama3-8b", 8), ResolvedPlan(dp=4))
    found = calls(job_of("llama3-8b", 16), ResolvedPlan(dp=8, dp_shard=4))
    sums = Counter({op: n for op, n in found.items() if op[0] == "all_reduce"})
    assert found - sums == whole
    assert sums == {
        ("all_reduce", 872_546_304 // 4): 32,
        ("all_reduce", 2_101_346_304 // 4): 1,
        ("all_reduce", 2_101_411_840 // 4): 1,
    }


def test_a_bucket_is_filled_up_to_rows_of_every_weight() -> None:
    # A layer of 512 with biases over 4 ranks, and the ends of small-gpt-untied: as counted.
    layer = [(1536, 512), (1536,), (512, 512), (2048, 512), (2048,), (512, 2048), *[(512,)] * 6]
    assert bucket_size(layer, 4) == 3_153_920
    ends = [(4096, 512), (1024, 512), (512,), (512,), (4096, 512)]
    assert bucket_size(ends, 4) == 4_720_640


def test_rests_of_two_weights_share_a_cell() -> None:
    # Rows of 6 and 4 make a grid of 12: 18 and 16 elements leave rests of 6 and 4.
    assert bucket_size([(3, 6), (4, 4)], 1) == 36


def test_what_megatron_fsdp_does_not_take_is_refused_by_name() -> None:
    plans = [
        (ResolvedPlan(dp=4, pp=2, zero_stage=3, stages=(6, 6)), Precision.BF16),
        (ResolvedPlan(pp=2, zero_stage=3, stages=(6, 6)), Precision.BF16),
        (ResolvedPlan(dp=8, zero_stage=2, stages=(12,)), Precision.BF16),
    ]
    for plan, precision in plans:
        with pytest.raises(PlanError, match=r"zero_stage=\d is not offered by stack megatron-core"):
            simulate(job_of("gpt2", 16, precision=precision), plan, CLUSTER, CORE)
    sets = ResolvedPlan(dp=8, dp_shard=1, zero_stage=3, stages=(12,))
    with pytest.raises(PlanError, match=r"dp_shard=1 is not offered .*; allowed: 2 or more"):
        simulate(job_of("gpt2", 16), sets, CLUSTER, CORE)


def test_checkpoints_of_several_units_are_refused() -> None:
    plan = ResolvedPlan(
        dp=8,
        zero_stage=3,
        stages=(12,),
        recompute=Recompute.FULL,
        recompute_layers=2,
        recompute_method=RecomputeMethod.UNIFORM,
    )
    with pytest.raises(PlanError, match=r"recompute_layers=2 is not offered .* method block"):
        simulate(job_of("gpt2", 16), plan, CLUSTER, CORE)
