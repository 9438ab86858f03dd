"""How many layers of a stage full recomputation runs again, and how many to a checkpoint."""

from dataclasses import replace

import pytest

from meshwright.hwprofiles import (
    Attention,
    Precision,
    Recompute,
    RecomputeMethod,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    ModelSpec,
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    hardware_flops,
    load_model,
    simulate,
)
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.layout import rank_stages, stack_refusal

BLOCK, UNIFORM, EVERY = RecomputeMethod
CLUSTER, STACK = load_cluster("dgx-h100"), load_stack("megatron-core")
GPT = load_model("gpt2")
assert isinstance(GPT, ModelSpec)
JOB = TrainingJob(model=GPT, global_batch_size=16, seq_len=1024, precision=Precision.BF16)
FULL = ResolvedPlan(
    pp=2, dp=2, recompute=Recompute.FULL, attention=Attention.FLASH, stages=(6, 6), zero_stage=1
)
NONE = replace(FULL, recompute=Recompute.NONE)


def again(number: int, method: RecomputeMethod = BLOCK, **fields: object) -> ResolvedPlan:
    return replace(FULL, recompute_layers=number, recompute_method=method, **fields)  # type: ignore[arg-type]


def ran(plan: ResolvedPlan) -> StepResult:
    return simulate(JOB, plan, CLUSTER, STACK)


def passes_of(plan: ResolvedPlan) -> list[tuple[str, int]]:
    return [tuple(each) for each in rank_stages(GPT, plan, 0)[-1].passes]


def test_a_block_is_the_first_layers_of_each_virtual_stage() -> None:
    kept = [("embedding", 1), ("layer", 2), ("kept layer", 4)]
    assert passes_of(again(2)) == kept
    assert passes_of(again(2, num_virtual_stages=2, stages=(3, 3, 3, 3))) == [
        ("layer", 2),
        ("kept layer", 1),
    ]
    assert passes_of(again(9)) == passes_of(FULL)


def test_uniform_checkpoints_hold_so_many_layers() -> None:
    assert passes_of(again(3, UNIFORM)) == [("embedding", 1), ("3-layer checkpoint", 2)]
    assert passes_of(again(1, UNIFORM)) == passes_of(FULL)


def test_every_second_layer_is_counted_through_the_virtual_stages_of_a_rank() -> None:
    kept, layer = ("kept layer", 1), ("layer", 1)
    assert passes_of(again(2, EVERY)) == [("embedding", 1), *([kept, layer] * 3)]
    # Its first virtual stage has three layers: the next one begins with an even one.
    assert passes_of(again(2, EVERY, num_virtual_stages=2, stages=(3, 3, 3, 3))) == [
        layer,
        kept,
        layer,
    ]
    assert passes_of(again(1, EVERY)) == passes_of(FULL)
    assert passes_of(again(7, EVERY)) == [("embedding", 1), ("kept layer", 6)]
    stage = rank_stages(GPT, again(3, EVERY), 1)[0]
    parts = stage.part(0, 2), stage.part(2, 7)
    assert [run for part in parts for run in part.passes] == [
        ("kept layer", 2),
        layer,
        ("kept layer", 2),
        layer,
        ("head", 1),
    ]


def test_torchtitan_runs_every_second_layer_again() -> None:
    """Half of what all layers recompute and save, where another layer beside is no matter."""
    stack, none = load_stack("torchtitan@0.2"), replace(NONE, zero_stage=3)
    plans = [
        none,
        *(
            replace(again(number, EVERY, zero_stage=3), attention=Attention.FLASH)
            for number in (6, 3, 2, 1)
        ),
    ]
    results = [simulate(JOB, plan, CLUSTER, stack) for plan in plans]
    times = [each.step_time_s for each in results]
    peaks = [each.memory.peak_bytes for each in results]
    assert times == sorted({*times})
    assert peaks == sorted(peaks, reverse=True)
    for stage in (
        stage for each in results for rank in each.work.ranks for stage in rank.virtual_stages
    ):
        units = [each.units for each in stage.values()]
        computed = [sum(unit.compute_ps for unit in each) for each in units]
        assert computed == [each.compute_ps for each in stage.values()]
    flops = [hardware_flops(JOB, plan, stack) for plan in plans]
    assert [each - flops[0] for each in flops[1:]] == [
        (flops[-1] - flops[0]) // number for number in (6, 3, 2, 1)
    ]
    full = simulate(JOB, replace(FULL, zero_stage=3), CLUSTER, stack)
    assert (times[-1], peaks[-1]) == (full.step_time_s, full.memory.peak_bytes)


def test_a_stage_cut_anywhere_repeats_the_same_layers() -> None:
    stage = rank_stages(GPT, again(2), 0)[0]
    parts = stage.part(0, 2), stage.part(2, 7)
    assert [run for part in parts for run in part.passes] == [
        ("embedding", 1),
        ("layer", 1),
        ("layer", 1),
        ("kept layer", 4),
    ]


def test_a_checkpoint_keeps_its_input_alone_and_makes_all_its_layers_again() -> None:
    shape, table = BlockShape.of(JOB, FULL, STACK), BlockTable()
    stage = rank_stages(GPT, again(3, UNIFORM), 1)[0]
    together, kept = stage.passes[0].kind, rank_stages(GPT, again(1), 1)[0].passes[1].kind
    one, three = table.memory(shape, "layer"), table.memory(shape, together)
    plain = table.memory(shape, kept)
    assert three.saved == one.saved == 2 * 1024 * GPT.hidden_size
    assert three.backward - one.backward == 2 * plain.saved
    assert table.operators(shape, together).backward == 3 * table.operators(shape, "layer").backward


def test_time_and_memory_lie_between_none_and_all() -> None:
    none, all_again = ran(NONE), ran(FULL)
    by_number = [ran(again(number)) for number in (1, 3, 6)]
    times = [each.step_time_s for each in (none, *by_number)]
    peaks = [each.memory.peak_bytes for each in (none, *by_number)]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)
    assert (times[-1], peaks[-1]) == (all_again.step_time_s, all_again.memory.peak_bytes)
    together = ran(again(3, UNIFORM))
    assert together.step_time_s == all_again.step_time_s
    flops = [hardware_flops(JOB, plan, STACK) for plan in (NONE, again(3), again(6), FULL)]
    assert 2 * (flops[1] - flops[0]) == flops[2] - flops[0]
    assert flops[2] == flops[3]


@pytest.mark.parametrize(
    ("plan", "stack", "said"),
    [
        (again(4, UNIFORM), "megatron-core", "does not divide a stage of 6 layers"),
        (again(2), "megatron-lm-2022", "recompute_method=block is not offered by stack"),
        (again(1, UNIFORM), "torchtitan@0.2", "recompute_method=uniform is not offered by stack"),
        (again(2, EVERY), "megatron-core", "recompute_method=every is not offered by stack"),
        (again(2, EVERY), "torchtitan-2026-08", "allowed: leave recompute_layers out"),
    ],
)
def test_layers_that_cannot_run_again_are_refused_by_name(
    plan: ResolvedPlan, stack: str, said: str
) -> None:
    refusal = stack_refusal(JOB, plan, load_stack(stack))
    assert refusal is not None
    assert said in refusal


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"recompute_layers": 2, "recompute": Recompute.SELECTIVE}, "allowed: full"),
        ({"recompute_layers": 0}, "must be >= 1"),
        ({"recompute_method": UNIFORM}, "needs recompute_layers"),
    ],
)
def test_a_number_of_layers_goes_with_full_recomputation(
    fields: dict[str, object], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        replace(FULL, **fields)  # type: ignore[arg-type]
