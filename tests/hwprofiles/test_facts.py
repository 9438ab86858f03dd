"""Single facts: changed by name, checked as in a file, told apart from the built-in ones."""

from pathlib import Path

import pytest

from meshwright.hwprofiles import (
    Cluster,
    LossKernel,
    ProfileError,
    StackProfile,
    changed_facts,
    list_clusters,
    list_stacks,
    load_cluster,
    load_stack,
    profile_toml,
    with_facts,
)


def changed(*changes: str) -> tuple[Cluster, StackProfile]:
    return with_facts(load_cluster("dgx-h100"), load_stack("megatron-core"), changes)


@pytest.mark.parametrize("name", list_clusters())
def test_a_cluster_written_out_is_the_cluster(name: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(profile_toml(load_cluster(name)), encoding="utf-8")
    assert load_cluster(file) == load_cluster(name)


@pytest.mark.parametrize("name", list_stacks())
def test_a_stack_written_out_is_the_stack(name: str, tmp_path: Path) -> None:
    file = tmp_path / "stack.toml"
    file.write_text(profile_toml(load_stack(name)), encoding="utf-8")
    assert load_stack(file) == load_stack(name)


@pytest.mark.parametrize("name", [*list_clusters(), *list_stacks()])
def test_every_line_of_a_written_profile_can_be_set(name: str) -> None:
    is_stack = name in list_stacks()
    profile = load_stack(name) if is_stack else load_cluster(name)
    given = [line for line in profile_toml(profile).splitlines() if not line.startswith("# ")]
    keys = [line for line in given if not line.partition(" = ")[0].endswith("name")]
    words = [f"{'stack' if is_stack else 'cluster'}.{line.replace(' = ', '=', 1)}" for line in keys]
    cluster = load_cluster("dgx-a100") if is_stack else load_cluster(name)
    stack = load_stack(name) if is_stack else load_stack("megatron-core")
    assert with_facts(cluster, stack, words) == (cluster, stack)


def test_a_fact_of_each_kind_changes() -> None:
    cluster, stack = changed(
        "loss=in-place",
        "fitted.kernel_gap=2 us",
        "fp8.weight_copy_bytes=1",
        'precisions=["bf16", "fp8", "mxfp8"]',
        "devices_per_node=4",
        'device.memory_capacity="96 GiB"',
        "device.peak.bf16 = 500 TFLOP/s",
        "intra_node.collectives.3.busbw=100 GB/s",
        "cluster.inter_node.bandwidth=100 GB/s per direction",
    )
    assert stack.loss is LossKernel.IN_PLACE
    assert stack.kernel_gap_s == 2e-6
    assert stack.fp8 is not None
    assert stack.fp8.weight_copy_bytes == 1
    assert [str(each) for each in stack.precisions] == ["bf16", "fp8", "mxfp8"]
    assert cluster.devices_per_node == 4
    assert cluster.device.memory_capacity_bytes == 96 * 2**30
    assert dict(cluster.device.peak_flops_per_s)["bf16"] == 500e12
    assert cluster.intra_node.collectives[2].busbw_bytes_per_s == 100e9
    assert cluster.intra_node.collectives[1] == load_cluster("dgx-h100").intra_node.collectives[1]
    assert cluster.inter_node.bandwidth_bytes_per_s == 100e9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("loss", "is not KEY=VALUE"),
        ("=true", "is not KEY=VALUE"),
        ("los=fused", "'los' is unknown; nearest: loss"),
        ("device.num_sm=3", "unknown key 'num_sm'; nearest: num_sms"),
        ("device.peak.bf61=1 TFLOP/s", "unknown key 'bf61'; nearest: bf16"),
        ("intra_node.collectives.99.busbw=1 GB/s", "unknown key '99'"),
        ("source=me", "several files; allowed: stack.source or cluster.source"),
        ("stack.name=mine", "unknown key 'name'"),
        ("zero_stage=7", "less than or equal to 3"),
        ("zero_stages=[0]", "zero_stage: 1 is not in zero_stages; allowed: 0"),
        ("inter_node.bandwidth=50", "50 has no unit"),
        ("inter_node.bandwidth=50 GB/s", "does not say its direction"),
        ("device.num_sms.x=1", "unknown key 'x'"),
        ("device=h100-sxm5-80gb", "device=h100-sxm5-80gb"),
        ("fp8.weight_copy_bytes=0", "with copies of at least 1 byte"),
        ("fp8.weight_casts=forward", "holds_parameters: does not go with"),
    ],
)
def test_what_cannot_be_set_is_refused(change: str, words: str) -> None:
    with pytest.raises(ProfileError, match=r"^--set") as caught:
        changed(change)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("torchtitan", "main_precision=fp16", "is of a precision-aware optimizer"),
        ("fsdp", "doubles_unit_buffers=true", "is of Megatron-FSDP; allowed: with units flat"),
        ("torchtitan", "cuda_graphs=layers", "is not in cuda_graph_modes; allowed: none"),
        ("fsdp", "expert_capacity=1.5", "is of experts of Megatron-Core"),
    ],
)
def test_switches_that_a_stack_has_no_code_for_are_refused(
    name: str, change: str, words: str
) -> None:
    with pytest.raises(ProfileError, match=words):
        with_facts(load_cluster("dgx-h100"), load_stack(name), [change])


def test_a_table_that_is_not_given_has_no_facts() -> None:
    cluster, stack = load_cluster("workstation-4x4090"), load_stack("ddp")
    with pytest.raises(ProfileError, match="'weight_casts' is of a table that is not given"):
        with_facts(cluster, stack, ["fp8.weight_casts=forward"])


def test_changed_facts_are_those_that_differ() -> None:
    cluster, stack = changed("loss=in-place", "inter_node.latency=9 us", "allocator_fraction=0.12")
    assert [(each.key, each.value, each.built_in) for each in changed_facts(stack)] == [
        ("loss", LossKernel.IN_PLACE, LossKernel.FUSED)
    ]
    assert [each.field for each in changed_facts(cluster)] == ["inter_node.latency_s"]
    assert changed_facts(stack.model_copy(update={"name": "mine"})) == ()


def test_weights_of_16_bits_change_all_that_follows_from_their_format(tmp_path: Path) -> None:
    cluster = load_cluster("dgx-h100")
    _, ddp = with_facts(cluster, load_stack("ddp"), ["parameter_precision=bf16"])
    # AdamW of PyTorch: weight 2, gradient 2, two moments 2 each; buckets stay 25 MiB.
    assert (ddp.parameter_bytes, ddp.gradient_bytes, ddp.optimizer_bytes) == (2, 2, 4)
    assert ddp.gradient_reduce_bytes * ddp.gradient_bucket_parameters == 25 * 2**20
    assert not ddp.autocast
    _, again = with_facts(cluster, ddp, ["parameter_precision=bf16"])
    assert again == ddp
    # reduce_dtype of torchtitan's policy stays fp32, whatever the weights are.
    changes = ["parameter_precision=bf16", "optimizer_bytes=3"]
    _, titan = with_facts(cluster, load_stack("torchtitan@0.2"), changes)
    assert (titan.gradient_bytes, titan.gradient_reduce_bytes, titan.optimizer_bytes) == (2, 4, 3)
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "torchtitan@0.2"\nbase = "torchtitan@0.2"\nparameter_precision = "bf16"\n'
        "optimizer_bytes = 3\n"
    )
    assert load_stack(file) == titan


def test_a_stack_that_keeps_masters_has_no_weights_of_16_bits_alone() -> None:
    told = "parameter_precision: bf16 is not offered by stack megatron-core@0.18; allowed: leave"
    with pytest.raises(ProfileError, match=told):
        changed("parameter_precision=bf16")
