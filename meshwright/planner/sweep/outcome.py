"""Outcome of a cell, as the document that is kept of it: run here or in any other process."""

import json
from enum import StrEnum
from typing import TypeAlias

from meshwright.hwprofiles import ProfileError, format_bytes
from meshwright.planner.reports import (
    Json,
    layout_text,
    plan_document,
    plan_fields,
    proof_fields,
    saved_plan,
    step_document,
)
from meshwright.planner.search import SearchResult, search
from meshwright.planner.space import waste_hints
from meshwright.planner.sweep.grid import Task
from meshwright.simulator import PlanError, ResolvedPlan, StepResult, simulate

Document: TypeAlias = dict[str, Json]


class Outcome(StrEnum):
    """Outcomes of a cell."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    NOTHING_FITS = "nothing fits"
    REFUSED = "refused"


def run_task(task: Task) -> Document:
    """Return the document of a task; the same task gives the same document."""
    try:
        document = _simulated(task, task.plan) if task.plan is not None else _searched(task)
    except (PlanError, ProfileError) as error:
        document = refused(str(error))
    # As a file of it is read, so that it is the same whether or not it went through one.
    read_back: Document = json.loads(json.dumps(document))
    return read_back


def refused(reason: str) -> Document:
    """Return the document of a cell that cannot run."""
    return {"outcome": Outcome.REFUSED, "reason": reason}


def _simulated(task: Task, plan: ResolvedPlan) -> Document:
    limit_bytes = task.memory_limit_bytes
    step = simulate(task.job, plan, task.cluster, task.stack, memory_limit_bytes=limit_bytes)
    memory = step.memory
    if memory.fits:
        return {"outcome": Outcome.FITS, "reason": "", **_kept(step)}
    lacks = memory.device_bytes - memory.usable_bytes
    reason = f"lacks {format_bytes(lacks)}" if lacks > 0 else "the host lacks memory"
    return {"outcome": Outcome.DOES_NOT_FIT, "reason": reason, **_kept(step)}


def _searched(task: Task) -> Document:
    result = search(
        task.job,
        task.cluster,
        task.stack,
        task.num_gpus,
        limits=task.limits,
        memory_limit_bytes=task.memory_limit_bytes,
        top=1,
        explains=False,
    )
    proof = proof_fields(result)
    if result.plans:
        return {
            "outcome": Outcome.FITS,
            "reason": "",
            "search": proof,
            **_kept(result.plans[0]),
        }
    return {"outcome": Outcome.NOTHING_FITS, "search": proof, **_nearest(result)}


def _nearest(result: SearchResult) -> Document:
    nearest = result.nearest
    if nearest is None:
        hints = waste_hints(result.job, result.cluster, result.num_gpus)
        return {"reason": "; ".join(["no layout has what is asked for", *hints])}
    layout = layout_text(nearest.plan, result.job)
    return {
        "reason": f"lacks {format_bytes(nearest.lacks_bytes)} with {layout}",
        "lacks_bytes": nearest.lacks_bytes,
        "nearest": plan_fields(nearest.plan),
    }


def _kept(step: StepResult) -> Document:
    return {"step": step_document(step), "plan_file": plan_document(saved_plan(step))}
