"""The space of layouts against loops over everything, and the rules at their limits."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from meshwright.hwprofiles import (
    GIBI,
    Attention,
    ContextParallel,
    Precision,
    Recompute,
    RecomputeMethod,
    StackProfile,
    StageSplit,
    load_cluster,
    load_stack,
)
from meshwright.planner import SpaceLimits, enumerate_space
from meshwright.planner.search.varied import Held, SearchedFields
from meshwright.planner.space import SWITCHES
from meshwright.planner.space.rules import Candidates, fits_memory
from meshwright.planner.space.switches import Place, settings
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.layout import Axis, divides

STACK = load_stack("megatron-core")
SWAPS = ContextParallel.HYBRID_RING
# One block of choices each: the others are products of what divides.
NARROW = SpaceLimits(
    recompute=(Recompute.NONE,),
    sequence_parallel=(False,),
    zero_stage=(1,),
    attention=(Attention.FLASH,),
    stages=(StageSplit.EVEN,),
    **dict.fromkeys(SWITCHES, (None,)),
)


def model_of(num_layers: int = 6, num_kv_heads: int = 12) -> ModelSpec:
    return ModelSpec(
        name="small",
        num_layers=num_layers,
        hidden_size=48,
        num_heads=12,
        num_kv_heads=num_kv_heads,
        vocab_size=512,
        seq_len=16,
    )


def plans_of(
    model: ModelSpec,
    batch: int,
    num_gpus: int,
    stack: StackProfile = STACK,
    limits: SpaceLimits = NARROW,
) -> set[tuple[int, ...]]:
    job = TrainingJob(model=model, global_batch_size=batch, seq_len=16)
    space = enumerate_space(job, stack, num_gpus, limits)
    plans = [space.plan(index) for index in range(len(space))]
    found = {key_of(plan) for plan in plans}
    assert len(found) == len(plans)
    return found


def key_of(plan: ResolvedPlan) -> tuple[int, ...]:
    named = ("gpipe", "1f1b", "interleaved").index(plan.schedule)
    return (plan.tp, plan.pp, plan.dp, plan.num_virtual_stages, plan.microbatch_size, named)


# Of each runtime: the schedules with one stage a rank that take so many microbatches, and whether
# the interleaved one does.
TAKEN: dict[str, Callable[[int, int], tuple[tuple[int, ...], bool]]] = {
    "megatron-lm-2021": lambda pp, count: ((0, 1), count % pp == 0),
    "megatron-core": lambda pp, count: ((0, 1), count >= pp),
    "torchtitan": lambda pp, count: (
        (0, 1) if count >= pp else (0,),
        count % max(1, count // pp) == 0,
    ),
}


def is_even(num_layers: int, num_stages: int) -> bool:
    return not all((num_layers + ends) % num_stages for ends in (0, 2))


def by_loops(
    model: ModelSpec,
    batch: int,
    num_gpus: int,
    stack: str = "megatron-core",
    *,
    asks_for_uneven: bool = False,
) -> set[tuple[int, ...]]:
    """Walk all numbers up to the largest; layers, heads, ranks and sequences must come out even.

    Layers that never do may be divided into any number of virtual stages, and where it is asked.
    """
    found = set()
    degrees = range(1, num_gpus + 1)
    pipelines = (pp for pp in degrees[1:] if num_gpus % pp == 0)
    numbers = [pp * vpp for pp in pipelines for vpp in range(2, model.num_layers // pp + 1)]
    may_be_uneven = asks_for_uneven or not any(is_even(model.num_layers, each) for each in numbers)
    for tp, pp, dp, vpp in product(degrees, degrees, degrees, range(1, model.num_layers + 1)):
        if tp * pp * dp != num_gpus or batch % dp or pp * vpp > model.num_layers:
            continue
        if model.num_heads % tp or (model.num_kv_heads % tp and tp % model.num_kv_heads):
            continue
        if vpp > 1 and (pp == 1 or not (may_be_uneven or is_even(model.num_layers, pp * vpp))):
            continue
        for size in range(1, batch // dp + 1):
            if (batch // dp) % size:
                continue
            plain, interleaves = TAKEN[stack](pp, batch // dp // size)
            if pp == 1:  # without a pipeline the schedules are one
                found.add((tp, pp, dp, vpp, size, 1))
            elif vpp == 1:
                found |= {(tp, pp, dp, vpp, size, named) for named in plain}
            elif interleaves:
                found.add((tp, pp, dp, vpp, size, 2))
    return found


@pytest.mark.parametrize("stack", sorted(TAKEN))
@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "batch", "num_gpus"),
    [(6, 12, 8, 12), (6, 2, 18, 12), (10, 4, 16, 8), (5, 12, 6, 6), (7, 3, 4, 4)],
)
def test_a_space_is_all_that_comes_out_even(
    num_layers: int, num_kv_heads: int, batch: int, num_gpus: int, stack: str
) -> None:
    model = model_of(num_layers, num_kv_heads)
    found = plans_of(model, batch, num_gpus, load_stack(stack))
    assert found == by_loops(model, batch, num_gpus, stack)


@pytest.mark.parametrize("most", [1, 2, 9])
def test_a_largest_number_of_virtual_stages_asks_for_unequal_ones(most: int) -> None:
    model, limits = model_of(10, 4), NARROW.pinned(max_virtual_stages=most)
    found = plans_of(model, 16, 8, limits=limits)
    every = by_loops(model, 16, 8, asks_for_uneven=True)
    assert found == {each for each in every if each[3] <= most}
    assert found == plans_of(
        model, 16, 8, limits=NARROW.pinned(num_virtual_stages=(*range(most + 1),))
    )
    assert (found <= plans_of(model, 16, 8)) == (most == 1)


@pytest.mark.parametrize(
    ("stack", "limits", "is_told"),
    [
        ("megatron-core", {}, True),
        ("torchtitan", {}, True),
        ("megatron-core", {"max_virtual_stages": 3}, False),
        ("megatron-core", {"num_virtual_stages": (1,)}, False),
        ("megatron-core", {"schedule": ("1f1b",)}, False),
        ("megatron-core", {"max_pp": 1}, False),
        ("megatron-core", {"expert_overlap": (None, "microbatches")}, False),
        ("fsdp", {}, False),
        ("deepspeed", {}, False),
    ],
)
def test_unequal_virtual_stages_are_told_of_where_they_are_left_out(
    stack: str, limits: dict[str, Any], *, is_told: bool
) -> None:
    job = TrainingJob(model=model_of(10, 4), global_batch_size=16, seq_len=16)
    pins = SpaceLimits(**limits)
    space = enumerate_space(job, load_stack(stack), 8, NARROW)
    varied = SearchedFields.of(space, pins, space.column)
    told = [each for each in varied.left_out if each.name == "num_virtual_stages"]
    assert told == [Held("num_virtual_stages", "unequal", "ask with --max-vpp")] * is_told


def test_unequal_virtual_stages_are_told_of_where_there_are_any() -> None:
    for num_layers, is_told in ((6, False), (7, False), (14, True)):  # 6 and 6 + 2 by 4; never
        job = TrainingJob(model=model_of(num_layers), global_batch_size=8, seq_len=16)
        space = enumerate_space(job, STACK, 4, NARROW)
        varied = SearchedFields.of(space, SpaceLimits(), space.column)
        assert ("num_virtual_stages" in {each.name for each in varied.left_out}) == is_told


def test_key_value_heads_are_split_or_repeated() -> None:
    for num_kv_heads, degrees in ((2, [1, 2, 4, 6, 12]), (3, [1, 3, 6, 12])):
        model = model_of(num_kv_heads=num_kv_heads)
        job = TrainingJob(model=model, global_batch_size=1, seq_len=16)
        assert [tp for tp in range(1, 13) if divides(job, Axis.TP, tp)] == degrees


def test_what_just_fits_is_kept() -> None:
    job = TrainingJob(model=model_of(), global_batch_size=4, seq_len=16)
    space = enumerate_space(job, STACK, 1, NARROW)
    sizes = np.resize(np.array([GIBI - 1, GIBI, GIBI + 1]), len(space))
    (mask,) = fits_memory(Candidates(space, load_cluster("dgx-a100"), sizes, GIBI)).values()
    assert mask.tolist() == [size > GIBI for size in sizes.tolist()]
    assert mask.any()


@pytest.mark.parametrize(
    ("seq_len", "stack", "limits", "degrees"),
    [
        (4096, "megatron-core", SpaceLimits(), {1}),
        (4096, "megatron-core", SpaceLimits(max_cp=4), {1, 2, 4}),
        (4096, "megatron-core", SpaceLimits(cp_type=(ContextParallel.ALL_TO_ALL,)), {1, 2, 4, 8}),
        (8192, "megatron-core", SpaceLimits(), {1, 2, 4, 8}),
        (8192, "ddp", SpaceLimits(), {1}),
    ],
)
def test_long_sequences_are_cut_and_short_ones_if_asked(
    seq_len: int, stack: str, limits: SpaceLimits, degrees: set[int]
) -> None:
    job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=8, seq_len=seq_len)
    space = enumerate_space(job, load_stack(stack), 8, limits)
    assert set(space.column("cp").tolist()) == degrees
    assert set(space.column("dp_cp").tolist()) == {1, 2, 4, 8}


def test_experts_are_divided_among_all_ranks_of_a_stage() -> None:
    """Megatron-Core's expert ranks are of tp, cp and dp (`parallel_state`)."""
    model = load_model("mixtral-8x7b")
    job = TrainingJob(model=model, global_batch_size=8, seq_len=8192)
    for tp, cp in ((1, 8), (2, 2), (4, 1)):
        limits = SpaceLimits(tp=(tp,), cp=(cp,), pp=(1,))
        space = enumerate_space(job, STACK, 8, limits)
        assert set(space.column("ep").tolist()) == {1, 2, 4, 8}


@pytest.mark.parametrize("stack", ["fsdp", "torchtitan"])
def test_ranks_of_all_experts_are_slices_of_a_set_of_shards(stack: str) -> None:
    model = load_model("mixtral-8x7b")
    job = TrainingJob(model=model, global_batch_size=4, seq_len=512)
    limits = SpaceLimits(
        **dict.fromkeys(("tp", "pp", "microbatch_size"), (1,)), ep=(1, 2, 4), dp_shard=(1, 2, 4)
    )
    space = enumerate_space(job, load_stack(stack), 4, limits)
    plans = space.plans_without_stages(range(len(space)))
    slices = {(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4)}
    assert {(plan.ep, plan.num_shards) for plan in plans} == slices


@pytest.mark.parametrize(
    ("limits", "inner"),
    [
        ({}, {(1, None), (8, None)}),
        ({"cp_type": (SWAPS,)}, {(1, None), (8, 2), (8, 4), (8, 8)}),
        ({"cp_type": (SWAPS, None), "cp_inner": (1, 4)}, {(1, None), (8, None), (8, 1), (8, 4)}),
    ],
)
def test_rings_of_swaps_have_groups_of_every_size_where_they_are_asked_for(
    limits: dict[str, tuple[object, ...]], inner: set[tuple[int, int | None]]
) -> None:
    job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=8, seq_len=8192)
    cut = SpaceLimits(cp=(1, 8), attention=(Attention.FLASH,), **limits)
    space = enumerate_space(job, load_stack("megatron-core"), 8, cut)
    plans = space.plans_without_stages(range(len(space)))
    assert {(plan.cp, plan.cp_inner) for plan in plans} == inner


@pytest.mark.parametrize(
    ("model", "stack", "num_gpus", "batch"),
    [
        ("gpt2", "megatron-core", 4, 36),
        ("gpt2", "torchtitan", 9, 9),
        ("gpt2", "torchtitan", 16, 16),
        ("gpt2", "deepspeed", 4, 16),
        ("gpt2", "ddp", 4, 16),
        ("mixtral-8x7b", "megatron-core", 4, 4),
    ],
)
def test_no_layout_is_in_a_space_twice(model: str, stack: str, num_gpus: int, batch: int) -> None:
    """Devices and sequences are squares, whose root divides them once."""
    profile = load_stack(stack)
    job = TrainingJob(
        model=load_model(model),
        global_batch_size=batch,
        seq_len=1024,
        precision=profile.precisions[0],
    )
    space = enumerate_space(job, profile, num_gpus, SpaceLimits())
    assert len({space.plan(index) for index in range(len(space))}) == len(space) > 0


def test_free_switches_take_every_value_that_has_an_effect() -> None:
    """Of 4 ranks: shards over 4, 2 or 1, freed or not, reduced at one of two times.

    Numbers stay in the formats of the framework unless others are asked for.
    """
    job = TrainingJob(model=model_of(), global_batch_size=32, seq_len=16, precision=Precision.BF16)
    place = Place(pp=1, cp=1, dp=4, zero_stage=3, has_several=1, is_lacking=0)
    usual = settings(job, load_stack("fsdp"), place, {})
    assert len(usual) == len({tuple(each.items()) for each in usual}) == 3 * 2 * 2
    formats = {"reduce_precision": (None, Precision.FP32)}
    found = settings(job, load_stack("fsdp"), place, formats)
    assert len(found) == len({tuple(each.items()) for each in found}) == 2 * len(usual)
    assert {each["sync_each_microbatch"] for each in found} == {None, False}
    alone = settings(job, load_stack("fsdp"), place._replace(has_several=0), {})
    assert {each["sync_each_microbatch"] for each in alone} == {None}


@pytest.mark.parametrize(("batch", "found"), [(4, {None}), (8, {None, False})])
def test_one_microbatch_is_reduced_at_one_time(batch: int, found: set[bool | None]) -> None:
    job = TrainingJob(model=model_of(), global_batch_size=batch, seq_len=16)
    limits = SpaceLimits(dp=(4,), microbatch_size=(1,))
    space = enumerate_space(job, load_stack("fsdp"), 4, limits)
    plans = space.plans_without_stages(range(len(space)))
    assert {plan.sync_each_microbatch for plan in plans} == found


@pytest.mark.parametrize(("stack", "is_told"), [("megatron-core", True), ("ddp", False)])
def test_an_axis_that_a_stack_lacks_is_not_told_of(stack: str, *, is_told: bool) -> None:
    job = TrainingJob(model=model_of(), global_batch_size=8, seq_len=16)
    space = enumerate_space(job, load_stack(stack), 4, SpaceLimits())
    varied = SearchedFields.of(space, SpaceLimits(), space.column)
    told = {*varied.searched, *(each.name for each in varied.held)}
    assert ("cp" in told) == is_told
    assert "micro_batch" in told or "microbatch_size" in told


@pytest.mark.parametrize(
    ("stack", "asked", "left_out"),
    [("megatron-core", None, [3]), ("megatron-core", (3,), []), ("torchtitan", None, [])],
)
def test_values_that_have_to_be_asked_for_are_told_of(
    stack: str, asked: tuple[int, ...] | None, left_out: list[int]
) -> None:
    job = TrainingJob(model=model_of(), global_batch_size=8, seq_len=16)
    limits = SpaceLimits(zero_stage=asked)
    space = enumerate_space(job, load_stack(stack), 4, limits)
    searched = {*space.column("zero_stage").tolist()}
    varied = SearchedFields.of(space, limits, space.column)
    assert [each.value for each in varied.left_out] == left_out
    assert not searched & {*left_out}


@pytest.mark.parametrize("most", [1, 3, 8])
def test_numbers_of_layers_that_run_again_are_tried_up_to_the_one_asked_for(most: int) -> None:
    job = TrainingJob(model=model_of(), global_batch_size=4, seq_len=16)
    both = Recompute.NONE, Recompute.FULL
    full = NARROW.pinned(recompute=both, recompute_layers=None)
    known = enumerate_space(job, STACK, 4, full)
    space = enumerate_space(job, STACK, 4, full.pinned(max_recompute_layers=most))
    plans = {space.plan(index) for index in range(len(space))}
    expected = set()
    for plan in map(known.plan, range(len(known))):
        expected.add(plan)
        if plan.recompute is Recompute.FULL:
            numbers = range(1, min(most + 1, max(plan.stages)))
            block = replace(plan, recompute_layers=1, recompute_method=RecomputeMethod.BLOCK)
            expected |= {replace(block, recompute_layers=number) for number in numbers}
    assert plans == expected
    assert len(space) == len(plans) > len(known)


def test_groups_of_microbatches_are_tried_where_the_schedule_takes_them() -> None:
    job = TrainingJob(model=model_of(), global_batch_size=20, seq_len=16)
    limits = NARROW.pinned(pp=(2,), tp=(1,), microbatch_size=(1,), microbatch_group_size=(None, 3))
    known = enumerate_space(job, STACK, 2, limits.pinned(microbatch_group_size=(None,)))
    space = enumerate_space(job, STACK, 2, limits)
    # Of 20 microbatches in threes the last group has two, as many as ranks.
    single = {known.plan(index) for index in range(len(known))}
    interleaved = (plan for plan in single if plan.num_virtual_stages > 1)
    grouped = {replace(plan, microbatch_group_size=3) for plan in interleaved}
    assert grouped
    assert {space.plan(index) for index in range(len(space))} == single | grouped
