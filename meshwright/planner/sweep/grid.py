"""Cells of a sweep: every combination of options, resolved before anything runs.

What a cell needs travels with it, so that a process elsewhere needs none of the user's files.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from meshwright.hwprofiles import Cluster, ProfileError, StackProfile
from meshwright.planner.cli import (
    Setting,
    read_limits,
    read_setting,
    resolve_plan,
    with_bucket_size,
)
from meshwright.planner.options import REPLICATION, SEARCH_OPTIONS, SWEPT, JobOptions
from meshwright.planner.reports import job_fields, known_by, plan_fields
from meshwright.planner.space import SpaceLimits
from meshwright.planner.sweep.varied import MOST_CELLS, Value, Variation
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob
from meshwright.simulator.layout import SEARCHED_FIELDS

REPLICATED = {each.key for each in REPLICATION.options}
SEARCHED = {each.name for each in SEARCHED_FIELDS}
GPUS, BATCH, STACK = "gpus", "global_batch", "stack"
SET = "--set"  # begins what is wrong with a fact that is set


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Options of a sweep.

    Args:
        varied: What is varied, the last one fastest.
        job: Options of the job that all cells have.
        fields: Options of the layout that all cells have.
        plan: A plan file to start from.
        is_weak: Whether the batch grows with the devices.
        is_simulation: Whether a cell is one layout, which is simulated, instead of a search.
    """

    varied: tuple[Variation, ...]
    job: JobOptions
    fields: Mapping[str, object] = field(default_factory=dict)
    plan: str | None = None
    is_weak: bool = False
    is_simulation: bool = False


class Task(NamedTuple):
    """Work of a process for a cell: a search, or the simulation of a plan."""

    job: TrainingJob
    cluster: Cluster
    stack: StackProfile
    num_gpus: int
    memory_limit_bytes: int | None
    limits: SpaceLimits | None
    plan: ResolvedPlan | None

    @property
    def digest(self) -> str:
        """Digest that equal tasks share."""
        job = self.job
        content = [
            *(each.model_dump(mode="json") for each in (job.model, self.cluster, self.stack)),
            *(job_fields(job), self.num_gpus, self.memory_limit_bytes, repr(self.limits)),
            None if self.plan is None else plan_fields(self.plan),
        ]
        # Sorted, so that the order of a dict does not make another task.
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Cell(NamedTuple):
    """One combination of the values of a sweep.

    Args:
        number: Counted from 1.
        values: What it has of each, in order.
        setting: What all results are known by: model, cluster, devices, batch and length.
        price_usd_per_gpu_hour: Of its cluster, if that is known.
        task: What is run, or why that cannot be.
    """

    number: int
    values: tuple[Value, ...]
    setting: Mapping[str, Any]
    price_usd_per_gpu_hour: float | None
    task: Task | str

    @property
    def sample(self) -> str:
        """Unit of its batch; empty where the cell cannot run."""
        return self.task.job.model.sample if isinstance(self.task, Task) else ""


def cells_of(request: Request) -> tuple[Cell, ...]:
    """Return all cells of a sweep.

    A combination that cannot be is a cell with the reason. A value that no combination can have
    is a mistake.

    Raises:
        PlanError: If there is such a value, or there are too many cells.
    """
    _check(request)
    combinations = list(product(*(each.values for each in request.varied)))
    # Refused before any cell is resolved.
    if len(combinations) > MOST_CELLS:
        raise PlanError(f"{len(combinations):,} cells are too many; allowed: {MOST_CELLS:,}")
    cells = tuple(_cell(request, number, each) for number, each in enumerate(combinations, 1))
    _check_values(request, cells)
    return cells


def _check_values(request: Request, cells: Sequence[Cell]) -> None:
    """Raise PlanError when a value is one that no combination can have."""
    reasons = {each.task if isinstance(each.task, str) else "" for each in cells}
    if len(reasons) == 1 and len(cells) > 1 and "" not in reasons:
        raise PlanError(reasons.pop())  # whatever is varied
    for index, variation in enumerate(request.varied):
        for value in variation.values:
            tasks = [each.task for each in cells if each.values[index] == value]
            # What is set of all, and one stack lacks, is no mistake in the stack's name.
            is_lacking = variation.key == STACK and str(tasks[0]).startswith(SET)
            if not is_lacking and all(isinstance(each, str) for each in tasks):
                prefix = f"--vary {variation.name}={value.text}: "
                reason = str(tasks[0])
                raise PlanError(reason if reason.startswith("--vary ") else f"{prefix}{reason}")


def _check(request: Request) -> None:
    """Raise PlanError when options do not fit a search, or a simulation."""
    names = {each.key: each.name for each in request.varied if each.key}
    if request.is_weak and GPUS not in names:
        raise PlanError("--weak needs --vary gpus=...: the batch grows with the devices")
    given = {each.key: f"--{each.name.replace('_', '-')}" for each in SWEPT.options}
    for key in (*request.fields, *names):
        if (key.startswith("max_") or key in SEARCH_OPTIONS) and request.is_simulation:
            raise PlanError(f"{given[key]} has no effect on one layout; allowed: no --simulate")
        if key in REPLICATED - SEARCHED and not request.is_simulation:
            raise PlanError(f"{given[key]} is not searched; allowed: with --simulate")
    if (request.plan is not None or "plan" in names) and not request.is_simulation:
        raise PlanError("--plan is one layout; allowed: with --simulate")
    if "plan" in names and request.plan is not None:
        raise PlanError("--plan and --vary plan contradict each other")


def _cell(request: Request, number: int, values: Sequence[Value]) -> Cell:
    """Return the cell of *values*."""
    job, given, plan_file = _options(request, values)
    setting: Mapping[str, Any] = {
        "model": job.model,
        "cluster": job.cluster,
        "stack": job.stack,
        "num_gpus": job.gpus,
        "global_batch_size": job.global_batch,
        "seq_len": job.seq_len,
        "precision": job.precision,
    }
    price = None
    try:
        if request.is_weak:
            job = replace(job, global_batch=_grown_batch(request, job))
        cell_setting = read_setting(job, plan_file)
        setting = known_by(
            cell_setting.job, cell_setting.cluster, cell_setting.stack, cell_setting.world_size
        )
        price = cell_setting.cluster.price_usd_per_gpu_hour
        task: Task | str = _task(cell_setting, given, is_simulation=request.is_simulation)
    except (PlanError, ProfileError) as error:
        task = _as_written(str(error), request, values)
    return Cell(number, tuple(values), setting, price, task)


def _options(
    request: Request, values: Sequence[Value]
) -> tuple[JobOptions, dict[str, object], str | None]:
    """Return the options of a cell: those of all, with its own in their place."""
    chosen = list(zip(request.varied, values, strict=True))
    facts = [f"{each.name}={value.text}" for each, value in chosen if each.is_fact]
    given = {each.key: value.content for each, value in chosen if each.key}
    job: dict[str, Any] = {each.key: given.pop(each.key) for each, _ in chosen if each.is_of_job}
    plan = given.pop("plan", request.plan)
    options = replace(request.job, **job, set=[*(request.job.set or ()), *facts])
    return options, {**request.fields, **given}, None if plan is None else str(plan)


def _grown_batch(request: Request, job: JobOptions) -> int | None:
    """Return the batch that is to the first one as the devices are to the first ones."""
    (gpus,) = (each for each in request.varied if each.key == GPUS)
    first, batch = gpus.values[0].content, job.global_batch
    assert isinstance(first, int)
    if batch is None or job.gpus is None or first < 1:
        return batch
    if batch * job.gpus % first:
        raise PlanError(
            f"a batch of {batch} x {job.gpus} / {first} GPUs is no whole number; allowed: "
            "a batch that the GPUs divide"
        )
    return batch * job.gpus // first


def _task(setting: Setting, given: Mapping[str, object], *, is_simulation: bool) -> Task:
    if not is_simulation:
        limits, plan = read_limits(setting, given), None
    else:
        # A search does not vary the bucket size.
        setting = with_bucket_size(setting, given)
        limits, plan = None, resolve_plan(setting, given)
    return Task(
        job=setting.job,
        cluster=setting.cluster,
        stack=setting.stack,
        num_gpus=setting.world_size,
        memory_limit_bytes=setting.memory_limit_bytes,
        limits=limits,
        plan=plan,
    )


def _as_written(text: str, request: Request, values: Sequence[Value]) -> str:
    """Return a refusal of a fact with the option that the user wrote."""
    for variation, value in zip(request.varied, values, strict=True):
        written = f"{variation.name}={value.text}: "
        if text.startswith(f"--set {written}"):
            return text.replace("--set", "--vary", 1)
    return text


def tasks_of(cells: Sequence[Cell]) -> Iterator[tuple[int, Task]]:
    """Yield the number and the task of each cell that can be run."""
    for each in cells:
        if isinstance(each.task, Task):
            yield each.number, each.task
