"""One data-parallel rank under PyTorch's own fully_shard: what it copies, counted and predicted."""

from dataclasses import replace
from functools import cache

import pytest

from meshwright.hwprofiles import Precision, load_cluster, load_stack
from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.simulator import (
    ModelSpec,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.validate.ranks.measurement import RankMeasurement
from meshwright.validate.runs.fake import measure_fake

# Weights, not activations, decide its peak, as that of a large model on one device.
MODEL = ModelSpec(
    name="few-tokens", num_layers=4, hidden_size=512, num_heads=8, vocab_size=512, seq_len=64
)


def saved_plan(stack: str, microbatches: int, *, each: bool | None) -> SavedPlan:
    profile = load_stack(stack)
    job = TrainingJob(
        model=MODEL, global_batch_size=microbatches, seq_len=64, precision=Precision.BF16
    )
    plan = ResolvedPlan(
        zero_stage=3, stages=(4,), attention=profile.attention, sync_each_microbatch=each
    )
    return SavedPlan(job=job, plan=plan, cluster=load_cluster("dgx-h200"), stack=profile)


@cache
def counted_rank(stack: str, microbatches: int, *, each: bool | None) -> RankMeasurement:
    return measure_fake(saved_plan(stack, microbatches, each=each), 0)


def simulated(saved: SavedPlan) -> StepResult:
    return simulate(saved.job, saved.plan, saved.cluster, saved.stack)


@pytest.mark.parametrize("stack", ["fsdp", "torchtitan@0.2"])
@pytest.mark.parametrize("each", [None, True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_rank_needs_what_fully_shard_needs(
    stack: str, microbatches: int, *, each: bool | None
) -> None:
    saved = saved_plan(stack, microbatches, each=each)
    counted = counted_rank(stack, microbatches, each=each).peak_bytes
    # Numbers of steps and of losses, some bytes each, are no tensor of a model.
    assert simulated(saved).memory.peak_bytes == pytest.approx(counted, abs=10_000)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_any_stage_of_one_rank_is_that_of_fully_shard(stage: int) -> None:
    saved = saved_plan("fsdp", 3, each=None)
    other = replace(saved, plan=replace(saved.plan, zero_stage=stage))
    assert measure_fake(other, 0) == counted_rank("fsdp", 3, each=None)
    assert simulated(other).memory.peak_bytes == simulated(saved).memory.peak_bytes


@pytest.mark.parametrize(
    ("each", "counted"),
    [(True, 141_857_277_092), (None, 141_857_277_092), (False, 130_586_641_572)],
)
def test_a_large_model_on_one_rank_needs_what_was_counted(
    *, each: bool | None, counted: int
) -> None:
    """139.6 and 128.5 GiB of a device, of Llama 3 8B and 4 microbatches of 2048 tokens.

    Units are copied out of fp32 shards in 16 bits, and gradients of each reduction into fp32 ones
    beside their sums.  PyTorch 2.13 was counted by `meshwright simulate llama3-8b --cluster
    dgx-h200 --gpus 1 --global-batch 4 --seq-len 2048 --stack fsdp --out o`, the last one with
    --no-sync-each-microbatch, and `validate o/plan.json --backend fake`.
    """
    few = saved_plan("fsdp", 4, each=each)
    job = replace(few.job, model=load_model("llama3-8b"), seq_len=2048)
    step = simulate(job, replace(few.plan, stages=(32,)), few.cluster, few.stack)
    assert step.memory.peak_bytes == pytest.approx(counted, rel=1e-6)
    assert step.warnings != ()
    assert not any("effect" in warning for warning in step.warnings)
