"""The engine for task graphs, against closed forms, longest paths and its own rules."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.simulator import DeadlockError
from meshwright.simulator.account.lanes import task_lanes
from meshwright.simulator.engine import Task, TaskKind, TaskTimes, simulate_tasks

WORK = TaskKind.FORWARD


def task(duration_ps: int, *resources: str, after: tuple[int, ...] = ()) -> Task:
    return Task(f"task of {duration_ps}", WORK, duration_ps, resources, after)


@st.composite
def graphs(draw: st.DrawFn, *, num_resources: int = 3, least_ps: int = 0) -> list[Task]:
    tasks = []
    names = [f"r{index}" for index in range(num_resources)]
    for index in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else []
        held = draw(st.lists(st.sampled_from(names), max_size=2, unique=True)) if names else []
        tasks.append(task(draw(st.integers(least_ps, 9)), *held, after=tuple(after)))
    return tasks


def longest_path(tasks: list[Task]) -> list[int]:
    ends: list[int] = []
    for each in tasks:
        ends.append(max((ends[before] for before in each.after), default=0) + each.duration_ps)
    return ends


@given(durations=st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_a_chain_takes_the_sum(durations: list[int]) -> None:
    tasks = [
        task(each, after=(index - 1,) if index else ()) for index, each in enumerate(durations)
    ]
    assert simulate_tasks(tasks)[-1].end_ps == sum(durations)


@given(durations=st.lists(st.integers(0, 100), min_size=1, max_size=20))
def test_one_resource_serves_in_order_of_declaration(durations: list[int]) -> None:
    times = simulate_tasks([task(each, "port") for each in durations])
    assert [ran.end_ps for ran in times] == [
        sum(durations[: index + 1]) for index in range(len(durations))
    ]


@given(tasks=graphs(num_resources=0))
def test_nothing_shared_is_the_longest_path(tasks: list[Task]) -> None:
    assert [ran.end_ps for ran in simulate_tasks(tasks)] == longest_path(tasks)


@given(tasks=graphs())
def test_rules_hold_in_every_graph(tasks: list[Task]) -> None:
    times = simulate_tasks(tasks)
    assert times == simulate_tasks(tasks)
    for each, ran in zip(tasks, times, strict=True):
        assert ran.end_ps - ran.start_ps == each.duration_ps
        assert all(times[before].end_ps <= ran.start_ps for before in each.after)
    for one, low in zip(longest_path(tasks), times, strict=True):
        assert low.end_ps >= one
    assert max(ran.end_ps for ran in times) <= sum(each.duration_ps for each in tasks)


@given(tasks=graphs())
def test_a_resource_has_one_user_and_its_time_is_conserved(tasks: list[Task]) -> None:
    times = simulate_tasks(tasks)
    wanted: dict[str, int] = defaultdict(int)
    for each in tasks:
        for name in each.resources:
            wanted[name] += each.duration_ps
    end_ps = max(ran.end_ps for ran in times)
    for lane in task_lanes(tasks, times, end_ps):
        assert lane.busy_ps == wanted[lane.name]
        ends = [span.end_ps for span in lane.spans]
        starts = [span.start_ps for span in lane.spans]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


@given(tasks=graphs(least_ps=1))
def test_a_queue_is_in_order_of_readiness_then_of_declaration(tasks: list[Task]) -> None:
    times = simulate_tasks(tasks)
    queues: dict[str, list[tuple[int, int, TaskTimes]]] = defaultdict(list)
    for index, each in enumerate(tasks):
        ready_ps = max((times[before].end_ps for before in each.after), default=0)
        for name in each.resources:
            queues[name].append((ready_ps, index, times[index]))
    for queue in queues.values():
        starts = [ran.start_ps for _, _, ran in sorted(queue, key=lambda item: item[:2])]
        assert starts == sorted(starts)


def test_a_task_holds_all_of_its_resources_at_once() -> None:
    times = simulate_tasks([task(5, "a"), task(3, "b"), task(2, "a", "b"), task(1, "b")])
    assert [ran.start_ps for ran in times] == [0, 0, 5, 7]  # the last waits behind the third


def test_a_circle_is_a_deadlock_that_names_who_waits() -> None:
    tasks = [Task("first", WORK, 1, (), (1,)), Task("second", WORK, 1, (), (0,))]
    with pytest.raises(DeadlockError, match="2 of 2 tasks never ran; first waits for second"):
        simulate_tasks(tasks)
