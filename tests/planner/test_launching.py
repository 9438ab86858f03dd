"""Limits of frameworks hold of exactly the plans that their exporters refuse, over whole spaces."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright import main
from meshwright.hwprofiles import (
    Strategy,
    list_stacks,
    load_cluster,
    load_framework,
    load_stack,
    release_changes,
)
from meshwright.planner.cli import importer
from meshwright.planner.configuration import read_toml
from meshwright.planner.export import FRAMEWORKS, export_plan
from meshwright.planner.importing import JOB_OPTIONS, get_format, read_keys, table_of
from meshwright.planner.importing.plans import asking_option
from meshwright.planner.options import ImportOptions
from meshwright.planner.reports import SavedPlan
from meshwright.planner.search import search
from meshwright.planner.space import COLUMNS, Space, SpaceLimits, enumerate_space, lacks
from meshwright.planner.tables import Facts
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, load_model, simulate
from meshwright.simulator.launching import framework_gaps, framework_refusal
from meshwright.simulator.layout import (
    PLAN_FIELDS,
    default_precision,
    job_refusal,
    stack_refusal,
)

CLUSTER = load_cluster("dgx-h100")
# A dense GPT, a dense Llama on long sequences, experts, and latent attention beside them.
JOBS = {
    "gpt2": (1024, 32),
    "llama3-8b": (8192, 16),
    "mixtral-8x7b": (4096, 16),
    "qwen3-30b-a3b": (4096, 16),
    "deepseek-v3": (4096, 16),
}
STACKS = ("megatron-core", "torchtitan@0.2", "torchtitan@0.3", "deepspeed", "fsdp", "ddp")
PAIRS = [
    (framework, version, stack)
    for framework, each in FRAMEWORKS.items()
    for version in each.versions or ("",)
    for stack in STACKS
]
DIFFERENT = [
    name
    for name in list_stacks()
    for stack in [load_stack(name)]
    if not stack.release or release_changes(stack)
]
MOST = 4  # plans of a space that are exported, and as many that are refused


@cache
def offered(model: str, stack: str) -> Space:
    """Return the layouts of a small job that its stack offers."""
    seq_len, batch = JOBS[model]
    job = TrainingJob(model=load_model(model), global_batch_size=batch, seq_len=seq_len)
    space = enumerate_space(job, load_stack(stack), 16, SpaceLimits())
    return space.chosen(np.flatnonzero(~lacks(space)))


def left(space: Space, framework: str, version: str) -> NDArray[np.bool_]:
    """Return which layouts of a space no gap holds of."""
    found = np.ones(len(space), np.bool_)
    profile = load_framework(framework)
    if framework_refusal(profile, version, space.stack, space.job) is not None:
        return ~found
    for gap in framework_gaps(profile, version, space.stack, space.job):
        if gap.fields <= {*COLUMNS, "dp_cp"}:
            found &= ~np.asarray(gap.lacks(space.column), np.bool_)
    return found


def chosen(space: Space, is_left: NDArray[np.bool_]) -> Iterator[tuple[SavedPlan, bool]]:
    """Yield plans of a space, and whether a framework can be told of each."""
    rng = random.Random(len(space))
    for rows, is_told in ((np.flatnonzero(is_left), True), (np.flatnonzero(~is_left), False)):
        for row in rng.sample(rows.tolist(), min(MOST, len(rows))):
            plan = space.plan(row)
            if stack_refusal(space.job, plan, space.stack) is not None:
                continue  # the stack has no such model
            yield SavedPlan(job=space.job, plan=plan, cluster=CLUSTER, stack=space.stack), is_told


@pytest.mark.parametrize(("framework", "version", "stack"), PAIRS)
def test_a_plan_is_exported_exactly_where_no_gap_holds(
    framework: str, version: str, stack: str
) -> None:
    for model in JOBS:
        space = offered(model, stack)
        if not len(space):
            continue
        for saved, is_told in chosen(space, left(space, framework, version)):
            # A column says 0 of one rank's ZeRO stage, the plan what its stack does anyway.
            if saved.plan.dp_cp > 1 or framework in saved.stack.launched_by:
                assert is_exported(saved, framework, version) == is_told, saved.plan


def is_exported(saved: SavedPlan, framework: str, version: str) -> bool:
    """Return whether a framework can be told of a plan."""
    try:
        export_plan(saved, FRAMEWORKS[framework], version or None)
    except PlanError:
        return False
    return True


@pytest.mark.parametrize(("framework", "version", "stack"), PAIRS)
def test_an_exported_plan_comes_back_from_the_stack_of_its_framework(
    framework: str, version: str, stack: str, tmp_path: Path
) -> None:
    profile = load_framework(framework)
    own = any(table.is_of(load_stack(stack).name) for table in profile.tables_of(version))
    if not own or not FRAMEWORKS[framework].is_read:
        return
    for model in JOBS:
        space = offered(model, stack)
        for saved, is_told in chosen(space, left(space, framework, version)):
            if is_told:
                files = export_plan(saved, FRAMEWORKS[framework], version or None).files
                path = tmp_path / "exported"
                path.write_text(next(iter(files.values())), encoding="utf-8")
                again = read_back(path, framework, saved)
                assert again == without_effect(saved.plan, again)


def read_back(path: Path, framework: str, saved: SavedPlan) -> ResolvedPlan:
    """Return the plan of a file, told what it leaves to a script."""
    plan, job = saved.plan, saved.job
    options = ImportOptions(
        file=str(path),
        source=framework,
        model=job.model.name,
        cluster=saved.cluster.name,
        gpus=plan.world_size,
        global_batch=job.global_batch_size,
        seq_len=job.seq_len,
    )
    kept = ("attention", "recompute", "sync_each_microbatch", "microbatch_size", "reduce_precision")
    told = {name: getattr(plan, name) for name in kept if framework in ("deepspeed", "accelerate")}
    return importer._imported(options, get_format(framework), told)[1].plan


def has_mesh(stack: str) -> bool:
    """Return whether plans of a stack are those of a mesh of ranks."""
    return load_stack(stack).strategy is Strategy.MESH


ASKED = re.compile(r"does not say: (.*)")
NAMES = {
    asking_option(name): name for name in (*PLAN_FIELDS, *JOB_OPTIONS) if name != "parameter_server"
}


@pytest.mark.parametrize(
    ("framework", "version", "stack"),
    [
        (framework, version, stack)
        for framework, each in FRAMEWORKS.items()
        for version in (each.versions or ("",)) * each.is_read
        for stack in DIFFERENT
        if has_mesh(stack)
    ],
)
def test_a_plan_of_any_stack_comes_back_from_any_file_or_what_it_lacks_is_asked_for(
    framework: str, version: str, stack: str, tmp_path: Path
) -> None:
    path = tmp_path / "exported"
    for model in ("llama3-8b", "qwen3-30b-a3b"):
        space = offered(model, stack)
        for saved, is_told in chosen(space, left(space, framework, version)) if len(space) else ():
            if is_told:
                files = export_plan(saved, FRAMEWORKS[framework], version or None).files
                path.write_text(next(iter(files.values())), encoding="utf-8")
                again = asked_again(path, framework, saved)
                if again is None:  # a stack of others has formats that no file says
                    assert framework not in saved.stack.launched_by
                    continue
                assert again.plan == without_effect(saved.plan, again.plan)
                assert (again.job, again.stack) == (saved.job, saved.stack)


def asked_again(path: Path, framework: str, saved: SavedPlan) -> SavedPlan | None:
    """Import a file with what is asked for, and no more; the stack is not what a file says.

    None where the stack refuses by name what the file means.
    """
    known = {name: getattr(saved.plan, name) for name in PLAN_FIELDS}
    known |= {
        "model": saved.job.model.name,
        "world_size": saved.plan.world_size,
        "global_batch_size": saved.job.global_batch_size,
        "seq_len": saved.job.seq_len,
        "precision": saved.job.precision,
    }
    asked: set[str] = set()
    while True:
        told = {name: known[name] for name in asked}
        job = {option: told.pop(name) for name, option in JOB_OPTIONS.items() if name in told}
        options = ImportOptions(
            file=str(path), cluster=saved.cluster.name, stack=saved.stack.name, **job
        )
        try:
            return importer._imported(options, get_format(framework), told)[1]
        except PlanError as error:
            if f"is not offered by stack {saved.stack.name}" in str(error):
                return None
            (said,) = ASKED.findall(str(error))
            found = {NAMES[option] for option in re.findall(r"--[a-z-]+", said)}
            if found <= asked:
                raise
            asked |= found


def without_effect(plan: ResolvedPlan, again: ResolvedPlan) -> ResolvedPlan:
    """Return a plan with what has no effect in it as another one has it: stages of one rank."""
    if plan.dp_cp > 1:
        return plan
    shards = again.zero_stage, again.reshard_after_forward
    return replace(plan, zero_stage=shards[0], reshard_after_forward=shards[1])


def test_a_value_that_leaves_a_table_leaves_export_import_and_gaps(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "meshwright" / "hwprofiles" / "data" / "frameworks"
    text = (folder / "torchtitan.toml").read_text(encoding="utf-8")
    assert ', interleaved = "Interleaved1F1B"' in text
    copy = tmp_path / "torchtitan.toml"
    copy.write_text(text.replace(', interleaved = "Interleaved1F1B"', ""), encoding="utf-8")
    less = load_framework(copy)
    framework = FRAMEWORKS["torchtitan"]
    space = offered("llama3-8b", "torchtitan")
    interleaved = np.flatnonzero(left(space, "torchtitan", "0.2") & (space.column("schedule") == 2))
    plan = space.plan(int(interleaved[0]))
    assert plan.schedule == "interleaved"
    saved = SavedPlan(job=space.job, plan=plan, cluster=CLUSTER, stack=space.stack)
    files = export_plan(saved, framework, "0.2").files
    shorter = replace(framework, profile=less)
    with pytest.raises(PlanError, match="schedule=interleaved cannot be expressed"):
        export_plan(saved, shorter, "0.2")
    gaps = [*framework_gaps(less, "0.2", space.stack, space.job)]
    assert [each.field for each in gaps if each.lacks(plan.number)] == ["schedule"]
    keys, codecs = read_toml(files["train.toml"]).keys, framework.program.codecs
    (complaint,) = read_keys(less, table_of(less, keys), keys, Facts({}), codecs).complaints
    assert complaint.text.endswith("allowed: GPipe, 1F1B")


LAUNCHED = [name for name in DIFFERENT if load_stack(name).launched_by]


@pytest.mark.parametrize("stack", LAUNCHED)
@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_every_plan_of_a_search_is_launched_as_it_stands(
    stack: str, model: str, tmp_path: Path
) -> None:
    """And comes back as it was, from the file that starts it."""
    seq_len, batch = JOBS[model]
    cluster = load_cluster("dgx-b200" if "fused" in stack else CLUSTER)
    precision = default_precision(cluster.device, load_stack(stack))
    job = TrainingJob(model=model, global_batch_size=batch, seq_len=seq_len, precision=precision)
    num_gpus, limits = (8 if model == "llama3-8b" else 16), SpaceLimits(max_pp=4)
    if job_refusal(job, load_stack(stack)) is not None:
        return  # a model that the stack does not train
    found = search(job, cluster, stack, num_gpus, limits=limits, top=4)
    assert bool(found.launcher) != bool(found.not_launched)
    framework, _, version = found.launcher.partition(" ")
    for step in found.plans if found.launcher else ():
        saved = SavedPlan(job=job, plan=step.plan, cluster=cluster, stack=step.stack)
        files = export_plan(saved, FRAMEWORKS[framework], version or None).files
        path = tmp_path / "exported"
        path.write_text(next(iter(files.values())), encoding="utf-8")
        assert read_back(path, framework, saved) == step.plan


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core", "fsdp"])
def test_a_search_finds_the_fastest_of_what_can_be_launched(stack: str) -> None:
    """By brute force: simulated one by one, and told by the exporter itself."""
    job = TrainingJob(model="llama3-8b", global_batch_size=16, seq_len=8192)
    limits = SpaceLimits(max_pp=2, max_tp=2, microbatch_size=(1,), recompute=("none", "full"))
    found = search(job, CLUSTER, stack, 8, limits=limits.pinned(any_layout=True), top=1)
    space = enumerate_space(job, load_stack(stack), 8, limits)
    framework, _, version = search(job, CLUSTER, stack, 8, limits=limits).launcher.partition(" ")
    told, others = [], []
    for row in np.flatnonzero(~lacks(space)).tolist():
        step = simulate(job, space.plan(row), CLUSTER, stack)
        saved = SavedPlan(job=job, plan=step.plan, cluster=CLUSTER, stack=step.stack)
        if step.memory.fits:
            (told if is_exported(saved, framework, version) else others).append(step.step_ps)
    launched = search(job, CLUSTER, stack, 8, limits=limits, top=1)
    assert launched.optimal
    assert launched.plans[0].step_ps == min(told)
    assert launched.feasible == len(told)
    faster = launched.unlaunchable
    assert (faster and faster.step_ps) == (
        min(others) if min(others, default=min(told)) < min(told) else None
    )
    assert found.plans[0].step_ps == min(told + others)


@pytest.mark.parametrize("words", [["--any"], ["--for", "megatron-lm"], ["--also", "offload"]])
def test_what_a_search_is_over_says_nothing_of_one_layout(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "16"]
    assert main(["sweep", *job, "--vary", "tp=1,2", "--simulate", *words]) == 2
    assert f"{words[0]} has no effect on one layout" in capsys.readouterr().err
    plan = tmp_path / "plan.json"
    plan.write_text((Path(__file__).parents[1] / "golden" / "plans" / "ddp.json").read_text())
    assert main(["compare", str(plan), str(plan), *words]) == 2
    assert f"{words[0]} has no effect on plans" in capsys.readouterr().err
