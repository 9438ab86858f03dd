"""No switch that `simulate` has beats the proven best of a search: each is tried at every value."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from meshwright.hwprofiles import Offload, Precision, StageSplit, load_cluster, load_stack
from meshwright.planner import SpaceLimits
from meshwright.planner.search import search
from meshwright.planner.space.switches import askable_values, divisors
from meshwright.simulator import (
    CostModel,
    ParallelPlan,
    PlanError,
    TrainingJob,
    load_model,
    resolve_stages,
    simulate,
)
from meshwright.simulator.layout import PLAN_FIELDS

SEARCHES = {
    "torchtitan": ("llama3-70b", "dgx-h100", 32, 32, 8192),
    "torchtitan in two replicas": ("llama3-8b", "dgx-h100", 16, 64, 4096),
    "fsdp": ("gpt2-xl", "dgx-a100", 16, 64, 1024),
    "ddp": ("gpt2", "a100-4xhdr200", 16, 256, 1024),
    "deepspeed": ("gpt2-xl", "dgx-a100", 16, 64, 1024),
    "megatron-core": ("llama3-8b", "dgx-h100", 32, 64, 8192),
    "megatron-lm-2021": ("gpt2-xl", "dgx-a100", 16, 32, 1024),
}


def values(plan: ParallelPlan, job: TrainingJob) -> Iterator[ParallelPlan]:
    """Yield *plan* with every other value of each of its switches, formats in all pairs."""
    yields = {
        "dp_shard": divisors(plan.dp),
        "reshard_after_forward": (False, True),
        "sync_each_microbatch": (False, True),
        "find_unused": (False, True),
        "moment_precision": (None, *Precision),
        "offload": tuple(Offload),
        "sequence_parallel": (False, True),
        "zero_stage": range(4),
        "attention": PLAN_FIELDS["attention"].choices,
        "recompute": PLAN_FIELDS["recompute"].choices,
        "stages": {resolve_stages(job.model, job.seq_len, plan.num_stages, r) for r in StageSplit},
    }
    for name, others in yields.items():
        yield from (replace(plan, **{name: value}) for value in others)
    formats = (None, *Precision)
    for kept, reduced in product(formats, formats):
        yield replace(plan, gradient_precision=kept, reduce_precision=reduced)


@pytest.mark.parametrize("name", SEARCHES)
def test_no_switch_beats_the_proven_best(name: str) -> None:
    model, place, num_gpus, batch, seq_len = SEARCHES[name]
    cluster, stack = load_cluster(place), load_stack(name.split(" ", maxsplit=1)[0])
    precision = Precision.FP16 if name == "megatron-lm-2021" else Precision.BF16
    job = TrainingJob(
        model=load_model(model), global_batch_size=batch, seq_len=seq_len, precision=precision
    )
    asked = {
        each.name: known
        for each in PLAN_FIELDS.values()
        if len(known := askable_values(each, job, stack)) > 1
    }
    limits = SpaceLimits(**asked)
    found = search(job, cluster, stack, num_gpus, limits=limits, top=1)
    assert found.optimal
    (best,) = found.plans
    faster, tried, costs = [], 0, CostModel(cluster, stack, num_gpus)
    for plan in values(best.plan, job):
        try:
            step = simulate(job, plan, cluster, stack, costs=costs)
        except PlanError:  # not offered
            continue
        tried += 1
        if step.memory.fits and step.step_ps < best.step_ps:
            faster.append((step.step_ps / best.step_ps, plan))
    assert faster == []
    assert tried > 5
