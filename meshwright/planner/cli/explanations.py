"""Commands `explain` and `compare`.

Imports are local, so that a command waits for no more than it needs.
"""
# ruff: noqa: PLC0415

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.hwprofiles import ProfileError
from meshwright.planner.cli.commands import (
    STEP_WIDTH,
    check_json,
    check_outputs,
    print_written,
    progress_bar,
    show,
    tell,
)
from meshwright.simulator import PlanError

if TYPE_CHECKING:
    from meshwright.planner.options import (
        Given,
        JobOptions,
        JsonOptions,
        OutputOptions,
        PlanOptions,
        WordOptions,
    )
    from meshwright.planner.search import Progress
    from meshwright.simulator import StepResult

FEWEST_COMPARED = 2
MOST_COMPARED = 12


def run_explain(
    job: "JobOptions",
    layout: "Given",
    replication: "Given",
    files: "PlanOptions",
    output: "JsonOptions",
) -> int:
    """Run ``meshwright explain``; return its exit status."""
    from meshwright.planner.cli.buckets import with_bucket_size
    from meshwright.planner.cli.request import read_setting, resolve_plan
    from meshwright.planner.explain import explain, explanation_document, explanation_report
    from meshwright.planner.reports import is_plan_file

    plan_file = files.plan
    # `explain plan.json` has the plan file in the place of MODEL.
    if job.model is not None and is_plan_file(job.model):
        if plan_file is not None:
            raise PlanError(f"--plan {plan_file} and {job.model} are two plans; allowed: one")
        job, plan_file = replace(job, model=None), job.model
    setting = with_bucket_size(read_setting(job, plan_file), replication)
    plan = resolve_plan(setting, {**layout, **replication})
    check_json(output)
    with progress_bar() as progress:
        explanation = explain(
            setting.job,
            plan,
            setting.cluster,
            setting.stack,
            memory_limit_bytes=setting.memory_limit_bytes,
            progress=progress,
        )
    show(
        output.json,
        lambda: explanation_document(explanation),
        lambda: explanation_report(explanation),
        STEP_WIDTH,
    )
    print_written(output)
    return 0


def run_compare(
    words: "WordOptions",
    job: "JobOptions",
    layout: "Given",
    limits: "Given",
    output: "OutputOptions",
) -> int:
    """Run ``meshwright compare``; return its exit status."""
    from meshwright.planner.compare import (
        Comparison,
        comparison_document,
        comparison_report,
        write_comparison,
    )

    given = words.words or []
    stacks: list[str | None] = [None]
    if job.stack is not None:
        # compare takes several stacks where other commands take one.
        stacks = [each.strip() for each in job.stack.split(",")]
    are_plans = _are_plans(given, len(stacks))
    folder = check_outputs(output)
    jobs, refused = _jobs(job, stacks, given[0], is_plan=are_plans)
    stacks = [each.stack for each in jobs]
    fields = {**layout, **limits}
    written: tuple[str, ...] = ()
    with progress_bar() as progress:
        if are_plans:
            steps = list(_simulated(given, jobs, fields, progress))
        else:
            steps = [_best(replace(each, model=given[0]), fields, progress) for each in jobs]
        names = _names(given, [str(stack) for stack in stacks], are_plans=are_plans)
        comparison = Comparison(names=tuple(names), steps=tuple(steps), refused=refused)
        if folder is not None:
            tell(progress, "drawing the picture")
            written = write_comparison(comparison, folder)
    show(
        output.json,
        lambda: comparison_document(comparison),
        lambda: comparison_report(comparison),
        STEP_WIDTH,
    )
    print_written(output, written)
    return 0


def _jobs(
    job: "JobOptions", stacks: Sequence[str | None], word: str, *, is_plan: bool
) -> tuple[list["JobOptions"], dict[str, str]]:
    """Return the job with each stack, and the refusals of stacks that lack a fact of --set.

    Raises:
        ProfileError: If all do, or a stack is at fault.
    """
    from meshwright.planner.cli.request import read_setting

    # Without --set no stack can lack a fact; of one stack its own error is clearer.
    if not job.set or len(stacks) == 1:
        return [replace(job, stack=stack) for stack in stacks], {}
    accepted: list[JobOptions] = []
    refused: dict[str, str] = {}
    for number, stack in enumerate(stacks, 1):
        with_stack = replace(job, stack=stack)
        try:
            read_setting(with_stack, word if is_plan else None, model=None if is_plan else word)
        except ProfileError as error:
            # Where all are refused the last refusal is the error.
            is_last = number == len(stacks) and not accepted
            if is_last or not str(error).startswith("--set"):
                raise
            refused[str(stack)] = str(error)
        else:
            accepted.append(with_stack)
    return accepted, refused


def _are_plans(given: Sequence[str], num_stacks: int) -> bool:
    """Return True for plans, False for one model.

    Raises:
        PlanError: If neither or both are, or too few or too many.
    """
    from meshwright.planner.reports import is_plan_file

    kinds = {is_plan_file(each) for each in given}
    if len(kinds) != 1 or (kinds == {False} and len(given) > 1):
        raise PlanError("compare needs plans, or one model; allowed: PLAN PLAN ..., or MODEL")
    count = len(given) * num_stacks
    if not FEWEST_COMPARED <= count <= MOST_COMPARED:
        raise PlanError(
            f"{count} to compare; allowed {FEWEST_COMPARED} to {MOST_COMPARED}: "
            "plans, or --stack A,B"
        )
    return kinds == {True}


def _names(given: Sequence[str], stacks: Sequence[str], *, are_plans: bool) -> list[str]:
    """Return the names of the compared plans: their files, the stacks, or both."""
    if not are_plans:
        return list(stacks)
    plans = _short(given)
    if len(stacks) == 1:
        return plans
    return [stack if len(plans) == 1 else f"{plan} {stack}" for plan in plans for stack in stacks]


def _short(paths: Sequence[str]) -> list[str]:
    """Return the paths without the parts that all share.

    >>> _short(["a/plan.json", "b/plan.json"]), _short(["out/plan.json", "out/plan-2.json"])
    (['a', 'b'], ['plan', 'plan-2'])
    """
    parts = [Path(each).with_suffix("").parts for each in paths]
    if len(paths) == 1:
        return [parts[0][-1]]
    shortest = min(len(each) for each in parts)
    # One part at least is left of each path as its name.
    ahead = next((n for n in range(shortest) if len({each[n] for each in parts}) > 1), shortest - 1)
    behind = next((n for n in range(shortest) if len({each[-1 - n] for each in parts}) > 1), 0)
    names = ["/".join(each[ahead : len(each) - behind]) for each in parts]
    return names if len(set(names)) == len(names) else list(paths)


def _simulated(
    plans: Sequence[str], jobs: "Sequence[JobOptions]", given: "Given", progress: "Progress | None"
) -> "Iterator[StepResult]":
    """Yield the step of each plan with each stack."""
    from meshwright.planner.cli.growth import step_of
    from meshwright.planner.cli.request import read_setting, resolve_plan
    from meshwright.planner.options import SEARCH_OPTIONS

    # A plan is not searched: such options would be ignored in silence.
    for limit in given:
        if limit.startswith("max_"):
            raise PlanError("--max-... has no effect on plans; allowed: with MODEL")
        if limit in SEARCH_OPTIONS:
            name = SEARCH_OPTIONS[limit].name
            raise PlanError(f"--{name} has no effect on plans; allowed: with MODEL")
    for number, plan in enumerate(plans):
        for job in jobs:
            if progress is not None:
                progress("simulating plans", number, len(plans))
            setting = read_setting(job, plan)
            yield step_of(setting, resolve_plan(setting, given))


def _best(job: "JobOptions", given: "Given", progress: "Progress | None") -> "StepResult":
    """Return the fastest step of a model with a stack, or that of the layout nearest to fitting."""
    from meshwright.planner.cli.growth import searched, step_of
    from meshwright.planner.cli.request import read_setting
    from meshwright.planner.cli.search_request import read_limits
    from meshwright.planner.options import RankingOptions

    setting = read_setting(job)
    _, result = searched(setting, read_limits(setting, given), RankingOptions(top=1), progress)
    if result.plans:
        return result.plans[0]
    if result.nearest is None:
        raise PlanError(f"stack {setting.stack.name} has no layout of {setting.world_size} GPUs")
    return step_of(setting, result.nearest.plan)
