"""A mode of recomputation that one framework has alone, in the space of others."""

from meshwright.hwprofiles import Precision, Recompute, load_cluster, load_stack
from meshwright.planner import SpaceLimits, enumerate_space
from meshwright.planner.search import search
from meshwright.simulator import TrainingJob, load_model

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
        "megatron-core lacks recompute=selective-op": found.space_size,
    }
