"""Lanes of a step's picture: the tasks of each resource of a task graph over time."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from meshwright.simulator.engine import Task, TaskKind, TaskTimes


class LaneSpan(NamedTuple):
    """Time in which a task holds a resource; *size_bytes* is the size of its transfer."""

    kind: TaskKind
    name: str
    start_ps: int
    end_ps: int
    size_bytes: int = 0


class ResourceLane(NamedTuple):
    """A device, a host or one direction of a link, with its spans in order and disjoint."""

    name: str
    spans: tuple[LaneSpan, ...]

    @property
    def busy_ps(self) -> int:
        """Time in which the resource is held."""
        return sum(span.end_ps - span.start_ps for span in self.spans)

    def moved_bytes(self, kinds: Collection[TaskKind] = tuple(TaskKind)) -> int:
        """Return the bytes that cross the resource in tasks of *kinds*."""
        return sum(span.size_bytes for span in self.spans if span.kind in kinds)


def task_lanes(
    tasks: Sequence[Task], times: Sequence[TaskTimes], end_ps: int
) -> tuple[ResourceLane, ...]:
    """Return a lane for each resource of *tasks*, by name, of tasks that end by *end_ps*."""
    spans: dict[str, list[LaneSpan]] = {}
    for task, task_times in zip(tasks, times, strict=True):
        for name in task.resources:
            lane = spans.setdefault(name, [])
            # Tasks of no duration would be invisible slices.
            if task_times.start_ps < task_times.end_ps <= end_ps:
                span = LaneSpan(
                    task.kind, task.name, task_times.start_ps, task_times.end_ps, task.size_bytes
                )
                lane.append(span)
    return tuple(
        ResourceLane(name, tuple(sorted(spans[name], key=lambda span: span.start_ps)))
        for name in sorted(spans, key=_natural_key)
    )


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key of names by word length first, so that 2 comes before 10."""
    return [(len(word), word) for word in name.split()]
