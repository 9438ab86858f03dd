"""Plans that keep or reduce gradients in formats of their own, or in each microbatch."""

from typing import Any

import pytest

from hwprofiles import Offload, Precision, load_cluster, load_stack
from planner.plan_file import SavedPlan
from simulator import ModelSpec, ParallelPlan, PlanError, TrainingJob
from validate.comparison import PEAK, Verdict, compare_rank
from validate.fake_run import measure_fake
from validate.prediction import predict_rank

pytest.importorskip("torch")

# Of sizes at which activations decide the peak; tensors have no data.
GPT = ModelSpec(
    name="small-gpt", num_layers=4, hidden_size=1024, num_heads=16, vocab_size=51200, seq_len=2048
)


def saved_plan(stack: str, precision: Precision = Precision.BF16, **fields: Any) -> SavedPlan:
    profile = load_stack(stack)
    plan = ParallelPlan(dp=4, stages=(4,), attention=profile.attention, **fields)
    job = TrainingJob(model=GPT, global_batch_size=16, seq_len=1024, precision=precision)
    return SavedPlan(job=job, plan=plan, cluster=load_cluster("dgx-a100"), stack=profile)


BF16, FP32 = Precision.BF16, Precision.FP32
CASES = {
    "ddp in each": saved_plan("ddp", sync_each_microbatch=True),
    "fsdp in fp32": saved_plan("fsdp", zero_stage=3, reduce_precision=FP32),
    "fsdp of fp32 in bf16": saved_plan("fsdp", FP32, zero_stage=3, reduce_precision=BF16),
    "titan in bf16": saved_plan("torchtitan", zero_stage=3, reduce_precision=BF16),
    "megatron kept in bf16": saved_plan("megatron-core", zero_stage=1, gradient_precision=BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_do_what_is_predicted(name: str) -> None:
    saved = CASES[name]
    checks = compare_rank(predict_rank(saved, 0), measure_fake(saved, 0))
    assert [check for check in checks if check.verdict is Verdict.FAILED] == []


@pytest.mark.parametrize("precision", [BF16, FP32])
def test_buckets_are_compressed_on_the_wire(precision: Precision) -> None:
    saved = saved_plan("ddp", precision, reduce_precision=BF16)
    checks = compare_rank(predict_rank(saved, 0), measure_fake(saved, 0))
    # Predicted are 16-bit copies of all buckets at once; here each is gone when it is reduced.
    exact = [check for check in checks if check.quantity != PEAK]
    assert [check for check in exact if check.verdict is Verdict.FAILED] == []


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
def test_what_no_program_expresses_is_refused_by_name(stack: str) -> None:
    zero_stage = 3 if stack == "torchtitan" else 1
    offloaded = saved_plan(stack, zero_stage=zero_stage, offload=Offload.PARAMETERS)
    with pytest.raises(PlanError, match=r"^offload=parameters has no PyTorch program; allowed"):
        measure_fake(offloaded, 0)
    with pytest.raises(PlanError, match=r"precision=fp8.* allowed: "):
        measure_fake(saved_plan(stack, Precision.FP8, zero_stage=zero_stage), 0)
