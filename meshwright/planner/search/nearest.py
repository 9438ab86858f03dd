"""Layouts besides the proven ones: the nearest where none fits, and faster unlaunchable ones."""

from dataclasses import replace

import numpy as np

from meshwright.planner.changes import cheapest_changes
from meshwright.planner.search.finalists import NEVER_PS, Field, Finalists, Progress
from meshwright.planner.search.result import Nearest, Unlaunchable
from meshwright.planner.space import Candidates, Column, apply_rules
from meshwright.simulator.launching import refusal_text
from meshwright.simulator.layout import Axis

# Layouts with the least lower bounds of memory that are sized exactly first.
FIRST_SIZED = 1000
# Passes that are simulated to find a faster layout that the framework cannot be told.
UNLAUNCHABLE_PASSES = 100_000


def find_nearest(
    candidates: Candidates, field: Field, limit_bytes: int, progress: Progress | None
) -> Nearest | None:
    """Return the layout with the least memory of those that memory alone rules out.

    One whose tensor parallelism crosses nodes is named only where all do.

    Args:
        candidates: Input of rules.
        field: The layouts.
        limit_bytes: Memory limit of a device.
        progress: Called after each simulation of a change; None looks for none.

    Returns:
        None where there is no such layout.
    """
    # Without the memory rule: every other rule still has to hold.
    left, _ = apply_rules(replace(candidates, device_bytes=np.zeros_like(candidates.device_bytes)))
    indices = np.flatnonzero(left)
    if not len(indices):
        return None
    is_inside = candidates.space.column(Axis.TP)[indices] <= candidates.cluster.devices_per_node
    indices = indices[is_inside] if is_inside.any() else indices
    indices, needed = _least_needed(field, indices)
    place = int(np.argmin(needed))
    index, limit, runs = int(indices[place]), candidates.memory_limit_bytes, field.runs
    is_unchanged = progress is None or runs.is_too_long(index)
    return Nearest(
        plan=candidates.space.plan(index),
        lacks_bytes=int(needed[place]) - limit_bytes,
        changes=()
        if is_unchanged
        else cheapest_changes(runs.result(index, limit), limit, progress),
    )


def _least_needed(field: Field, indices: Column) -> tuple[Column, Column]:
    """Return those of *indices* that may need least, and the exact memory of each.

    The lower bounds of others exceed the least exact memory already.
    """
    known = field.runs.device_bytes[indices]
    if field.needed_bytes is None:
        return indices, known
    count = min(FIRST_SIZED, len(indices))
    first = indices[np.argpartition(known, count - 1)[:count]]
    indices = indices[known <= field.needed_bytes(first).min()]
    return indices, field.needed_bytes(indices)


def find_unlaunchable(
    candidates: Candidates, field: Field, finalists: Finalists, tell: Progress
) -> Unlaunchable | None:
    """Return the fastest layout the framework cannot express, if it beats the best.

    Args:
        candidates: Input of rules.
        field: The layouts.
        finalists: Simulated layouts that the framework can express.
        tell: Called after each run.
    """
    runs, space = field.runs, candidates.space
    if space.launcher is None:
        return None
    left, _ = apply_rules(replace(candidates, space=replace(space, launcher=None)))
    left[finalists.indices] = False
    others, bounds = np.flatnonzero(left), field.bounds(np.flatnonzero(left))
    known = (runs.step_ps[index] for index in finalists.indices.tolist() if index in runs.step_ps)
    best_ps = min(known, default=NEVER_PS)
    others = others[bounds.bounds_ps[others] < best_ps]
    if not len(others):
        return None
    tell("simulating layouts that no framework is told", 0, 0)
    proof = Finalists(others, bounds, runs).fastest(1, runs.num_passes + UNLAUNCHABLE_PASSES)
    if not proof.indices or runs.step_ps[proof.indices[0]] >= best_ps:
        return None
    index = proof.indices[0]
    plan, framework = space.plan(index), space.launcher.framework.name
    gaps = [each for each in space.launcher.gaps(space.stack, space.job) if each.lacks(plan.number)]
    refusals = (refusal_text(gap, getattr(plan, gap.field, None), framework) for gap in gaps)
    return Unlaunchable(
        plan=plan,
        step_ps=runs.step_ps[index],
        device_bytes=int(runs.device_bytes[index]),
        refusals=tuple(dict.fromkeys(refusals)),
    )
