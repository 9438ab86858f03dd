"""Everything in the catalogue runs: each cluster trains a model, and each model trains."""

import pytest

from meshwright.hwprofiles import (
    Attention,
    Cluster,
    Precision,
    StackProfile,
    list_clusters,
    load_cluster,
    load_stack,
)
from meshwright.simulator import ResolvedPlan, StepResult, TrainingJob, simulate
from meshwright.simulator.layout.stages import resolve_stages
from meshwright.simulator.model.catalogue import list_models, load_model
from meshwright.simulator.model.spec import ModelSpec

MODERN, OLD = "megatron-core", "megatron-lm-2021"


def stack_for(cluster: Cluster) -> StackProfile:
    """Return the stack of the device's time: flash attention where there is a kernel."""
    return load_stack(MODERN if "te-cudnn" in cluster.device.flash else OLD)


def run(
    model: ModelSpec, cluster: Cluster, *, tp: int, dp: int, stack: StackProfile | None = None
) -> StepResult:
    stack = stack or stack_for(cluster)
    has_bf16 = Precision.BF16 in cluster.device.peak_flops_per_s
    job = TrainingJob(
        model=model,
        global_batch_size=2 * dp,
        seq_len=model.seq_len,
        precision=Precision.BF16 if has_bf16 else Precision.FP16,
    )
    plan = ResolvedPlan(
        tp=tp,
        dp=dp,
        zero_stage=stack.zero_stage,
        attention=stack.attention,
        sequence_parallel=tp > 1 and isinstance(model, ModelSpec) and model.experts is not None,
        stages=resolve_stages(model, model.seq_len, 1, stack.stage_split),
    )
    return simulate(job, plan, cluster, stack)


@pytest.mark.parametrize("name", list_clusters())
def test_every_cluster_trains_gpt2_medium_on_a_node(name: str) -> None:
    cluster = load_cluster(name)
    result = run(load_model("gpt2-medium"), cluster, tp=2, dp=cluster.devices_per_node // 2)
    assert result.memory.fits
    assert 0 < result.mfu_fraction <= result.hfu_fraction < 1


@pytest.mark.parametrize("name", list_clusters())
def test_a_second_node_costs_time_but_adds_throughput(name: str) -> None:
    cluster = load_cluster(name)
    if cluster.num_nodes == 1:
        pytest.skip("a cluster of one node")
    model, size = load_model("gpt2-medium"), cluster.devices_per_node
    one, two = (run(model, cluster, tp=1, dp=nodes * size) for nodes in (1, 2))
    # Each replica does the same work, and the gradients have further to go.
    assert one.step_time_s < two.step_time_s
    assert two.tokens_per_s > one.tokens_per_s * (0.9 if cluster.nics_per_node > 1 else 0.1)


@pytest.mark.parametrize("name", list_models())
def test_every_model_trains_on_dgx_a100(name: str) -> None:
    model, stack = load_model(name), load_stack(MODERN)
    is_whole = isinstance(model, ModelSpec) and (
        model.latent is not None or (model.experts is not None and model.experts.bias)
    )
    degrees = (1,) if is_whole else (8, 4, 2, 1)
    tp = next(each for each in degrees if model.split_refusal(each) is None)
    if isinstance(model, ModelSpec) and {*model.layer_facts(model.seq_len)} - {*stack.layer_facts}:
        tp, stack = 1, load_stack("fsdp")
    result = run(model, load_cluster("dgx-a100"), tp=tp, dp=8 // tp, stack=stack)
    assert 0 < result.mfu_fraction <= result.hfu_fraction < 1


def test_faster_devices_train_faster() -> None:
    model = load_model("llama2-7b")
    names = ("dgx-a100", "h100-96gb", "dgx-h100", "dgx-h200", "dgx-b200")
    times = [run(model, load_cluster(name), tp=8, dp=1).step_time_s for name in names]
    assert times == sorted(times, reverse=True)


def test_the_cpu_runs_unfused_and_refuses_a_kernel_of_a_gpu() -> None:
    cluster = load_cluster("localhost-cpu")
    assert stack_for(cluster).attention is Attention.UNFUSED
    assert cluster.device.num_sms == 1
    assert run(load_model("gpt2"), cluster, tp=1, dp=2).step_time_s > 1
