"""Searches over replicas of one process and over parameter servers, against every layout."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright import main
from meshwright.hwprofiles import GIBI, Precision, Recompute, load_cluster, load_stack
from meshwright.planner import SearchResult, SpaceLimits
from meshwright.planner.search import search
from meshwright.planner.search.strategies import (
    computing_ps,
    enumerate_strategies,
    strategy_field,
)
from meshwright.simulator import (
    CostModel,
    PlanError,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.strategies import graph_step

MODULE, SERVER = "dataparallel", "parameter-server"


class Case(NamedTuple):
    """A space small enough to simulate."""

    stack: str
    num_gpus: int
    batch: int
    memory_limit_bytes: int | None = None


CASES = {
    "one process": Case(MODULE, 4, 24),
    "one process, tight memory": Case(MODULE, 4, 24, 8 * GIBI),
    "servers": Case(SERVER, 3, 12),
    "servers, tight memory": Case(SERVER, 4, 16, 4 * GIBI),
}


def job_of(case: Case) -> TrainingJob:
    model = load_model("gpt2")
    return TrainingJob(
        model=model,
        global_batch_size=case.batch,
        seq_len=model.seq_len,
        precision=Precision.FP16,
    )


def search_of(
    case: Case, limits: SpaceLimits | None = None, cluster: str = "dgx-a100"
) -> SearchResult:
    return search(
        job_of(case),
        load_cluster(cluster),
        load_stack(case.stack),
        case.num_gpus,
        limits=limits,
        memory_limit_bytes=case.memory_limit_bytes,
        top=3,
    )


@cache
def brute_force(case: Case) -> tuple[StepResult, ...]:
    """Return every layout, simulated."""
    job, cluster, stack = job_of(case), load_cluster("dgx-a100"), load_stack(case.stack)
    space = enumerate_strategies(job, cluster, stack, case.num_gpus, SpaceLimits())
    return tuple(
        simulate(
            job,
            space.plan(index),
            cluster,
            stack,
            memory_limit_bytes=case.memory_limit_bytes,
        )
        for index in range(len(space))
    )


@pytest.mark.parametrize("name", CASES)
def test_the_proven_layout_is_the_fastest_of_all_that_fit(name: str) -> None:
    case = CASES[name]
    found, every = search_of(case), brute_force(case)
    fitting = sorted(result.step_ps for result in every if result.memory.fits)
    assert found.optimal
    assert found.space_size == len(every)
    assert found.feasible == len(fitting) > 0
    assert [result.step_ps for result in found.plans] == fitting[:3]
    assert sum(found.rejections.values()) == len(every) - len(fitting)
    by_plan = {result.plan: result for result in every}
    for result in found.plans:
        assert result.memory == by_plan[result.plan].memory


@pytest.mark.parametrize("name", CASES)
def test_memory_is_exact_and_no_bound_exceeds_the_simulated_time(name: str) -> None:
    case = CASES[name]
    job, cluster, stack = job_of(case), load_cluster("dgx-a100"), load_stack(case.stack)
    field = strategy_field(job, cluster, stack, case.num_gpus, SpaceLimits())
    costs = CostModel(cluster, stack, case.num_gpus)
    for index, result in enumerate(brute_force(case)):
        assert tuple(column[index] for column in field.runs.peaks) == result.memory.peak
        assert 0 < computing_ps(field.runs.space, index, costs) <= result.step_ps


@pytest.mark.parametrize("name", CASES)
def test_no_layout_beats_the_frontier(name: str) -> None:
    case = CASES[name]
    fitting = [result for result in brute_force(case) if result.memory.fits]
    for point in search_of(case).frontier:
        if point.proven:
            assert not any(
                each.step_ps < point.step_ps and each.memory.device_bytes < point.device_bytes
                for each in fitting
            )


def test_the_space_is_every_microbatch_recomputation_and_number_of_servers() -> None:
    case = Case(SERVER, 4, 16)
    space = enumerate_strategies(
        job_of(case), load_cluster("dgx-a100"), load_stack(SERVER), 4, SpaceLimits()
    )
    plans = [space.plan(index) for index in range(len(space))]
    assert len(set(plans)) == len(plans) == 3 * 2 * 4
    assert {plan.microbatch_size for plan in plans} == {1, 2, 4}
    assert {plan.recompute for plan in plans} == {Recompute.NONE, Recompute.FULL}
    assert {plan.parameter_server and plan.parameter_server.servers for plan in plans} == {
        "all",
        1,
        2,
        4,
    }
    assert {(plan.tp, plan.pp, plan.dp) for plan in plans} == {(1, 1, 4)}


def test_pins_and_hosts_narrow_the_space() -> None:
    case = Case(SERVER, 4, 16)
    pinned = search_of(case, SpaceLimits(microbatch_size=(2,), recompute=(Recompute.NONE,)))
    assert pinned.space_size == 4
    assert {result.plan.microbatch_size for result in pinned.plans} == {2}
    assert search_of(case, SpaceLimits(tp=(2,))).space_size == 0
    # The workers' host is the only one: no server has one of its own.
    job, host, stack = job_of(Case(SERVER, 1, 4)), load_cluster("localhost-cpu"), load_stack(SERVER)
    assert host.num_nodes == 1
    assert set(enumerate_strategies(job, host, stack, 1, SpaceLimits()).servers) == {"all"}


def test_where_nothing_fits_the_nearest_layout_is_named() -> None:
    case = Case(MODULE, 4, 24, GIBI)
    found = search_of(case)
    assert (found.feasible, found.plans) == (0, ())
    assert found.nearest is not None
    needs = min(result.memory.device_bytes for result in brute_force(Case(MODULE, 4, 24)))
    assert found.nearest.lacks_bytes == needs - GIBI
    assert found.nearest.changes == ()  # the least it can hold is in the space


def test_layouts_with_too_many_tasks_keep_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(MODULE, 4, 24)
    every = brute_force(case)
    monkeypatch.setattr(graph_step, "MAX_TASKS", 700)
    found = search_of(case)
    assert found.feasible == len(every)
    assert 0 < found.simulated < len(every)
    assert found.plans[0].step_ps == min(result.step_ps for result in every)
    # What a replica computes is less than the best step: a long layout could still beat it.
    assert not found.optimal
    assert 0 < found.bound_gap_fraction < 1


def test_one_process_drives_no_more_than_a_node() -> None:
    with pytest.raises(PlanError, match="8 devices of a node"):
        search_of(Case(MODULE, 16, 32))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("stack", [MODULE, SERVER])
def test_a_search_writes_plans_that_simulate_to_the_same_bytes(
    stack: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--global-batch", "16"]
    out = tmp_path / "out"
    assert main(["search", *words, "--stack", stack, "--out", str(out), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["optimal"]
    assert main(["simulate", "--plan", str(out / "plan.json"), "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time_s"] == document["plans"][0]["step_time_s"]
    assert main(["search", *words, "--stack", stack]) == 0
    shown = capsys.readouterr().out
    assert ("servers" in shown) == (stack == SERVER)
    assert "proven optimal over" in shown
    header = (out / "plans.csv").read_text(encoding="utf-8").splitlines()[0]
    assert ("servers" in header.split(",")) == (stack == SERVER)


@pytest.mark.parametrize("stack", ["ddp", "deepspeed-lamb-2020"])
def test_stacks_without_tensor_parallelism_are_searched(stack: str) -> None:
    case = Case(stack, 4, 16)
    found = search_of(case)
    assert found.optimal
    assert replace(found.plans[0].plan, microbatch_size=1).tp == 1
    words = ["gpt2", "--cluster", "dgx-a100", "--gpus", "4", "--global-batch", "16"]
    assert main(["search", *words, "--stack", stack]) == 0
