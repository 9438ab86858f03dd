"""The plans of docs/agreement.md; what PyTorch shows of them is compared with its page."""

import pytest

torch = pytest.importorskip("torch")

from meshwright.hwprofiles import Attention, Offload, Precision, Recompute  # noqa: E402
from meshwright.planner.reports.plan_file import SavedPlan  # noqa: E402
from meshwright.simulator import PlanError  # noqa: E402
from meshwright.validate.agreement import (  # noqa: E402
    CLUSTER,
    AgreementPlan,
    chosen_plans,
    load_agreement_plans,
)

PLANS = {plan.name: plan for plan in load_agreement_plans()}


def test_plans_span_what_programs_can_express() -> None:
    plans: list[SavedPlan] = [plan.saved() for plan in PLANS.values()]
    assert len(plans) >= 24
    assert {saved.stack.name for saved in plans} == {
        "ddp@2.13",
        "dataparallel@1.6",
        "fsdp@2.13",
        "torchtitan@0.2",
        "torchtitan-2024-12",
        "megatron-core@0.18",
        "megatron-lm-2021",
        "megatron-lm-2022",
    }
    assert {saved.plan.schedule for saved in plans} == {"gpipe", "1f1b", "interleaved"}
    assert {saved.plan.zero_stage for saved in plans} == {0, 1, 3}
    assert {saved.plan.recompute for saved in plans} == set(Recompute)
    assert {saved.plan.attention for saved in plans} == set(Attention)
    assert {saved.job.precision for saved in plans} >= {Precision.FP32, Precision.BF16}
    assert {saved.job.model.tied_embeddings for saved in plans} == {True, False}
    assert any(saved.plan.dp_shard for saved in plans)
    offloading = [saved for saved in plans if saved.plan.offload is Offload.PARAMETERS]
    assert {saved.stack.name for saved in offloading} == {"fsdp@2.13", "torchtitan@0.2"}
    assert any(saved.plan.reduce_precision for saved in plans)
    # 64 pipeline stages x 6 data-parallel hosts x 8 tensor-parallel GPUs, on two stacks.
    large = [saved for saved in plans if saved.plan.world_size == 3072]
    assert {(saved.plan.pp, saved.plan.dp, saved.plan.tp) for saved in large} == {(64, 6, 8)}
    assert {saved.stack.name for saved in large} == {"megatron-core@0.18", "torchtitan@0.2"}
    assert {saved.job.model.name for saved in large} == {"gpt3-175b", "megatron-1t"}


def test_a_name_that_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match=r"unknown plan 'hsdb'; nearest: hsdp"):
        chosen_plans(["hsdb"])
    assert chosen_plans(["hsdp"]) == (PLANS["hsdp"],)
    assert chosen_plans([]) == tuple(PLANS.values())


def test_a_plan_is_what_its_command_makes() -> None:
    plan = AgreementPlan(name="x", is_sampled=True, options="gpt2 --gpus 2", ranks=(), note="")
    assert plan.command == f"simulate gpt2 --gpus 2 --cluster {CLUSTER}"
    with pytest.raises(PlanError, match="--global-batch is missing; it is required"):
        plan.saved()
