"""One suite over the registry: what every pipeline schedule must do, and what is known of it."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest

from meshwright.hwprofiles import PipelineRuntime
from meshwright.simulator.engine import PassWork, RankWork, StepWork, simulate_folded
from meshwright.simulator.errors import PlanError
from meshwright.simulator.schedules import (
    RUNTIMES,
    SCHEDULES,
    Action,
    Phase,
    Schedule,
    get_schedule,
)

NAMES = sorted(SCHEDULES)
# Every schedule as every runtime has it.
EVERY = [
    pytest.param(schedule, id=f"{name} of {runtime}")
    for runtime, schedules in RUNTIMES.items()
    for name, schedule in sorted(schedules.items())
]
EVERY += [
    pytest.param(
        get_schedule("interleaved", PipelineRuntime.MEGATRON_CORE, size), id=f"groups of {size}"
    )
    for size in (3, 5)
]
EVERY += [
    pytest.param(
        get_schedule(name, PipelineRuntime.MEGATRON_CORE, beside=True), id=f"{name} with pairs"
    )
    for name in ("1f1b", "interleaved")
]


def sizes(
    schedule: Schedule, most_pp: int = 8, most_microbatches: int = 24
) -> Iterator[tuple[int, int, int]]:
    """Yield every (pp, num_microbatches, vpp) that *schedule* does not refuse."""
    for pp in range(1, most_pp + 1):
        for num_microbatches in range(1, most_microbatches + 1):
            for vpp in range(1, 5):
                if schedule.refusal(pp, num_microbatches, vpp) is None:
                    yield pp, num_microbatches, vpp


def equal_work(
    schedule: Schedule, size: tuple[int, int, int], forward_ps: int, backward_ps: int
) -> StepWork:
    pp, num_microbatches, vpp = size
    virtual_stage = {Phase.FORWARD: PassWork(forward_ps), Phase.BACKWARD: PassWork(backward_ps)}
    return StepWork(
        ranks=(RankWork(virtual_stages=(virtual_stage,) * vpp),) * pp,
        actions=schedule.actions(pp, num_microbatches, vpp),
        num_microbatches=num_microbatches,
    )


def most_waiting(actions: list[Action]) -> int:
    """Return the most passes of a list that have run forward and not yet backward."""
    waiting = most = 0
    for action in actions:
        waiting += 1 if action.phase is Phase.FORWARD else -1
        most = max(most, waiting)
    return most


@pytest.mark.parametrize("schedule", EVERY)
def test_each_rank_runs_each_pass_once_forward_before_backward(schedule: Schedule) -> None:
    for pp, num_microbatches, vpp in sizes(schedule):
        ranks = schedule.actions(pp, num_microbatches, vpp)
        assert len(ranks) == pp
        for actions in ranks:
            place = {action: index for index, action in enumerate(actions)}
            passes = [(c, m) for c in range(vpp) for m in range(num_microbatches)]
            assert len(actions) == len(place) == 2 * len(passes)
            for virtual_stage, microbatch in passes:
                forward = place[Action(Phase.FORWARD, virtual_stage, microbatch)]
                assert forward < place[Action(Phase.BACKWARD, virtual_stage, microbatch)]


@pytest.mark.parametrize("schedule", EVERY)
def test_passes_in_flight_are_what_the_action_list_keeps_waiting(schedule: Schedule) -> None:
    for pp, num_microbatches, vpp in sizes(schedule):
        ranks = schedule.actions(pp, num_microbatches, vpp)
        for pp_rank, actions in enumerate(ranks):
            expected = most_waiting(actions)
            assert schedule.in_flight(pp_rank, pp, num_microbatches, vpp) == expected


@pytest.mark.parametrize("schedule", EVERY)
def test_passes_around_the_last_virtual_stage_are_those_of_the_action_list(
    schedule: Schedule,
) -> None:
    for pp, num_microbatches, vpp in sizes(schedule, 5, 14):
        for pp_rank, actions in enumerate(schedule.actions(pp, num_microbatches, vpp)):
            own = [at for at, each in enumerate(actions) if each.virtual_stage == vpp - 1]
            counts = Counter(each[:2] for each in actions[own[0] : own[-1] + 1])
            passes = [(counts[Phase.FORWARD, v], counts[Phase.BACKWARD, v]) for v in range(vpp)]
            assert schedule.around_last(pp_rank, pp, num_microbatches, vpp) == passes


@pytest.mark.parametrize("schedule", EVERY)
def test_the_engine_runs_it_to_the_end_and_backward_follows_forward_in_time(
    schedule: Schedule,
) -> None:
    for size in sizes(schedule, 6, 12):
        work = equal_work(schedule, size, 2, 3)
        times = simulate_folded(work)
        for actions, rank in zip(work.actions, times.ranks, strict=True):
            assert len(rank.ends_ps) == len(actions)
            assert rank.starts_ps == sorted(rank.starts_ps)
            ends = dict(zip(actions, rank.ends_ps, strict=True))
            for action, start_ps in zip(actions, rank.starts_ps, strict=True):
                if action.phase is Phase.BACKWARD:
                    assert start_ps >= ends[action._replace(phase=Phase.FORWARD)]


@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize(("forward_ps", "backward_ps"), [(1, 2), (5, 5), (7, 3)])
def test_equal_stages_take_m_v_plus_p_minus_1_passes(
    schedule: Schedule, forward_ps: int, backward_ps: int
) -> None:
    """With fewer microbatches than ranks, each virtual stage but one waits for the rest of them."""
    for pp, num_microbatches, vpp in sizes(schedule, 6, 12):
        size = (pp, num_microbatches, vpp)
        step_ps = simulate_folded(equal_work(schedule, size, forward_ps, backward_ps)).step_ps
        busy_ps = num_microbatches * vpp * (forward_ps + backward_ps)
        idle = pp - 1 + (vpp - 1) * max(0, pp - num_microbatches)
        assert step_ps == busy_ps + idle * (forward_ps + backward_ps)
        share = Fraction(step_ps - busy_ps, step_ps)
        assert schedule.bubble_fraction(*size) == float(share)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_where_it_was_published(name: str) -> None:
    schedule = SCHEDULES[name]
    assert schedule.name == name
    assert "19" in schedule.source or "20" in schedule.source
    assert schedule.title.isascii()


@pytest.mark.parametrize("name", NAMES)
def test_virtual_stages_are_taken_exactly_by_schedules_that_interleave(name: str) -> None:
    schedule = SCHEDULES[name]
    assert (schedule.refusal(4, 8, 2) is None) is schedule.interleaves
    assert (schedule.refusal(4, 8, 1) is None) is not schedule.interleaves


def test_memory_of_the_first_rank_tells_gpipe_from_1f1b_from_interleaved() -> None:
    gpipe, plain, interleaved = (get_schedule(each) for each in ("gpipe", "1f1b", "interleaved"))
    assert gpipe.in_flight(0, 8, 32, 1) == 32
    assert [plain.in_flight(rank, 8, 32, 1) for rank in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    # In units of half a stage: 1 + (p - 1) / (p v) times the memory of 1F1B (Korthikanti 2022).
    assert interleaved.in_flight(0, 8, 32, 2) == 2 * 8 + 8 - 1
    assert interleaved.in_flight(7, 8, 32, 2) == 8 + 1


def test_1f1b_alternates_after_its_warmup() -> None:
    first, last = get_schedule("1f1b").actions(3, 4, 1)[::2]
    assert " ".join(map(str, first)) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert " ".join(map(str, last)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3"


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("1f1b", (4, 8, 2), "vpp=2 needs a schedule with virtual stages, such as interleaved"),
        ("interleaved", (4, 6, 2), "interleaved needs num_microbatches=6 to be a multiple of pp=4"),
        ("interleaved", (4, 8, 1), "interleaved needs vpp >= 2 and pp >= 2, got vpp=1, pp=4"),
        ("interleaved", (1, 8, 2), "interleaved needs vpp >= 2 and pp >= 2, got vpp=2, pp=1"),
    ],
)
def test_a_refusal_names_the_number_and_what_is_needed(
    name: str, size: tuple[int, int, int], reason: str
) -> None:
    assert SCHEDULES[name].refusal(*size) == reason


def test_each_runtime_interleaves_groups_of_its_own() -> None:
    """Of 4 ranks: how many microbatches go through a virtual stage before the next one."""
    found = {
        runtime: [
            None
            if schedules["interleaved"].refusal(4, count, 2)
            else schedules["interleaved"]
            .rank_actions(0, 4, count, 2)[: count + 1]
            .index(Action(Phase.FORWARD, 1, 0))
            for count in (2, 4, 7, 8, 10, 11)
        ]
        for runtime, schedules in RUNTIMES.items()
    }
    assert found == {
        PipelineRuntime.PUBLISHED: [None, 4, None, 4, None, None],
        PipelineRuntime.MEGATRON_CORE: [None, 4, 7, 4, 5, 6],
        PipelineRuntime.PYTORCH: [2, 4, 7, 4, 5, None],
    }


@pytest.mark.parametrize(
    ("runtime", "name", "size", "reason"),
    [
        (
            PipelineRuntime.MEGATRON_CORE,
            "interleaved",
            (4, 3, 2),
            "interleaved needs num_microbatches=3 to be at least pp=4",
        ),
        (
            PipelineRuntime.PYTORCH,
            "interleaved",
            (4, 11, 2),
            "interleaved needs num_microbatches=11 to be a multiple of its 2 rounds of 4 or more",
        ),
        (
            PipelineRuntime.PYTORCH,
            "1f1b",
            (4, 3, 1),
            "num_microbatches=3 is below pp=4; allowed: 4 or more",
        ),
        (
            PipelineRuntime.PYTORCH,
            "1f1b",
            (4, 8, 2),
            "vpp=2 needs a schedule with virtual stages, such as interleaved",
        ),
    ],
)
def test_what_a_runtime_refuses(
    runtime: PipelineRuntime, name: str, size: tuple[int, int, int], reason: str
) -> None:
    assert RUNTIMES[runtime][name].refusal(*size) == reason


def test_an_unknown_schedule_lists_the_known_ones() -> None:
    expected = "unknown schedule '1f1B'; did you mean 1f1b; known: gpipe, 1f1b, interleaved"
    with pytest.raises(PlanError) as caught:
        get_schedule("1f1B")
    assert str(caught.value) == expected


def test_without_a_pipeline_microbatches_run_one_by_one_whatever_the_schedule() -> None:
    gpipe, plain = (get_schedule(each) for each in ("gpipe", "1f1b"))
    assert gpipe.actions(1, 5) == plain.actions(1, 5)
    assert gpipe.in_flight(0, 1, 5, 1) == plain.in_flight(0, 1, 5, 1) == 1
