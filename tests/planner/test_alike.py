"""Near-duplicates are folded into a simpler plan that does as well, and the proof stays true."""

import json
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from meshwright import main
from meshwright.hwprofiles import Recompute, load_cluster, load_stack
from meshwright.planner import SearchResult, SpaceLimits, enumerate_space
from meshwright.planner.search import search
from meshwright.planner.search.alike import LARGER_FRACTION, LONGER_FRACTION, complexity
from meshwright.planner.search.finalists import Bounds, Finalists, Runs
from meshwright.simulator import (
    CostModel,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)

CLUSTER, STACK = load_cluster("dgx-a100"), load_stack("megatron-core")
MODEL = load_model("gpt2-xl")
JOB = TrainingJob(model=MODEL, global_batch_size=16, seq_len=MODEL.seq_len)
LIMITS = SpaceLimits(tp=(1, 2), microbatch_size=(1,), attention=(STACK.attention,))
TOP = 12
EXAMPLE = [
    "search",
    "llama2-70b",
    "--cluster",
    "dgx-a100",
    "--gpus",
    "128",
    "--tp",
    "4",
    "--pp",
    "4",
]
EXAMPLE += ["--global-batch", "256", "--gradient-precision", "fp32"]


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(JOB, CLUSTER, STACK, 16, limits=LIMITS, top=TOP)


@pytest.fixture(scope="module")
def every() -> dict[ResolvedPlan, StepResult]:
    """Return every layout that fits, simulated."""
    space = enumerate_space(JOB, STACK, 16, LIMITS)
    costs = CostModel(CLUSTER, STACK, 16)
    plans = map(space.plan, range(len(space)))
    steps = [simulate(JOB, plan, CLUSTER, STACK, costs=costs) for plan in plans]
    return {step.plan: step for step in steps if step.memory.fits}


def does_as_well(simpler: StepResult, other: StepResult) -> bool:
    return (
        simpler.plan.degrees == other.plan.degrees
        and complexity(JOB, simpler.plan, STACK) < complexity(JOB, other.plan, STACK)
        and simpler.step_ps <= other.step_ps * (1 + LONGER_FRACTION)
        and simpler.memory.device_bytes <= other.memory.device_bytes * (1 + LARGER_FRACTION)
    )


def test_the_first_plan_is_the_fastest_of_all_and_rows_are_by_time(
    found: SearchResult, every: dict[ResolvedPlan, StepResult]
) -> None:
    assert found.optimal
    assert found.plans[0].step_ps == min(step.step_ps for step in every.values())
    assert len(found.listed) == TOP
    times = [found.plans[place].step_ps for place in found.listed]
    assert times == sorted(times)


def test_a_plan_is_folded_only_into_a_simpler_one_that_does_as_well(
    found: SearchResult, every: dict[ResolvedPlan, StepResult]
) -> None:
    folded = 0
    for step, like in zip(found.plans, found.like, strict=True):
        for plan in like:
            assert does_as_well(step, every[plan])
            folded += 1
    assert folded > TOP
    rows = [found.plans[place] for place in found.listed]
    assert not any(does_as_well(one, other) for one in rows for other in rows)


def test_no_layout_that_is_as_fast_as_the_last_row_is_left_out(
    found: SearchResult, every: dict[ResolvedPlan, StepResult]
) -> None:
    told = {step.plan for step in found.plans} | {plan for like in found.like for plan in like}
    last_ps = found.plans[-1].step_ps
    assert {plan for plan, step in every.items() if step.step_ps < last_ps} <= told


def test_rows_take_hardly_more_runs_than_plans(found: SearchResult) -> None:
    told = len(found.plans) + sum(map(len, found.like))
    assert found.simulated < told  # what its bound tells to be alike is not run


def test_a_plan_is_simpler_with_fewer_switches_then_with_less_of_them() -> None:
    order = [
        ResolvedPlan(zero_stage=1),
        ResolvedPlan(zero_stage=1, num_virtual_stages=10),
        ResolvedPlan(zero_stage=1, num_virtual_stages=20),
        ResolvedPlan(zero_stage=1, microbatch_size=2),
        ResolvedPlan(zero_stage=1, recompute=Recompute.SELECTIVE),
        ResolvedPlan(zero_stage=1, recompute=Recompute.FULL),
        ResolvedPlan(zero_stage=1, num_virtual_stages=10, recompute=Recompute.FULL),
    ]
    shuffled = sorted([*order[3:], *order[:3]], key=lambda plan: complexity(JOB, plan, STACK))
    assert {*shuffled[1:6]} == {*order[1:6]}
    assert (shuffled[0], shuffled[-1]) == (order[0], order[-1])
    assert shuffled.index(order[1]) < shuffled.index(order[2])
    assert shuffled.index(order[4]) < shuffled.index(order[5])


def test_a_fastest_plan_that_is_folded_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(EXAMPLE) == 0
    text = capsys.readouterr().out
    assert "\n 2   4   4   8   10 " in text
    assert "fastest   plan 1: plan 2 with vpp=20, 0.08% faster" in text
    assert main([*EXAMPLE, "--json", "-"]) == 0
    fastest, simpler, *_ = json.loads(capsys.readouterr().out)["plans"]
    assert (fastest["plan"]["num_virtual_stages"], fastest["like"]) == (20, [])
    assert fastest["plan"] in simpler["like"]
    assert fastest["step_time_s"] < simpler["step_time_s"] < 1.01 * fastest["step_time_s"]


def test_layouts_come_in_the_order_of_their_bounds_though_fewer_and_then_more_are_wanted() -> None:
    rough, sharp = np.array([10, 20, 30, 50]), np.array([10, 40, 30, 50])
    runs = cast("Runs", SimpleNamespace(device_bytes=np.zeros(4, np.int64)))
    finalists = Finalists(np.arange(4), Bounds(rough, lambda rows: sharp[rows]), runs)
    wanted = iter([25, *[100] * 9])  # until these bounds, as a search learns
    found = list(finalists.in_order(lambda: next(wanted), 4))
    assert found == [(0, 10), (2, 30), (1, 40), (3, 50)]
