"""The ledger of a step against what the engine notes: each collective as often, and as long."""

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.hwprofiles import Attention, CollectiveOp, StageSplit, load_cluster, load_stack
from meshwright.simulator import CostModel, ResolvedPlan, TrainingJob, load_model, simulate
from meshwright.simulator.engine import SpanKind, simulate_folded
from meshwright.simulator.layout import resolve_stages
from meshwright.simulator.ledger import StepPoint, StepSetting, price, rank_ledger
from meshwright.simulator.step import build_step

DGX = load_cluster("dgx-h100")
PLANS = {
    "buckets": ("ddp", ResolvedPlan(dp=8)),
    "unused weights": ("ddp", ResolvedPlan(dp=8, find_unused=True)),
    "each microbatch": ("ddp", ResolvedPlan(dp=8, sync_each_microbatch=True)),
    "in passes": ("megatron-core", ResolvedPlan(tp=2, pp=2, dp=8, zero_stage=1)),
    "at the end": ("megatron-lm-2022", ResolvedPlan(tp=2, pp=2, dp=4, sequence_parallel=True)),
    "sharded gradients": ("deepspeed", ResolvedPlan(dp=8, zero_stage=2)),
    "units": ("torchtitan@0.2", ResolvedPlan(dp=8, zero_stage=3)),
    "units of a pipeline": ("torchtitan@0.2", ResolvedPlan(pp=2, dp=8, zero_stage=3)),
    "replicas of shards": ("torchtitan@0.2", ResolvedPlan(dp=8, dp_shard=2, zero_stage=3)),
    "owners": ("zero-broadcast", ResolvedPlan(dp=8, zero_stage=3)),
    "interleaved units": (
        "torchtitan@0.2",
        ResolvedPlan(pp=2, dp=4, zero_stage=3, num_virtual_stages=3, schedule="interleaved"),
    ),
    "refetches": (  # of more virtual stages a rank than stay gathered
        "torchtitan@0.2",
        ResolvedPlan(pp=2, dp=4, zero_stage=3, num_virtual_stages=5, schedule="interleaved"),
    ),
    "refetches of what goes after forward": (
        "torchtitan@0.2",
        ResolvedPlan(
            pp=2,
            dp=4,
            zero_stage=3,
            num_virtual_stages=5,
            schedule="interleaved",
            reshard_after_forward=True,
        ),
    ),
}
KINDS = {StepPoint.GATHER: SpanKind.PARAMETER_GATHER, StepPoint.REDUCE: SpanKind.GRADIENT_REDUCTION}
CLOSING = {
    SpanKind.TENSOR_SUM: StepPoint.SUMS,
    SpanKind.SHARED_EMBEDDING: StepPoint.TIED_TABLE,
    SpanKind.GRADIENT_NORM: StepPoint.NORM,
    SpanKind.PARAMETER_GATHER: StepPoint.UPDATED,
}


def plan_of(name: str) -> tuple[TrainingJob, ResolvedPlan]:
    stack_name, plan = PLANS[name]
    stack, model = load_stack(stack_name), load_model("gpt2")
    job = TrainingJob(
        model=model, global_batch_size=4 * plan.dp, seq_len=1024, precision=stack.precisions[0]
    )
    stages = resolve_stages(model, 1024, plan.num_stages, StageSplit.BALANCED)
    attention = Attention.FLASH if stack.attention is Attention.FLASH else stack.attention
    return job, replace(plan, stages=stages, attention=attention)


@pytest.mark.parametrize("name", sorted(PLANS))
def test_the_engine_runs_each_collective_as_often_and_as_long_as_the_ledger_says(name: str) -> None:
    job, plan = plan_of(name)
    stack = load_stack(PLANS[name][0])
    costs = CostModel(DGX, stack, plan.world_size)
    simulate(job, plan, DGX, stack)  # refuses what can never run
    work = build_step(job, plan, costs).work._replace(shared_port=False)  # nothing pauses
    setting = StepSetting.of(job, plan, stack, DGX.devices_per_node)
    # All ranks wait for the one that sums the most norms.
    sums = [rank_ledger(setting, rank).at(StepPoint.NORM).collectives for rank in range(plan.pp)]
    norm_ps = max(price(costs, each).time_ps for each in sums)
    for pp_rank, rank in enumerate(simulate_folded(work).ranks):
        ledger = rank_ledger(setting, pp_rank)
        prices = {entry.moment: price(costs, entry.collectives).time_ps for entry in ledger.closing}
        prices[StepPoint.NORM] = norm_ps
        calls, times = Counter[SpanKind](), Counter[SpanKind]()
        for entries in ledger.virtual_stages:
            for entry in entries:
                time_ps = price(costs, entry.collectives).time_ps
                calls[KINDS[entry.moment]] += entry.num_times * (time_ps > 0)
                times[KINDS[entry.moment]] += entry.num_times * time_ps
        calls[SpanKind.GRADIENT_REDUCTION] += prices[StepPoint.PASSES_DONE] > 0
        times[SpanKind.GRADIENT_REDUCTION] += prices[StepPoint.PASSES_DONE]
        assert sum(calls.values()) > 0
        assert Counter(span.kind for span in rank.collectives) == +calls
        ran = Counter[SpanKind]()
        for span in rank.collectives:
            ran[span.kind] += span.end_ps - span.start_ps
        assert ran == +times
        closed = {span.kind: span.end_ps - span.start_ps for span in rank.closing}
        for kind, moment in CLOSING.items():
            assert closed.get(kind, 0) == prices[moment]


@pytest.mark.parametrize("name", sorted(PLANS))
def test_shards_on_the_wire_are_of_one_size(name: str) -> None:
    """No size of this model has a factor of 5: what a number of ranks does not divide is filled."""
    job, plan = plan_of(name)
    plan = replace(plan, dp=5 * plan.dp, dp_shard=plan.dp_shard and 5 * plan.dp_shard)
    job = replace(job, global_batch_size=5 * job.global_batch_size)
    setting = StepSetting.of(job, plan, load_stack(PLANS[name][0]))
    for entry in rank_ledger(setting, 0).entries:
        for each in entry.collectives:
            assert each.padding_bytes >= 0
            if each.op in (CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_GATHER):
                assert (each.size_bytes + each.padding_bytes) % each.span.num_ranks == 0
                assert each.padding_bytes < 4 * each.span.num_ranks
