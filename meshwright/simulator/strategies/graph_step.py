"""A training step as a task graph, and the accounting of its run: time, memory, sources."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from meshwright.hwprofiles import Source
from meshwright.simulator.account import (
    AsyncRun,
    MemoryResult,
    StageMemory,
    StepResult,
    plan_warnings,
    task_lanes,
)
from meshwright.simulator.costs import Category, Cost, CostModel, PhaseCost
from meshwright.simulator.engine import Task, TaskKind, TaskTimes, with_overhead
from meshwright.simulator.errors import TooManyTasksError
from meshwright.simulator.layout import ResolvedPlan, TrainingJob
from meshwright.simulator.memory import (
    MemoryEvent,
    Overheads,
    RankMemory,
    usable_bytes,
)
from meshwright.simulator.step import overhead_per_million

MAX_TASKS = 300_000
Interval = tuple[int, int]


class TaskLabel(NamedTuple):
    """Name and kind of a task."""

    name: str
    kind: TaskKind


class TaskBytes(NamedTuple):
    """Live bytes of a device, beyond its states, while a task runs."""

    task: int
    activations_bytes: int
    buffers_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphDevice:
    """A device: its compute resource, its links and host, and its memory."""

    compute: str
    links: tuple[str, ...]
    host: str = ""
    memory: RankMemory
    task_bytes: tuple[TaskBytes, ...]
    largest_tensor: str


@dataclass(slots=True)
class TaskGraph:
    """Tasks of a step, each with its cost."""

    tasks: list[Task] = field(default_factory=list)
    costs: list[PhaseCost] = field(default_factory=list)

    def add(
        self,
        label: TaskLabel,
        cost: PhaseCost,
        resources: tuple[str, ...],
        after: Iterable[int] = (),
        size_bytes: int = 0,
    ) -> int:
        """Add a task and return its index.

        Raises:
            TooManyTasksError: If there are too many to simulate.
        """
        # A step of the engine has no folding for graphs: each task is simulated.
        if len(self.tasks) == MAX_TASKS:
            raise TooManyTasksError(
                f"a step of more than {MAX_TASKS} tasks is too many to simulate; allowed: fewer "
                "microbatches (--micro-batch), workers or servers"
            )
        task = Task(*label, cost.time_ps, resources, tuple(after), size_bytes)
        self.tasks.append(task)
        self.costs.append(cost)
        return len(self.tasks) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRun:
    """A task graph that has run.

    Args:
        graph: Its tasks.
        times: Times of the tasks.
        devices: Devices of the plan in rank order, then servers.
        step_ps: Time of one step, without overhead.
        windows_ps: End of the observation of each device of the plan, a whole number of steps.
        end_ps: End of the lanes.
    """

    graph: TaskGraph
    times: tuple[TaskTimes, ...]
    devices: tuple[GraphDevice, ...]
    step_ps: int
    windows_ps: tuple[int, ...]
    end_ps: int


class StrategyCase(NamedTuple):
    """Job, plan, costs and memory limit of a simulation."""

    job: TrainingJob
    plan: ResolvedPlan
    costs: CostModel
    memory_limit_bytes: int | None


def transfer_cost(*parts: Cost) -> PhaseCost:
    """Return the cost of a transfer made of *parts*."""
    return PhaseCost.total((Category.DP_COMM, part) for part in parts)


def account_graph(
    case: StrategyCase,
    run: GraphRun,
    notes: Sequence[str] = (),
    asynchronous: AsyncRun | None = None,
) -> StepResult:
    """Return the result of a run; *notes* follow the usual warnings."""
    job, plan, costs, _ = case
    total = sum(run.graph.costs, PhaseCost())
    fractions = {source: total.source_ps(source) / max(1, total.time_ps) for source in Source}
    memory = _memory(case, run)
    step_ps = with_overhead(run.step_ps, overhead_per_million(costs.stack))
    warnings = plan_warnings(job, plan, memory, costs, fractions[Source.EXTRAPOLATED])
    return StepResult(
        job=job,
        plan=plan,
        cluster=costs.cluster,
        stack=costs.stack,
        step_ps=step_ps,
        breakdown_ps=_breakdown(run, step_ps),
        source_fractions=fractions,
        memory=memory,
        warnings=(*warnings, *notes),
        lanes=task_lanes(run.graph.tasks, run.times, run.end_ps),
        asynchronous=asynchronous,
    )


def _memory(case: StrategyCase, run: GraphRun) -> MemoryResult:
    """Return the memory of all devices, without the graph."""
    cluster, stack = case.costs.cluster, case.costs.stack
    return MemoryResult(
        overheads=Overheads.of_plan(case.job, case.plan, cluster, stack),
        capacity_bytes=cluster.device.memory_capacity_bytes,
        usable_bytes=usable_bytes(cluster, case.memory_limit_bytes),
        walk=partial(tuple, tuple(_device_memories(run))),  # not the graph, which is large
    )


def _device_memories(run: GraphRun) -> Iterator[StageMemory]:
    """Yield the memory of each device at its peak."""
    for index, device in enumerate(run.devices):
        events = [
            MemoryEvent(run.times[live.task].start_ps, run.graph.tasks[live.task].name, *live[1:])
            for live in device.task_bytes
        ]
        # Of instants as full it is the first, so that the same step names the same tensor.
        peak = max(events, key=lambda event: (event.dynamic_bytes, -event.time_ps))
        tensor = device.largest_tensor
        yield StageMemory.of(device.memory, peak, stage=index, rank=index, largest_tensor=tensor)


def _breakdown(run: GraphRun, step_ps: int) -> dict[Category, int]:
    """Return the step's time by category, averaged over the devices of the plan.

    A device computes, or else communicates, or else waits for the host's launches, or is idle.
    """
    observed = [
        (device, window_ps)
        for device, window_ps in zip(run.devices, run.windows_ps, strict=False)
        if window_ps
    ]
    parts = dict.fromkeys(Category, 0)
    tasks_by_resource = _tasks_by_resource(run)
    for device, window_ps in observed:
        computing = _spent(run, device, window_ps, tasks_by_resource)
        for category in Category:
            parts[category] += computing[category] * run.step_ps // window_ps
    parts = {category: time_ps // len(observed) for category, time_ps in parts.items()}
    # Idle is the rest, so that the categories add up to the step.
    parts[Category.BUBBLE] = run.step_ps - sum(parts.values())
    parts[Category.STEP_OVERHEAD] = step_ps - run.step_ps
    return parts


def _tasks_by_resource(run: GraphRun) -> dict[str, list[int]]:
    """Return the tasks of each resource."""
    tasks_by_resource: dict[str, list[int]] = {}
    for index, task in enumerate(run.graph.tasks):
        for name in task.resources:
            tasks_by_resource.setdefault(name, []).append(index)
    return tasks_by_resource


def _spent(
    run: GraphRun, device: GraphDevice, window_ps: int, tasks_by_resource: dict[str, list[int]]
) -> dict[Category, int]:
    """Return the time of a device by category, within its window."""

    def intervals(*names: str) -> list[Interval]:
        spans = [run.times[index] for name in names for index in tasks_by_resource.get(name, ())]
        return [(start, min(end, window_ps)) for start, end in spans if start < window_ps]

    own = [
        index for index in tasks_by_resource[device.compute] if run.times[index].end_ps <= window_ps
    ]
    total = sum((run.graph.costs[index] for index in own), PhaseCost())
    parts = {category: total.category_ps(category) for category in Category}
    computing = intervals(device.compute)
    moving = computing + intervals(*device.links)
    # Communication counts where it is exposed: compute takes precedence.
    parts[Category.DP_COMM] += covered_ps(moving) - covered_ps(computing)
    parts[Category.HOST] += covered_ps(moving + intervals(device.host)) - covered_ps(moving)
    return parts


def covered_ps(intervals: Iterable[Interval]) -> int:
    """Return the time that at least one of *intervals* covers.

    >>> covered_ps([(0, 3), (2, 5), (8, 9)])
    6
    """
    total_ps = reached_ps = 0
    for start_ps, end_ps in sorted(intervals):
        total_ps += max(0, end_ps - max(start_ps, reached_ps))
        reached_ps = max(reached_ps, end_ps)
    return total_ps
