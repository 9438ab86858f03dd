"""What makes a plan fit: every change is true, none that is cheaper is missed, and it is named."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from words_said import said_once

from meshwright import main
from meshwright.hwprofiles import Attention, Precision, Recompute, load_cluster, load_stack
from meshwright.planner import Change, SpaceLimits, cheapest_changes, enumerate_space
from meshwright.planner.bounds import StepBounds
from meshwright.planner.footprint import device_bytes_column, peak_bytes
from meshwright.planner.search import search
from meshwright.planner.space import SWITCHES, ShapeTable, lacks
from meshwright.simulator import (
    CostModel,
    ModelSpec,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.layout import SEARCHED_FIELDS, without_defaults

MODEL = load_model("gpt3-175b")
JOB = TrainingJob(model=MODEL, global_batch_size=512, seq_len=MODEL.seq_len)
CLUSTER, STACK = load_cluster("dgx-a100"), load_stack("megatron-core")
# One switch is enough, a pair, another layout of the same devices, more devices.
COMMANDS = {
    "switch": "llama3-70b --cluster dgx-h100 --gpus 64 --global-batch 256 --tp 8 --pp 4",
    "pair": "llama3-70b --cluster dgx-h100 --gpus 64 --global-batch 256 --tp 8",
    "layout": "gpt3-175b --cluster dgx-a100 --gpus 128 --global-batch 128 --micro-batch 1",
    "devices": "llama3-70b --cluster dgx-h100 --gpus 8 --global-batch 256",
    "sharded": "llama3-8b --cluster dgx-a100-40 --gpus 8 --global-batch 64 --stack fsdp "
    "--micro-batch 4",
    "one process": "gpt2-medium --cluster dgx-1v --gpus 4 --global-batch 64 --stack dataparallel "
    "--micro-batch 16",
}


def document(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main(["simulate", *said_once(words.split()), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("case", COMMANDS)
def test_each_change_typed_behind_the_command_is_what_it_says(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = COMMANDS[case]
    before = document(capsys, words)
    assert 1 <= len(before["changes"]) <= 4
    times = [change["step_time_s"] for change in before["changes"]]
    assert times == sorted(times)
    kept = words.split()
    for change in before["changes"]:
        after = document(capsys, " ".join(kept) + f" {change['options']}")
        assert after["memory"]["fits"]
        assert "changes" not in after
        assert after["plan"] == change["plan"]
        assert after["step_time_s"] == change["step_time_s"]
        saved = before["memory"]["device_bytes"] - after["memory"]["device_bytes"]
        assert change["saved_bytes"] == saved
        slower = after["step_time_s"] / before["step_time_s"] - 1
        assert change["slower_fraction"] == pytest.approx(slower, abs=1e-9)


def too_large(plan: ResolvedPlan) -> StepResult:
    """Return a step of GPT-3 that does not fit."""
    step = simulate(JOB, plan, CLUSTER, STACK)
    assert not step.memory.fits
    return step


def test_no_layout_one_switch_away_is_faster_than_what_is_named() -> None:
    step = too_large(ResolvedPlan(tp=8, pp=4, dp=2, zero_stage=1, attention=Attention.FLASH))
    plan = step.plan
    space = enumerate_space(JOB, STACK, 64, SpaceLimits(stages=(STACK.stage_split,)))
    near, costs = [], CostModel(CLUSTER, STACK, plan.world_size)
    for index in range(len(space)):
        layout = space.plan(index)
        names = {each.name for each in SEARCHED_FIELDS} - {"stages"}  # all have the stack's rule
        differing = {name for name in names if getattr(layout, name) != getattr(plan, name)}
        # Twice the ranks of an axis is a switch, too; vpp and a schedule for it would be two.
        doubled = all(getattr(layout, axis) <= 2 * getattr(plan, axis) for axis in ("tp", "pp"))
        if len(differing - {"dp"}) == 1 and doubled:
            near.append(simulate(JOB, layout, CLUSTER, STACK, costs=costs))
    fitting = sorted(each.step_ps for each in near if each.memory.fits)
    assert fitting
    changes = cheapest_changes(step)
    assert changes[0].step_ps <= fitting[0]
    assert len(changes) >= min(4, len(set(fitting)))


def test_no_fewer_layers_need_to_run_again_than_are_named() -> None:
    plan = ResolvedPlan(tp=8, pp=4, dp=2, zero_stage=1, attention=Attention.FLASH)
    named = [each.plan for each in cheapest_changes(too_large(plan))]
    (number,) = {each.recompute_layers for each in named} - {None}
    assert number is not None
    fewer = replace(plan, recompute=Recompute.FULL, recompute_layers=number - 1)
    too_large(fewer)


def test_moments_are_narrowed_no_more_than_is_needed() -> None:
    plan = ResolvedPlan(
        tp=8, pp=8, dp=2, zero_stage=1, attention=Attention.FLASH, sequence_parallel=True
    )
    whole = simulate(JOB, plan, CLUSTER, STACK)

    def named(lacking: int) -> set[Precision | None]:
        limit = whole.memory.device_bytes - lacking
        step = simulate(JOB, plan, CLUSTER, STACK, memory_limit_bytes=limit)
        return {each.plan.moment_precision for each in cheapest_changes(step, limit)} - {None}

    # Of 12 bytes a weight 2, 6 and 8 are saved, of which two ranks have half each.
    share = whole.memory.by_stage[0].optimizer_states_bytes // 12
    assert [named(share * saved) for saved in (1, 3, 7)] == [
        {Precision.FP32},
        {Precision.BF16},
        {Precision.FP8},
    ]


def test_layouts_that_are_named_are_those_with_the_fewest_differences_of_all_that_fit() -> None:
    step = too_large(ResolvedPlan(dp=64, zero_stage=1, attention=Attention.FLASH))
    plan = without_defaults(JOB, STACK, step.plan)
    kept = {name: (getattr(plan, name),) for name in ("attention", *SWITCHES)}
    space = enumerate_space(JOB, STACK, 64, SpaceLimits(**kept, stages=(STACK.stage_split,)))
    table, costs = ShapeTable.of(space), CostModel(CLUSTER, STACK, 64)
    needed = device_bytes_column(space, CLUSTER, peak_bytes(space, table, costs.blocks))
    inside = space.column("tp") <= CLUSTER.devices_per_node
    fitting = np.flatnonzero(~lacks(space) & inside & (needed <= step.memory.usable_bytes))
    bounds = StepBounds(space, table, costs).lower_bounds_ps(fitting).tolist()
    names = {each.name for each in SEARCHED_FIELDS} - {"dp", "stages", *kept}
    layouts = [space.plan(index) for index in fitting.tolist()]
    differing = [sum(getattr(each, n) != getattr(plan, n) for n in names) for each in layouts]
    nearest = sorted(range(len(layouts)), key=lambda place: (differing[place], bounds[place]))
    named = {change.plan for change in cheapest_changes(step)}
    assert named == {layouts[place] for place in nearest[:4]}


def test_tensor_parallelism_beyond_a_node_is_not_named_where_anything_else_helps() -> None:
    few = search(JOB, CLUSTER, STACK, 16).nearest
    assert few is not None
    assert few.plan.tp <= CLUSTER.devices_per_node
    plan = ResolvedPlan(tp=8, dp=8, zero_stage=1, attention=Attention.FLASH)
    for changes in (few.changes, cheapest_changes(too_large(plan))):
        assert changes
        assert all(change.plan.tp <= CLUSTER.devices_per_node for change in changes)
        assert not any("crosses" in str(change) for change in changes)


def test_tensor_parallelism_beyond_a_node_is_named_as_such_where_nothing_else_helps() -> None:
    """One layer cannot be a pipeline, and there are no more nodes."""
    model = ModelSpec(
        name="wide", num_layers=1, hidden_size=8192, num_heads=64, vocab_size=32_768, seq_len=1024
    )
    job = TrainingJob(model=model, global_batch_size=16, seq_len=1024)
    plan = ResolvedPlan(tp=8, dp=2, zero_stage=1, attention=Attention.FLASH)
    two_nodes, limit = CLUSTER.model_copy(update={"num_nodes": 2}), 3 * 2**30
    step = simulate(job, plan, two_nodes, STACK, memory_limit_bytes=limit)
    (change,) = cheapest_changes(step, limit)
    assert str(change).startswith("--tp 16: -")
    assert str(change).endswith(" time; tp=16 crosses nodes of 8 devices")
    more = replace(plan, tp=16, dp=1)  # a plan that leaves its node already may stay so
    step = simulate(job, more, two_nodes, STACK, memory_limit_bytes=limit - 2**29)
    named = cheapest_changes(step, limit - 2**29)
    assert {each.plan.tp for each in named} == {16}
    assert not any(each.crossing for each in named)


def test_a_plan_that_fits_needs_no_change() -> None:
    plan = ResolvedPlan(tp=8, pp=8, zero_stage=1, attention=Attention.FLASH, sequence_parallel=True)
    assert cheapest_changes(simulate(JOB, plan, CLUSTER, STACK)) == ()


def test_more_gpus_are_named_only_where_the_cluster_has_them() -> None:
    few = search(JOB, CLUSTER, STACK, 8).nearest
    assert few is not None
    assert all(change.plan.world_size > 8 for change in few.changes)
    assert all(change.options.startswith("--gpus ") for change in few.changes)
    small = CLUSTER.model_copy(update={"num_nodes": 1})
    alone = search(JOB, small, STACK, 8).nearest
    assert alone is not None
    assert (alone.plan, alone.lacks_bytes) == (few.plan, few.lacks_bytes)
    assert alone.changes == ()


def test_a_search_says_of_its_nearest_layout_what_simulate_says_of_it() -> None:
    limits = SpaceLimits(tp=(1,), pp=(1,))
    nearest = search(JOB, CLUSTER, STACK, 64, limits=limits).nearest
    assert nearest is not None
    assert nearest.changes == cheapest_changes(too_large(nearest.plan))
    assert {change.plan.world_size for change in nearest.changes} == {64}


def test_a_change_is_a_line_of_options_memory_and_time() -> None:
    plan = ResolvedPlan(tp=4, pp=2, dp=3, recompute=Recompute.FULL)
    change = Change(
        plan=plan,
        fields={"recompute": Recompute.FULL, "pp": 2, "dp": 3, "sequence_parallel": False},
        saved_bytes=3 * 2**30,
        device_bytes=2**30,
        step_ps=1,
        slower_fraction=0.024,
    )
    line = "--recompute full --pp 2 --no-sequence-parallel: -3 GiB, +2.4% time"
    assert str(change) == line
    assert "+3 GiB, -5.0% time" in str(
        replace(change, saved_bytes=-3 * 2**30, slower_fraction=-0.05)
    )
