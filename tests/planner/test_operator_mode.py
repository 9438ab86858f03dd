"""Modes of recomputation that a space leaves out: of one framework alone, of attention."""

import pytest

from meshwright.hwprofiles import Precision, Recompute, load_cluster, load_stack
from meshwright.planner import SpaceLimits, enumerate_space
from meshwright.planner.search import search
from meshwright.simulator import PlanError, TrainingJob, load_model

JOB = TrainingJob(
    model=load_model("gpt2"), global_batch_size=8, seq_len=512, precision=Precision.BF16
)
OP = Recompute.SELECTIVE_OP


def modes(stack: str, limits: SpaceLimits) -> set[Recompute]:
    space = enumerate_space(JOB, load_stack(stack), 4, limits)
    return {space.plan(index).recompute for index in range(len(space))}


def test_it_is_searched_where_the_stack_offers_it() -> None:
    assert modes("torchtitan", SpaceLimits()) == {*Recompute}
    assert modes("megatron-core", SpaceLimits()) == {*Recompute} - {OP}


def test_where_it_is_asked_for_its_rejection_has_a_name() -> None:
    asked = SpaceLimits(recompute=(OP,))
    assert modes("megatron-core", asked) == {OP}
    found = search(JOB, load_cluster("dgx-a100"), load_stack("megatron-core"), 4, limits=asked)
    assert found.plans == ()
    assert found.rejections == {
        "megatron-core@0.18 lacks recompute=selective-op": found.space_size,
    }


def test_a_model_without_attention_has_no_mode_that_picks_some_of_its_operators() -> None:
    job = TrainingJob(model=load_model("resnet50"), global_batch_size=8, seq_len=1)
    stack = load_stack("megatron-core")
    space = enumerate_space(job, stack, 4, SpaceLimits())
    plans = [space.plan(index) for index in range(len(space))]
    assert {plan.recompute for plan in plans} == {Recompute.NONE, Recompute.FULL}
    with pytest.raises(PlanError, match="recompute=selective does not go with resnet50"):
        enumerate_space(job, stack, 4, SpaceLimits(recompute=(Recompute.SELECTIVE,)))
