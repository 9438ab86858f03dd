"""Exchanges with ranks of experts beside what another microbatch computes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    Attention,
    Dispatcher,
    ExpertOverlap,
    Kernels,
    Precision,
    Recompute,
    RecomputeModule,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    CostModel,
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.account import critical_path, rank_passes
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import (
    Category,
    LayerNodes,
    layer_nodes,
    overlap_limit_ps,
    overlap_saving_ps,
)
from meshwright.simulator.engine import simulate_folded, simulate_unfolded
from meshwright.simulator.layout import Mesh
from meshwright.simulator.memory import memory_timeline
from meshwright.simulator.model import EXPERT_LAYER
from meshwright.simulator.step import build_step

CLUSTER, BUSY_HOST = load_cluster("dgx-h100"), load_stack("megatron-core")
STACK = BUSY_HOST.model_copy(update={"host_issue_pass_s": 0.0, "host_issue_expert_s": 0.0})
JOB = TrainingJob(model=load_model("qwen3-30b-a3b"), global_batch_size=64, seq_len=4096)
ALONE = ResolvedPlan(
    dp=16, ep=16, zero_stage=1, attention=Attention.FLASH, stages=(48,), schedule="1f1b"
)
PIPELINE = replace(
    ALONE,
    pp=2,
    dp=8,
    ep=8,
    num_virtual_stages=3,
    stages=(7, 8, 8, 8, 8, 9),
    schedule="interleaved",
)
MICROBATCHES, DELAYED = ExpertOverlap.MICROBATCHES, ExpertOverlap.DELAYED_WEIGHTS
PLANS = [
    pytest.param(replace(plan, expert_overlap=overlap), id=f"{name}, {overlap}")
    for name, plan in (("alone", ALONE), ("pipeline", PIPELINE))
    for overlap in ExpertOverlap
]
WHOLE = STACK.model_copy(update={"ep_overlap_fraction": 1.0})


def ran(plan: ResolvedPlan, stack: object = STACK) -> StepResult:
    return simulate(JOB, plan, CLUSTER, stack)  # type: ignore[arg-type]


layers = st.lists(st.builds(LayerNodes, *[st.integers(0, 50)] * 10), min_size=1, max_size=5)


@given(forward=layers, backward=layers)
def test_no_more_is_hidden_than_is_exchanged(
    forward: Sequence[LayerNodes], backward: Sequence[LayerNodes]
) -> None:
    exchanged = sum(each.forward_exchange_ps for each in forward)
    exchanged += sum(each.backward_exchange_ps for each in backward)
    computed = sum(each.forward_ps for each in forward) + sum(each.backward_ps for each in backward)
    computed -= exchanged
    # One stream computes and one exchanges: a pair takes as long as the longer one at least.
    assert 0 <= overlap_saving_ps(forward, backward) <= min(exchanged, computed)


parts = st.lists(st.tuples(*[st.integers(0, 50)] * 4), max_size=3)


@given(parts, parts)
def test_a_pass_with_nothing_beside_it_hides_nothing(
    forward: Sequence[tuple[int, ...]], backward: Sequence[tuple[int, ...]]
) -> None:
    """Each part waits for the one before it of its own pass; no weights are delayed."""
    there = [LayerNodes(*each) for each in forward]
    back = [
        LayerNodes(back=came, expert_inputs=made, returned=returned, inputs=inputs)
        for came, made, returned, inputs in backward
    ]
    assert overlap_saving_ps(there, []) == overlap_saving_ps([], back) == 0


@given(count=st.integers(1, 6), short=st.integers(0, 9), long=st.integers(10, 99))
def test_exchanges_shorter_than_what_is_beside_them_cost_nothing(
    count: int, short: int, long: int
) -> None:
    layer = LayerNodes(long, short, long, short, short, 2 * long, 0, short, 2 * long, 0)
    assert overlap_saving_ps([layer] * count, [layer] * count) == 4 * count * short


def test_exchanges_longer_than_all_beside_them_hide_what_that_takes() -> None:
    layer = LayerNodes(before=1, dispatch=50, experts=1, combine=50)
    back = LayerNodes(back=50, expert_inputs=2, returned=50, inputs=2)
    assert overlap_saving_ps([layer], [back]) == 1 + 1 + 2 + 2


def test_a_layer_is_cut_in_parts_that_add_up() -> None:
    costs = CostModel(CLUSTER, STACK, 16)
    shape = BlockShape.of(JOB, ALONE, STACK)
    cost = costs.block_cost(shape, EXPERT_LAYER)
    for delays in (False, True):
        nodes = layer_nodes(costs, shape, EXPERT_LAYER, delays=delays)
        assert nodes.forward_ps == cost.forward.time_ps
        assert nodes.backward_ps == cost.backward.time_ps
        assert (nodes.expert_weights > 0) == (nodes.weights > 0) == delays
        assert min(nodes[:6]) > 0


@pytest.mark.parametrize("plan", PLANS)
def test_steps_are_shorter_by_what_is_hidden(plan: ResolvedPlan) -> None:
    off, part, whole = ran(replace(plan, expert_overlap=None)), ran(plan), ran(plan, WHOLE)
    assert whole.step_ps < part.step_ps < off.step_ps
    for result in (part, whole):
        shown = {key: value for key, value in result.breakdown_ps.items() if value < 0}
        assert shown == {}
        assert sum(result.breakdown_ps.values()) == pytest.approx(result.step_ps, abs=99)
        path = critical_path(build_step(JOB, result.plan, costs_of(result)), result.times)  # type: ignore[arg-type]
        assert sum(path.time_ps.values()) == result.step_ps
    same = set(Category) - {Category.EP_COMM, Category.BUBBLE, Category.STEP_OVERHEAD}
    same -= {Category.DP_COMM}
    assert all(off.breakdown_ps[each] == part.breakdown_ps[each] for each in same)


def test_nothing_hides_what_the_host_takes_to_start_two_passes() -> None:
    plan = replace(PIPELINE, expert_overlap=MICROBATCHES)
    busy = BUSY_HOST.model_copy(update={"host_issue_expert_s": 0.2e-3})
    alone, beside = ran(replace(plan, expert_overlap=None), busy), ran(plan, busy)
    shape = BlockShape.of(JOB, plan, busy)
    nodes = layer_nodes(CostModel(CLUSTER, busy, 16), shape, EXPERT_LAYER, delays=False)
    # 16 experts a rank: three passes of 1.2 ms, and 0.2 ms for each expert.
    assert nodes.forward_issue + nodes.backward_issue == 3 * (1200 + 16 * 200) * 10**6
    again = BlockShape.of(JOB, replace(plan, recompute=Recompute.FULL), busy)
    redone = layer_nodes(CostModel(CLUSTER, busy, 16), again, EXPERT_LAYER, delays=False)
    assert redone.backward_issue == nodes.backward_issue + nodes.forward_issue
    assert overlap_limit_ps([nodes], [nodes]) < overlap_saving_ps([nodes], [nodes])
    # Nothing is left to win, and a pass more runs ahead.
    assert beside.step_ps >= alone.step_ps > ran(plan).step_ps
    issue_ps = 24 * 8 * (nodes.forward_issue + nodes.backward_issue)
    assert beside.step_ps > issue_ps


def costs_of(result: StepResult) -> CostModel:
    return CostModel(CLUSTER, result.stack, result.plan.world_size)


@pytest.mark.parametrize("plan", PLANS)
def test_a_pair_ends_together_and_every_pass_takes_its_time(plan: ResolvedPlan) -> None:
    result = ran(plan)
    assert result.work is not None
    assert result.times is not None
    for pp_rank, rank in enumerate(result.times.ranks):
        assert rank.pairs
        for first in rank.pairs:
            assert rank.ends_ps[first] == rank.starts_ps[first + 1]
            assert all(result.work.pass_saving_ps(pp_rank, each) > 0 for each in (first, first + 1))
        assert result.work.pass_saving_ps(pp_rank, 0) == 0
        for each in rank_passes(result.work.ranks[pp_rank], rank):
            assert each.parts[-1].end_ps <= each.end_ps


def test_folded_and_unfolded_runs_agree() -> None:
    job = replace(JOB, global_batch_size=16)
    plan = replace(PIPELINE, dp=2, ep=2, tp=1, expert_overlap=MICROBATCHES)
    work = build_step(job, plan, CostModel(CLUSTER, STACK, plan.world_size)).work
    mesh = Mesh.of(plan, CLUSTER.devices_per_node)
    assert simulate_folded(work).step_ps == simulate_unfolded(work, mesh).step_ps


def test_weights_delayed_hide_no_less() -> None:
    sent_far = replace(ALONE, dispatcher=Dispatcher.ALL_TO_ALL)
    later, plain = (ran(replace(sent_far, expert_overlap=each)) for each in (DELAYED, MICROBATCHES))
    assert later.step_ps < plain.step_ps


@pytest.mark.parametrize("plan", PLANS)
def test_what_one_pass_keeps_comes_as_the_other_frees_it(plan: ResolvedPlan) -> None:
    built = build_step(JOB, plan, CostModel(CLUSTER, STACK, plan.world_size))
    times = simulate_folded(built.work)
    for memory, rank in zip(built.memory, times.ranks, strict=True):
        events = memory_timeline(memory, list(rank.passes()), rank.update_start_ps, rank.pairs)
        levels = [each.dynamic_bytes for each in events]
        for first in rank.pairs:
            made, gone = (rank.actions[first + each].virtual_stage for each in (0, 1))
            stages = memory.virtual_stages
            before = levels[2 * first - 1]
            after = before + stages[made].saved_bytes - stages[gone].saved_bytes
            assert levels[2 * first + 3] == after
            assert levels[2 * first] >= max(before, after)
            assert levels[2 * first] < before + stages[made].saved_bytes + max(
                stages[made].forward_workspace_bytes, stages[gone].backward_workspace_bytes
            )


def refused(plan: ResolvedPlan, job: TrainingJob = JOB) -> str:
    with pytest.raises(PlanError) as error:
        simulate(job, plan, CLUSTER, STACK)
    return str(error.value)


def test_what_megatron_core_does_not_run_is_refused() -> None:
    plan = replace(ALONE, expert_overlap=MICROBATCHES)
    assert "ep=1" in refused(replace(plan, ep=1))
    assert "recompute=full" in refused(replace(plan, recompute=Recompute.FULL))
    again = replace(plan, recompute=Recompute.SELECTIVE, recompute_modules=(RecomputeModule.MOE,))
    assert "recompute_modules=moe" in refused(again)
    assert "precision=fp32" in refused(plan, replace(JOB, precision=Precision.FP32))
    assert "schedule=gpipe" in refused(replace(plan, schedule="gpipe"))
    stages = replace(plan, pp=2, dp=8, ep=8, stages=(24, 24))
    assert "need virtual stages" in refused(stages)
    eager = STACK.model_copy(update={"kernels": Kernels.EAGER})
    with pytest.raises(PlanError, match="does not go with kernels=eager"):
        simulate(JOB, plan, CLUSTER, eager)
    other = load_stack("torchtitan@0.2")
    with pytest.raises(PlanError, match="expert_overlap=microbatches is not offered"):
        simulate(JOB, replace(plan, zero_stage=3), CLUSTER, other)


# Step times in seconds without and with overlap, in runs that differ in it alone: skills of
# Megatron-Bridge (067f987df, expert-parallel-overlap), Megatron-MoE-ModelZoo (e865051).
@pytest.mark.parametrize(
    ("dispatcher", "overlap", "off_s", "on_s"),
    [
        (Dispatcher.HYBRIDEP, MICROBATCHES, 24.7138, 20.992),
        (Dispatcher.ALL_TO_ALL, MICROBATCHES, 41.25, 31.31),
        (Dispatcher.ALL_TO_ALL, DELAYED, 41.25, 31.20),
    ],
)
def test_published_pairs_save_what_is_predicted(
    dispatcher: Dispatcher, overlap: ExpertOverlap, off_s: float, on_s: float
) -> None:
    job = replace(JOB, global_batch_size=1024)
    plan = replace(ALONE, dispatcher=dispatcher, gradient_precision=Precision.BF16)
    off, on = (
        simulate(job, replace(plan, expert_overlap=each), CLUSTER, STACK).step_time_s
        for each in (None, overlap)
    )
    assert on / off == pytest.approx(on_s / off_s, abs=0.03)


def test_what_no_pair_goes_with_is_refused_by_name() -> None:
    eager = STACK.model_copy(update={"kernels": Kernels.EAGER})
    refused = [
        (replace(ALONE, zero_stage=3), STACK, "zero_stage=3"),
        (ALONE, eager, "kernels=eager"),
    ]
    for plan, stack, said in refused:
        beside = replace(plan, expert_overlap=ExpertOverlap.MICROBATCHES)
        with pytest.raises(PlanError, match=f"does not go with {said}; allowed"):
            simulate(JOB, beside, CLUSTER, stack)
