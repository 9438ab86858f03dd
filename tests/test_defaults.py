"""Every stack runs on every cluster, or is refused by a fact of the cluster's device."""

import contextlib
import io
import json

import pytest

from meshwright import list_clusters, list_stacks, load_cluster, load_stack, main
from meshwright.hwprofiles import Attention, Cluster, Precision
from meshwright.planner.search import search
from meshwright.simulator import PlanError, TrainingJob, load_model
from meshwright.simulator.layout import default_precision

STEP = ["simulate", "gpt2", "--gpus", "4", "--global-batch", "8", "--json", "-"]


def defaults(cluster: str, stack: str) -> tuple[str, str] | str:
    """Return precision and attention of a step that says neither, or why it is refused."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*STEP, "--cluster", cluster, "--stack", stack])
    if status:
        return err.getvalue()
    step = json.loads(out.getvalue())
    return step["job"]["precision"], step["plan"]["attention"]


# Of clusters with the same device the last: docs/clusters.md shows the first.
CLUSTERS = {load_cluster(name).device.name: name for name in list_clusters()}


@pytest.mark.parametrize("stack", list_stacks())
def test_a_stack_runs_on_a_cluster_unless_its_device_lacks_what_it_needs(stack: str) -> None:
    software = load_stack(stack)
    for cluster in CLUSTERS.values():
        device = load_cluster(cluster).device
        found = defaults(cluster, stack)
        has_rate = bool(device.peak_flops_per_s.keys() & set(software.precisions))
        has_kernel = Attention.UNFUSED in software.attention_kernels or (
            software.flash_kernel in device.flash
        )
        if has_rate and has_kernel:
            assert not isinstance(found, str), (cluster, found)
            precision, attention = found
            assert precision in device.peak_flops_per_s
            if attention == Attention.FLASH:
                assert software.flash_kernel in device.flash
        else:
            assert isinstance(found, str)
            assert device.name in found
            lacking = software.flash_kernel if has_rate else "precision="
            assert lacking in found


@pytest.mark.parametrize("cluster", sorted({*list_clusters()} - {*CLUSTERS.values()}))
def test_clusters_with_the_same_device_have_the_same_defaults(cluster: str) -> None:
    other = CLUSTERS[load_cluster(cluster).device.name]
    assert defaults(cluster, "megatron-core") == defaults(other, "megatron-core")


def test_there_are_stacks_that_run_everywhere_and_some_that_do_not() -> None:
    assert defaults("dgx-1v", "megatron-core") == (Precision.FP16, Attention.UNFUSED)
    assert defaults("dgx-1v", "fsdp") == (Precision.FP16, Attention.UNFUSED)
    assert defaults("dgx-a100", "fsdp") == (Precision.BF16, Attention.FLASH)
    assert "no kernel 'sdpa-fa2'" in defaults("dgx-1v", "torchtitan")
    assert "bf16 is not available" in defaults("dgx-1v", "megatron-deepspeed-2022-bf16")


def searched(cluster: Cluster, precision: Precision) -> Attention:
    model = load_model("gpt2")
    job = TrainingJob(model=model, global_batch_size=8, seq_len=model.seq_len, precision=precision)
    return search(job, cluster, load_stack("megatron-core"), 8, top=1).plans[0].plan.attention


def test_a_search_in_python_takes_the_kernel_that_the_device_has() -> None:
    old, new = load_cluster("dgx-1v"), load_cluster("dgx-a100")
    assert default_precision(old.device, load_stack("megatron-core")) is Precision.FP16
    assert searched(old, Precision.FP16) is Attention.UNFUSED
    assert searched(new, Precision.BF16) is Attention.FLASH
    with pytest.raises(PlanError, match="bf16 is not available on v100"):
        searched(old, Precision.BF16)
