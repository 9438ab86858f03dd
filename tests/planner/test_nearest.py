"""When nothing fits: what it lacks, and changes that a user could make."""

from meshwright.hwprofiles import load_cluster, load_stack
from meshwright.planner import SpaceLimits
from meshwright.planner.search import search
from meshwright.simulator import TrainingJob, load_model

MODEL = load_model("gpt3-175b")
JOB = TrainingJob(model=MODEL, global_batch_size=512, seq_len=MODEL.seq_len)


def test_more_gpus_are_named_only_where_the_cluster_has_them() -> None:
    cluster, stack = load_cluster("dgx-a100"), load_stack("megatron-core")
    few = search(JOB, cluster, stack, 8).nearest
    assert few is not None
    assert few.changes[1].endswith("GPUs hold it")
    small = cluster.model_copy(update={"num_nodes": 1})
    alone = search(JOB, small, stack, 8).nearest
    assert alone is not None
    assert (alone.plan, alone.lacks_bytes) == (few.plan, few.lacks_bytes)
    assert len(alone.changes) == 1


def test_a_pinned_axis_that_keeps_it_from_fitting_is_named() -> None:
    cluster, stack = load_cluster("dgx-a100"), load_stack("megatron-core")
    limits = SpaceLimits(tp=(1,), pp=(1,))
    nearest = search(JOB, cluster, stack, 64, limits=limits).nearest
    assert nearest is not None
    assert nearest.lacks_bytes > 0
    assert "it fits" in nearest.changes[1]
