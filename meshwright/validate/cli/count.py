"""The command ``meshwright count``: a user's own script as one rank of any world.

Imports are local, so that the other commands wait for none of it, and PyTorch is imported only by
what runs it.
"""
# ruff: noqa: PLC0415

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.planner.cli import STEP_WIDTH, check_outputs, progress_bar, show
from meshwright.planner.options import MAX_GPUS, OutputOptions
from meshwright.simulator import PlanError
from meshwright.validate.cli.options import check_range

if TYPE_CHECKING:
    from meshwright.planner.reports import SavedPlan
    from meshwright.validate.scripts import ScriptCount, ScriptRun

MOST_STEPS = 1_000
DEFAULT_STEPS = 3  # the first makes optimizer states, the second rebuilds DDP's buckets


@dataclass(frozen=True, kw_only=True, slots=True)
class CountOptions:
    """Which script to count, and as whom."""

    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- SCRIPT [ARGS]", help="As after torchrun; or -m MODULE [ARGS]."),
    ] = None
    rank: Annotated[int, typer.Option(metavar="R", help="Which rank it is.")] = 0
    world: Annotated[
        int | None, typer.Option(metavar="N", help="How many ranks there are [the plan's, or 1].")
    ] = None
    steps: Annotated[
        int, typer.Option(metavar="K", help="Optimizer steps to run; the last is counted.")
    ] = DEFAULT_STEPS
    plan: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="A plan.json; compare with what it predicts."),
    ] = None


def run_count(options: CountOptions, output: OutputOptions) -> int:
    """Count what one rank of a training script computes, sends and holds, without GPUs."""
    from meshwright.planner.reports import read_plan
    from meshwright.validate.runs import check_torch

    words = tuple(options.script or ())
    saved = None if options.plan is None else read_plan(Path(options.plan))
    run_as = _world(options, saved)
    folder = check_outputs(output)
    check_torch("count")
    from meshwright.validate.scripts import (
        ScriptRun,
        check_script,
        count_document,
        count_report,
        count_script,
        write_count,
    )

    check_script(words)
    run = ScriptRun(words=words, rank=options.rank, world_size=run_as, num_steps=options.steps)
    with progress_bar() as progress:
        if progress is not None:
            progress("steps", 0, options.steps)
        count = count_script(run, lambda done: progress and progress("steps", done, options.steps))
    if folder is not None:
        write_count(count, folder)
    show(output.json, count_document(count), count_report(count), STEP_WIDTH)
    return 0


def _world(options: CountOptions, saved: "SavedPlan | None") -> int:
    """Return how many ranks there are.

    Raises:
        PlanError: If a number is out of range, or not the plan's.
    """
    check_range("--steps", options.steps, MOST_STEPS)
    check_range("--world", options.world, MAX_GPUS)
    world = options.world or (1 if saved is None else saved.plan.world_size)
    if not 0 <= options.rank < world:
        raise PlanError(f"--rank {options.rank} is out of range; allowed 0 to {world - 1}")
    return world
