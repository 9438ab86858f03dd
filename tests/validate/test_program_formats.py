"""Plans that keep or reduce gradients in formats of their own, or in each microbatch."""

import pickle
from typing import Any

import pytest
import torch

from meshwright.hwprofiles import (
    Attention,
    ExpertOverlap,
    Offload,
    Precision,
    Recompute,
    load_cluster,
    load_stack,
)
from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.simulator import ModelSpec, PlanError, ResolvedPlan, TrainingJob
from meshwright.validate.comparison.checks import CheckVerdict, compare_rank
from meshwright.validate.counting.fake_cluster import fake_cluster
from meshwright.validate.programs.build import build_program, check_program
from meshwright.validate.programs.contract.request import ProgramRequest
from meshwright.validate.ranks.prediction import predict_rank
from meshwright.validate.runs.fake import measure_fake

# Of sizes at which activations decide the peak; tensors have no data.
GPT = ModelSpec(
    name="small-gpt", num_layers=2, hidden_size=1024, num_heads=16, vocab_size=51200, seq_len=2048
)


LLAMA = GPT.model_copy(
    update={
        "name": "small-llama",
        "num_kv_heads": 4,
        "gated_mlp": True,
        "ffn_hidden_size": 2816,
        "vocab_size": 32000,
        "tied_embeddings": False,
        "positions": "rotary",
        "norm": "rmsnorm",
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "dropout": False,
    }
)
BF16, FP32 = Precision.BF16, Precision.FP32
AT_LAST: dict[str, Any] = {"sync_each_microbatch": False}
IN_BF16: dict[str, Any] = {"reduce_precision": BF16}


def saved_plan(
    stack: str,
    precision: Precision = Precision.BF16,
    *,
    model: ModelSpec = GPT,
    batch: int = 8,
    tokens: int = 1024,
    **fields: Any,
) -> SavedPlan:
    profile = load_stack(stack)
    whole: dict[str, Any] = {"dp": 4, "stages": (2,), "attention": profile.attention}
    plan = ResolvedPlan(**{**whole, **fields})
    job = TrainingJob(model=model, global_batch_size=batch, seq_len=tokens, precision=precision)
    return SavedPlan(job=job, plan=plan, cluster=load_cluster("dgx-a100"), stack=profile)


CASES = {
    "ddp in each": saved_plan("ddp", sync_each_microbatch=True),
    "fsdp of fp32 in bf16": saved_plan("fsdp", FP32, zero_stage=3, reduce_precision=BF16),
    "megatron kept in bf16": saved_plan("megatron-core", zero_stage=1, gradient_precision=BF16),
    "fsdp at last": saved_plan("fsdp", zero_stage=3, **AT_LAST),
    "fsdp at last in fp32": saved_plan("fsdp", zero_stage=3, reduce_precision=FP32, **AT_LAST),
    "fsdp at last of fp32": saved_plan("fsdp", FP32, zero_stage=3, **AT_LAST),
    "hsdp at last, recomputing": saved_plan(
        "fsdp", zero_stage=3, dp_shard=2, recompute=Recompute.FULL, **AT_LAST
    ),
    "titan at last": saved_plan(
        "torchtitan@0.2", batch=4, dp=2, tp=2, zero_stage=3, sequence_parallel=True, **AT_LAST
    ),
    # Of so few tokens that weights decide the peak: that of the update, or of a reduction.
    "short fsdp at last": saved_plan("fsdp", batch=12, tokens=16, zero_stage=3, **AT_LAST),
    "megatron copies bf16": saved_plan("megatron-core", tokens=128, gradient_precision=BF16),
    "titan reduces a pipeline in bf16": saved_plan(
        "torchtitan@0.2", model=LLAMA, tokens=256, pp=2, stages=(1, 1), zero_stage=3, **IN_BF16
    ),
    "ddp in bf16": saved_plan("ddp", reduce_precision=BF16),
    "short ddp of fp32 in bf16": saved_plan("ddp", FP32, tokens=16, reduce_precision=BF16),
    "untied ddp of fp32 in bf16": saved_plan(
        "ddp", FP32, tokens=16, model=LLAMA, reduce_precision=BF16
    ),
    "ddp in each, recomputed": saved_plan(
        "ddp", sync_each_microbatch=True, recompute=Recompute.FULL
    ),
    "short ddp, recomputed": saved_plan("ddp", tokens=16, recompute=Recompute.FULL),
    "grouped ddp, unfused": saved_plan("ddp", model=LLAMA, attention=Attention.UNFUSED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_do_what_is_predicted(name: str) -> None:
    saved = CASES[name]
    checks = compare_rank(predict_rank(saved, 0), measure_fake(saved, 0))
    assert [check for check in checks if check.verdict is CheckVerdict.FAILED] == []


@pytest.mark.parametrize(
    ("stack", "offload", "allowed"),
    [
        ("torchtitan@0.2", Offload.OPTIMIZER, "none, parameters"),
        ("megatron-core", Offload.PARAMETERS, "none"),
    ],
)
def test_what_no_program_expresses_is_refused_by_name(
    stack: str, offload: Offload, allowed: str
) -> None:
    zero_stage = 3 if stack == "torchtitan@0.2" else 1
    saved = saved_plan(stack, zero_stage=zero_stage, offload=offload)
    with fake_cluster(0, saved.plan.world_size), pytest.raises(PlanError) as refused:
        build_program(request_of(saved))
    assert str(refused.value) == f"offload={offload} has no PyTorch program; allowed: {allowed}"
    # A plan that offloads is counted in another process, and its refusal comes back from there.
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    with pytest.raises(PlanError, match=r"precision=fp8.* allowed: "):
        measure_fake(saved_plan(stack, Precision.FP8, zero_stage=zero_stage), 0)


def request_of(saved: SavedPlan) -> ProgramRequest:
    return ProgramRequest(
        job=saved.job,
        plan=saved.plan,
        stack=saved.stack,
        rank=0,
        device=torch.device("cpu"),
        initialise=False,
        num_microbatches=saved.plan.num_microbatches(saved.job),
    )


@pytest.mark.parametrize(
    "fields", [{"moment_precision": BF16}, {"expert_overlap": ExpertOverlap.MICROBATCHES}]
)
def test_fields_without_a_program_are_refused_by_name(fields: dict[str, Any]) -> None:
    name, value = next(iter(fields.items()))
    with pytest.raises(PlanError, match=f"^{name}={value} has no PyTorch program; allowed: leave"):
        check_program(load_stack("megatron-core"), ResolvedPlan(**fields))
