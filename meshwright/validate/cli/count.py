"""The command ``meshwright count``: a user's frames script as one rank of any world.

Imports are local, so that the other commands wait for none of it, and PyTorch is imported only by
what runs it.
"""
# ruff: noqa: PLC0415

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.planner.cli import STEP_WIDTH, check_outputs, progress_bar, show, write_text
from meshwright.planner.options import MAX_GPUS, argument, option
from meshwright.simulator import ModelSpec, PlanError
from meshwright.validate.cli.options import ValidateOutput, check_range
from meshwright.validate.ranks import SCRIPT_STEPS, Backend

if TYPE_CHECKING:
    from meshwright.planner.reports import SavedPlan
    from meshwright.validate.scripts import ScriptCount, ScriptFailedError, ScriptRun

DISAGREES = FAILED = 1
MOST_STEPS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CountOptions:
    """Script to count, and the rank and world size that it sees."""

    script: list[str] | None = argument(
        None, "SCRIPT [ARGS]", "As after torchrun; or -- -m MODULE [ARGS]."
    )
    rank: int = option(0, "R", "Which rank it is.")
    world: int | None = option(None, "N", "How many ranks there are [the plan's, or 1].")
    steps: int = option(SCRIPT_STEPS, "K", "Optimizer steps to run; the last is counted.")
    plan: str | None = option(None, "PLAN", "A plan.json; compare with what it predicts.")


def run_count(options: CountOptions, output: ValidateOutput) -> int:
    """Run ``meshwright count``; return its exit status."""
    from meshwright.planner.reports import read_runnable_plan
    from meshwright.validate.runs import check_torch

    saved = None if options.plan is None else read_runnable_plan(Path(options.plan))
    world = _world(options, saved)
    folder = check_outputs(output)
    check_torch("count")
    from meshwright.validate.scripts import ScriptFailedError, ScriptRun, check_script, write_count

    words = tuple(options.script or ())
    check_script(words)
    run = ScriptRun(
        words=words,
        rank=options.rank,
        world_size=world,
        num_steps=options.steps,
        groups=_names(options.rank, saved),
    )
    try:
        count = _counted(run)
    except ScriptFailedError as failure:
        return _fail(failure)
    if folder is not None:
        write_count(count, folder)
    return _show(count, saved, output)


def _counted(run: "ScriptRun") -> "ScriptCount":
    from meshwright.validate.scripts import count_script

    with progress_bar() as progress:
        if progress is not None:
            progress("steps", 0, run.num_steps)
        return count_script(
            run, lambda done: progress("steps", done, run.num_steps) if progress else None
        )


def _names(rank: int, saved: "SavedPlan | None") -> dict[tuple[int, ...], str]:
    """Return the axes of a plan by the ranks of their groups; none without a plan."""
    from meshwright.validate.ranks import plan_groups

    if saved is None:
        return {}
    model = saved.job.model
    is_tied = isinstance(model, ModelSpec) and model.tied_embeddings
    return plan_groups(saved.plan, rank, is_tied=is_tied)


def _show(count: "ScriptCount", saved: "SavedPlan | None", output: ValidateOutput) -> int:
    """Print a count and its comparison with a plan, if any; return the exit status."""
    from rich.console import Group

    from meshwright.validate.comparison import (
        Validation,
        rank_kinds,
        validation_document,
        validation_report,
    )
    from meshwright.validate.scripts import count_document, count_report

    if saved is None:
        show(output.json, lambda: count_document(count), lambda: count_report(count), STEP_WIDTH)
        return 0
    measurements = {count.run.rank: count.measurement}
    validation = Validation(
        saved=saved,
        backend=Backend.FAKE,
        num_microbatches=saved.plan.num_microbatches(saved.job),
        measurements=measurements,
        kinds=rank_kinds(saved, measurements),
    )
    report = Group(count_report(count), "", validation_report(validation))
    show(
        output.json,
        lambda: {**count_document(count), "comparison": validation_document(validation)},
        lambda: report,
        STEP_WIDTH,
    )
    return 0 if validation.agrees else DISAGREES


def _fail(failure: "ScriptFailedError") -> int:
    """Print how a script failed, with its frames traceback; return the exit status."""
    import traceback

    cause = failure.__cause__
    assert cause is not None  # it is raised from one
    if not isinstance(cause, SystemExit):
        frames = traceback.extract_tb(cause.__traceback__)
        through = [i for i, frame in enumerate(frames) if "runpy" in frame.filename]
        # Frames up to runpy are ours; the user knows those of the script.
        start = through[-1] + 1 if through else 0
        tail = traceback.format_list(frames[start:]) + traceback.format_exception_only(cause)
        lines = ["Traceback (most recent call last):\n", *tail]
        write_text(sys.stderr, "".join(lines))
    elif isinstance(cause.code, str):
        write_text(sys.stderr, f"{cause.code}\n")
    write_text(sys.stderr, f"error: {failure}\n")
    return FAILED


def _world(options: CountOptions, saved: "SavedPlan | None") -> int:
    """Return the world size.

    Raises:
        PlanError: If a number is out of range, or not the plan's.
    """
    from meshwright.validate.ranks import num_members

    check_range("--steps", options.steps, MOST_STEPS)
    check_range("--world", options.world, MAX_GPUS)
    planned = None if saved is None else num_members(saved)
    if planned is not None and options.world not in (None, planned):
        raise PlanError(f"--world {options.world} is not the plan's; allowed: {planned}")
    world = options.world or planned or 1
    if not 0 <= options.rank < world:
        raise PlanError(f"--rank {options.rank} is out of range; allowed 0 to {world - 1}")
    return world
