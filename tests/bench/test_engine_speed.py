"""How fast the engine is: one representative a stage, and every rank of a large world."""

import resource
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.hwprofiles import MEBI, Precision, Recompute, load_cluster, load_stack
from meshwright.simulator import (
    SCHEDULES,
    BuiltStep,
    CostModel,
    ResolvedPlan,
    StepWork,
    TrainingJob,
    build_step,
    load_model,
    simulate_folded,
    simulate_unfolded,
)
from meshwright.simulator.engine import Message, PassWork, RankWork
from meshwright.simulator.schedules import Phase

pytestmark = pytest.mark.bench

Benchmark = Callable[..., Any]


def plain_work(pp: int, num_microbatches: int) -> StepWork:
    virtual_stage = {
        Phase.FORWARD: PassWork(10**9, Message(10**7, 10**6)),
        Phase.BACKWARD: PassWork(2 * 10**9, Message(10**7, 10**6)),
    }
    return StepWork(
        ranks=(RankWork(virtual_stages=(virtual_stage,)),) * pp,
        actions=SCHEDULES["1f1b"].actions(pp, num_microbatches, 1),
        num_microbatches=num_microbatches,
    )


def published_trillion() -> BuiltStep:
    model = load_model("megatron-1t")
    job = TrainingJob(model=model, global_batch_size=3072, seq_len=2048, precision=Precision.FP16)
    plan = ResolvedPlan(tp=8, pp=64, dp=6, recompute=Recompute.FULL, stages=(2,) * 64)
    costs = CostModel(load_cluster("dgx-a100"), load_stack("megatron-lm-2021"), plan.world_size)
    return build_step(job, plan, costs)


def test_a_folded_run_of_32_stages_and_128_microbatches(benchmark: Benchmark) -> None:
    """Budget: 40 ms of CPU."""
    times = benchmark(simulate_folded, plain_work(32, 128))
    assert times.step_ps > 0


def test_an_unfolded_run_of_3072_ranks_and_three_million_passes(benchmark: Any) -> None:
    """Budget: 60 s of CPU and 2 GB."""
    built = published_trillion()
    times = benchmark.pedantic(simulate_unfolded, (built.work, built.setting.mesh), rounds=1)
    assert times.step_ps == simulate_folded(built.work).step_ps
    peak_mebi = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEBI
    benchmark.extra_info["peak_mebi"] = peak_mebi
    assert peak_mebi < 2000
