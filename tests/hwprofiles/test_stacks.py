"""Stacks by framework, release and switches, and the names that stacks of published runs have."""

import pytest

from meshwright.hwprofiles import (
    ProfileError,
    StackProfile,
    list_releases,
    list_stacks,
    load_cluster,
    load_stack,
    release_changes,
    stack_frameworks,
    with_facts,
)

CLUSTER = load_cluster("dgx-b200")
RELEASES = [each for framework in stack_frameworks() for each in list_releases(framework)]
# Of published stacks that are their releases with switches alone.
SWITCHED = {
    "megatron-core-blackwell": ("allocator=expandable", "fp8.weight_copy_bytes=1"),
    "megatron-core-capacity": ("expert_capacity=1.0",),
    "megatron-core-capacity-graphs": (
        "expert_capacity=1.0",
        "cuda_graphs=layers",
        "cuda_graph_impl=local",
    ),
    "megatron-core-fused": (
        "cuda_graphs=whole-step",
        "mxfp8.fuses_experts=true",
        "mxfp8.multiplies_head=true",
    ),
    "megatron-core-graphs": ("cuda_graphs=layers",),
}


def switched(name: str, *switches: str) -> StackProfile:
    _, stack = with_facts(CLUSTER, load_stack(name), switches)
    return stack


@pytest.mark.parametrize("framework", stack_frameworks())
def test_a_frameworks_name_is_its_newest_release(framework: str) -> None:
    stacks = [load_stack(each) for each in list_releases(framework)]
    assert load_stack(framework) is stacks[-1]
    assert [each.date for each in stacks] == sorted(each.date for each in stacks)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("megatron-core@0.16.1", "megatron-core@0.16"),
        ("megatron-core@0.19.2", "megatron-core@0.18"),
        ("megatron-core@0.10", "megatron-core@0.12"),
        ("torchtitan@0.2.2", "torchtitan@0.2"),
    ],
)
def test_a_number_is_the_release_that_it_counts_as(text: str, release: str) -> None:
    assert load_stack(text) is load_stack(release)


@pytest.mark.parametrize("text", ["megatron-core@0.1", "megatron-core@0.20", "megatron-core@"])
def test_an_unknown_release_is_told_those_that_are_known(text: str) -> None:
    with pytest.raises(ProfileError) as refused:
        load_stack(text)
    assert str(refused.value) == (
        f"unknown release '{text}'; allowed: megatron-core@0.18 (as which 0.19 counts), "
        "megatron-core@0.16, megatron-core@0.12 (as which 0.10, 0.11, 0.13, 0.14 count), "
        "megatron-core@0.9"
    )


def test_moments_have_formats_from_core_0_11_on() -> None:
    assert load_stack("megatron-core@0.9").moment_precisions == ()
    assert load_stack("megatron-core@0.11").moment_precisions


@pytest.mark.parametrize("name", SWITCHED)
def test_a_published_stack_is_its_release_with_switches(name: str) -> None:
    alias = load_stack(name)
    stack = switched(alias.release, *SWITCHED[name])
    assert {each.key for each in release_changes(alias)} == {
        each.partition("=")[0] for each in SWITCHED[name]
    }
    told = {"name", "release", "alike", "title", "date", "source"}
    assert stack.model_dump(exclude={*told, "fp8"}) == alias.model_dump(exclude={*told, "fp8"})


def test_a_published_stack_without_switches_is_its_release() -> None:
    plain = [each for each in map(load_stack, list_stacks()) if each.release]
    same = {each.name for each in plain if not release_changes(each)}
    assert same >= {"megatron-core-2024", "megatron-core-2026", "torchtitan-2024-12"}


@pytest.mark.parametrize("name", RELEASES)
def test_each_value_of_each_switch_can_be_set(name: str) -> None:
    for switch in load_stack(name).switches:
        key, _, values = switch.partition(" ")
        beside = ("cuda_graphs=layers",) if key == "cuda_graph_impl" else ()
        found = [switched(name, *beside, f"stack.{key}={each}") for each in numbers(values)]
        assert len(found) == len({str(each.model_dump()) for each in found})
        with pytest.raises(ProfileError, match=f"^--set stack.{key}=none of these"):
            switched(name, f"stack.{key}=none of these")


def numbers(values: str) -> list[str]:
    """Return the values of a switch, numbers in the place of words in capitals."""
    return ["1.0", "1.25"] if values == "FACTOR" else values.split("|")
