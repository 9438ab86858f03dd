"""Event engine for task graphs: tasks that hold resources, in order of readiness.

A mesh of ranks runs action lists (`run`); other training strategies are task graphs.
"""

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, cast

from simpy import Environment, Event

from meshwright.simulator.errors import DeadlockError


class TaskKind(StrEnum):
    """Kind of a task; a colour of the timeline."""

    LAUNCH = "kernel launches"
    FORWARD = "forward"
    BACKWARD = "backward"
    LOSS = "loss"
    OPTIMIZER = "optimizer"
    SUM = "gradient sum"
    SCATTER = "scatter"
    GATHER = "gather"
    BROADCAST = "parameter broadcast"
    REDUCTION = "gradient reduction"
    PULL = "parameter pull"
    PUSH = "gradient push"


class Task(NamedTuple):
    """A task of the graph.

    Args:
        name: Name for messages and timelines.
        kind: Kind of work.
        duration_ps: Time that it holds its resources.
        resources: Resources that it holds, all at once; each has one user at a time.
        after: Positions of the tasks that must end before it.
        size_bytes: Bytes of a transfer, else 0.
    """

    name: str
    kind: TaskKind
    duration_ps: int
    resources: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    size_bytes: int = 0


class TaskTimes(NamedTuple):
    """Start and end of a task."""

    start_ps: int
    end_ps: int


class TaskRun:
    """A run of a task graph.

    A task that has become ready joins the queue of each of its resources; tasks that become ready
    in the same picosecond do so in the order of their positions.  It starts when it heads all of
    its queues and all of its resources are free.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._env = Environment()
        self._tasks = tasks
        self._num_predecessors = [len(set(task.after)) for task in tasks]
        self._successors: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            # A task may name a predecessor twice: two parts of it wait for one end.
            for before in dict.fromkeys(task.after):
                self._successors[before].append(index)
        # Ordered for determinism: a set of names differs from process to process.
        names = dict.fromkeys(name for task in tasks for name in task.resources)
        self._queues: dict[str, deque[int]] = {name: deque() for name in names}
        self._busy_resources: set[str] = set()
        self._ready = [index for index, missing in enumerate(self._num_predecessors) if not missing]
        self._freed: list[str] = []
        self._times: dict[int, TaskTimes] = {}

    def times(self) -> tuple[TaskTimes, ...]:
        """Run to the end and return the times of each task.

        Raises:
            DeadlockError: If tasks are left that wait for each other.
        """
        self._dispatch(Event(self._env))
        self._env.run()
        if len(self._times) < len(self._tasks):
            raise DeadlockError(self._deadlock_message())
        return tuple(self._times[index] for index in range(len(self._tasks)))

    def _deadlock_message(self) -> str:
        left = [index for index in range(len(self._tasks)) if index not in self._times]
        first = self._tasks[left[0]]
        waits = [self._tasks[each].name for each in first.after if each not in self._times]
        return (
            f"{len(left)} of {len(self._tasks)} tasks never ran; {first.name} waits for "
            f"{', '.join(waits)}"
        )

    def _dispatch(self, _: Event) -> None:
        """Queue the tasks that have become ready, and start those that can start."""
        ready, freed = sorted(self._ready), self._freed
        self._ready, self._freed = [], []
        for index in ready:
            for name in self._tasks[index].resources:
                self._queues[name].append(index)
        # Two that can start share no resource, each being first in all its queues, so the order in
        # which they are tried does not decide who runs.
        heads = [self._queues[name][0] for name in freed if self._queues[name]]
        for index in dict.fromkeys([*heads, *ready]):
            if self._can_start(index):
                self._start(index)

    def _can_start(self, index: int) -> bool:
        # All resources or none: hold-and-wait could deadlock.
        names = self._tasks[index].resources
        return all(
            name not in self._busy_resources and self._queues[name][0] == index for name in names
        )

    def _start(self, index: int) -> None:
        task = self._tasks[index]
        for name in task.resources:
            self._queues[name].popleft()
            self._busy_resources.add(name)
        ends = self._env.timeout(task.duration_ps, value=index)
        ends.callbacks.append(self._finish)

    def _finish(self, event: Event) -> None:
        index, now_ps = cast("int", event.value), int(self._env.now)
        task = self._tasks[index]
        self._times[index] = TaskTimes(now_ps - task.duration_ps, now_ps)
        if not self._ready and not self._freed:
            # Other tasks that end in this picosecond come first, so that successors queue by
            # position.
            self._env.timeout(0).callbacks.append(self._dispatch)
        self._busy_resources.difference_update(task.resources)
        self._freed.extend(task.resources)
        for successor in self._successors[index]:
            self._num_predecessors[successor] -= 1
            if not self._num_predecessors[successor]:
                self._ready.append(successor)


def simulate_tasks(tasks: Sequence[Task]) -> tuple[TaskTimes, ...]:
    """Return start and end of each of *tasks*.

    >>> forward, port = TaskKind.FORWARD, ("port",)
    >>> simulate_tasks([Task("a", forward, 5), Task("b", forward, 2, port, (0,))])[1]
    TaskTimes(start_ps=5, end_ps=7)
    """
    return TaskRun(tasks).times()
