"""What is never laid out cannot be among what a search reports."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from meshwright.__main__ import main
from meshwright.hwprofiles import load_cluster, load_stack
from meshwright.planner import SpaceLimits, search
from meshwright.planner.bounds import StepBounds
from meshwright.planner.footprint import device_bytes_column, peak_bytes
from meshwright.planner.search import ranking
from meshwright.planner.search.finalists import Runs
from meshwright.planner.search.pruning import Pruning
from meshwright.planner.search.search import with_kernels
from meshwright.planner.space import PartialSpace, ShapeTable
from meshwright.simulator import CostModel, TrainingJob, load_model

CLUSTER = "dgx-h100"
ANYTHING = 2**60


def asked(model: str, batch: int, seq_len: int) -> TrainingJob:
    return TrainingJob(model=load_model(model), global_batch_size=batch, seq_len=seq_len)


class Case(NamedTuple):
    """A job on GPUs of `CLUSTER`."""

    model: str
    stack: str
    num_gpus: int
    batch: int
    seq_len: int
    limits: dict[str, Any]

    @property
    def job(self) -> TrainingJob:
        return asked(self.model, self.batch, self.seq_len)


# Dense with cp, experts with ep and etp, sharded units with replicas of shards, pipelines of them.
CASES = [
    pytest.param(Case("llama3-8b", "megatron-core", 8, 8, 32768, {"max_cp": 4}), id="dense-cp"),
    pytest.param(Case("mixtral-8x7b", "megatron-core", 32, 32, 4096, {"pp": (1, 4)}), id="experts"),
    pytest.param(Case("qwen3-30b-a3b", "fsdp", 16, 16, 4096, {}), id="experts-fsdp"),
    pytest.param(Case("llama3-8b", "torchtitan@0.2", 8, 16, 8192, {"max_tp": 2}), id="pipelines"),
    pytest.param(Case("gpt2", "deepspeed", 8, 16, 1024, {}), id="zero"),
]


@pytest.mark.parametrize("case", CASES)
def test_bounds_of_nodes_exceed_none_of_their_layouts(case: Case) -> None:
    job, cluster, stack = case.job, load_cluster(CLUSTER), load_stack(case.stack)
    limits = with_kernels(job, SpaceLimits(**case.limits), cluster, stack)
    space = PartialSpace.of(job, stack, case.num_gpus, limits)
    costs = CostModel(cluster, stack, case.num_gpus)
    pruning, closeness = Pruning(space, costs, ANYTHING), []
    for bounded in [*pruning.rows, *pruning.below(pruning.rows)]:
        family, rows, choices = bounded.nodes
        row, choice, setting = np.nonzero(family.offered[rows][:, choices])
        columns, _ = family.layouts((rows[row], choices[choice], setting))
        layouts, every = replace(space.space, columns=columns), np.arange(len(row))
        table = ShapeTable.of(layouts)
        live = peak_bytes(layouts, table, costs.blocks, every)
        needed = device_bytes_column(layouts, cluster, live)
        rough_ps = StepBounds(layouts, table, costs).rough_bounds_ps(every)
        assert (bounded.device_bytes[row] <= needed).all()
        assert (bounded.step_ps[row] <= rough_ps).all()
        closeness.append(np.median(bounded.step_ps[row] / rough_ps))
    assert min(closeness) > 0.5  # else nothing would be pruned


@pytest.mark.parametrize("case", CASES)
def test_a_search_finds_the_same_whether_or_not_all_is_laid_out(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, given = case.job, SpaceLimits(**case.limits)
    whole = search(job, CLUSTER, case.stack, case.num_gpus, limits=given)
    monkeypatch.setattr(ranking, "FEW_LAYOUTS", 0)
    found = search(job, CLUSTER, case.stack, case.num_gpus, limits=given)
    assert found.looked_at < found.space_size == whole.space_size == whole.looked_at
    assert (found.plans, found.like) == (whole.plans, whole.like)
    assert found.varied == whole.varied
    for point, known in zip(found.frontier, whole.frontier, strict=True):
        assert (point.plan, point.step_ps) == (known.plan, known.step_ps)
        assert point.bound_gap_fraction <= known.bound_gap_fraction
    assert (found.unlaunchable, found.optimal) == (whole.unlaunchable, whole.optimal)
    assert found.feasible <= whole.feasible
    assert all(found.rejections.values())
    memory, others = "needs more memory than a device has", whole.rejections
    assert found.rejections.get(memory, 0) <= others.get(memory, 0)
    assert {**found.rejections, memory: 0} == {**others, memory: 0}


def test_where_nothing_fits_all_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    job = asked("llama3-70b", 2, 8192)
    whole = search(job, CLUSTER, "megatron-core", 2)
    monkeypatch.setattr(ranking, "FEW_LAYOUTS", 0)
    found = search(job, CLUSTER, "megatron-core", 2)
    assert (found.nearest, found.verdict) == (whole.nearest, whole.verdict)
    assert found.nearest is not None


def test_where_none_of_the_first_few_can_be_simulated_all_is_laid_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = asked("gpt2", 16, 1024)
    whole = search(job, CLUSTER, "megatron-core", 8, top=1)
    monkeypatch.setattr(ranking, "FEW_LAYOUTS", 0)

    def is_too_long(runs: Runs, _index: int) -> bool:
        return len(runs.space) < whole.space_size

    monkeypatch.setattr(Runs, "is_too_long", is_too_long)
    found = search(job, CLUSTER, "megatron-core", 8, top=1)
    assert (found.plans, found.looked_at) == (whole.plans, whole.space_size)


@pytest.mark.parametrize("asked_for", [{"max_recompute_layers": 2}, {"recompute_layers": (2,)}])
def test_layers_of_other_kinds_are_all_laid_out(
    asked_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "FEW_LAYOUTS", 0)
    limits = SpaceLimits(**asked_for, pp=(1,))
    found = search(asked("gpt2", 16, 1024), CLUSTER, "megatron-core", 4, limits=limits, top=1)
    assert found.plans
    assert found.looked_at == found.space_size


def test_what_is_not_counted_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranking, "FEW_LAYOUTS", 0)
    words = [
        "search",
        "gpt2",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
        "--global-batch",
        "16",
        "--top",
        "1",
    ]
    assert main([*words, "--json", "-"]) == 0
    least = json.loads(capsys.readouterr().out)
    assert main([*words, "--json", "-", "--count"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert least["looked_at"] < least["space_size"] == exact["looked_at"]
    assert least["feasible_at_least"] <= exact["feasible"]
    assert "feasible" not in least
    assert main(words) == 0
    assert f"{least['looked_at']:,} laid out, at least" in capsys.readouterr().out
    assert main([*words, "--count", "--max", "micro-batch"]) == 2
    assert "--count and --max contradict each other" in capsys.readouterr().err
