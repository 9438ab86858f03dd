"""Long steps, of which a shorter one is run, against the same steps run whole."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from meshwright.hwprofiles import (
    ExpertOverlap,
    PipelineRuntime,
    Recompute,
    load_cluster,
    load_stack,
)
from meshwright.planner.plots import plot_timeline
from meshwright.planner.plots.boxes import timeline_layers
from meshwright.planner.search import search
from meshwright.planner.space import SpaceLimits
from meshwright.simulator import (
    BuiltStep,
    CostModel,
    ParallelPlan,
    PlanError,
    StepResult,
    StepTimes,
    StepWork,
    TrainingJob,
    account,
    build_step,
    check_plan,
    load_model,
    resolve,
    simulate,
    simulate_folded,
    simulation,
)
from meshwright.simulator.account import critical_path
from meshwright.simulator.chrome_trace import chrome_trace
from meshwright.simulator.engine import (
    Message,
    OverlapSavings,
    PassSegment,
    PassWork,
    RankWork,
    UnitWork,
    steady,
)
from meshwright.simulator.schedules import (
    RUNTIMES,
    Action,
    Periodic,
    Phase,
    Schedule,
    count_refetches,
    get_schedule,
)
from meshwright.validate.published import load_published_runs, simulate_run

CORE = PipelineRuntime.MEGATRON_CORE
SCHEDULES = {
    f"{name} of {runtime}": schedule
    for runtime, schedules in RUNTIMES.items()
    for name, schedule in schedules.items()
}
SCHEDULES |= {
    "1f1b with F/B overlap": get_schedule("1f1b", CORE, beside=True),
    "groups of 5": get_schedule("interleaved", CORE, 5),
    "interleaved with F/B overlap": get_schedule("interleaved", CORE, beside=True),
}
SIZES = [
    (pp, count, vpp)
    for pp in (1, 2, 3, 4)
    for count in (100, 103, 120, 122)
    for vpp in (1, 2, 3, 4)
]
# Model, cluster, stacks.
CASES = [
    ("gpt3-175b", "dgx-a100", ("megatron-core", "megatron-lm-2021", "deepspeed")),
    ("megatron-1t", "dgx-a100", ("megatron-core@0.12", "megatron-lm-2022")),
    ("llama3-70b", "dgx-h100", ("megatron-core", "torchtitan", "torchtitan-2024-12")),
    ("deepseek-v3", "dgx-h100", ("megatron-core", "torchtitan-2026-08")),
    ("mixtral-8x7b", "aws-p5", ("megatron-core", "torchtitan")),
    ("llama3-8b", "aws-p5", ("megatron-core-serial", "torchtitan", "fsdp", "ddp")),
    ("bloom-176b", "jean-zay-a100", ("megatron-deepspeed-2022",)),
]


def allowed(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    return (size for size in SIZES if schedule.refusal(*size) is None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_order_with_its_period_once_is_the_whole_order(name: str) -> None:
    schedule, kept = SCHEDULES[name], 0
    for pp, count, vpp in allowed(schedule):
        for pp_rank, order in enumerate(schedule.actions(pp, count, vpp)):
            whole = schedule.rank_actions(pp_rank, pp, count, vpp)
            assert list(order) == whole
            assert [order[place] for place in range(-len(whole), 0)] == whole
            kept += isinstance(order, Periodic)
    assert bool(kept) is (schedule.warmup is not None)


def sender(action: Action, pp_rank: int, pp: int) -> tuple[int, Action]:
    """Return the rank that sends a pass its message, and in which pass."""
    stage = action.virtual_stage * pp + pp_rank + (-1 if action.phase is Phase.FORWARD else 1)
    virtual_stage, rank = divmod(stage, pp)
    return rank, action._replace(virtual_stage=virtual_stage)


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_of_the_steady_part_come_from_within_reach(name: str) -> None:
    schedule, longest = SCHEDULES[name], 0
    for pp, count, vpp in allowed(schedule):
        orders = schedule.actions(pp, count, vpp)
        begins = [each.end - each.size for each in orders if isinstance(each, Periodic)]
        if not begins:
            continue
        places = [{action: place for place, action in enumerate(each)} for each in orders]
        group, middle = orders[0].distance, begins[0] + orders[0].size * (orders[0].copies // 2)  # type: ignore[attr-defined]
        ahead, behind = steady.reach(pp, vpp, group)
        for pp_rank, order in enumerate(orders):
            first = middle - begins[0] + begins[pp_rank]
            for place in range(first, first + 2 * group * vpp):
                rank, sent = sender(order[place], pp_rank, pp)
                if sent in places[rank]:
                    later = (places[rank][sent] - begins[rank]) - (place - begins[pp_rank])
                    assert -behind + 2 <= later <= ahead - 2
                    longest = max(longest, abs(later))
    assert longest or schedule.warmup is None or name == "1f1b with F/B overlap"


@pytest.mark.parametrize("vpp", [3, 4, 5, 6])
def test_virtual_stages_are_gathered_anew_as_often_as_in_the_whole_order(vpp: int) -> None:
    schedule = get_schedule("interleaved", PipelineRuntime.PYTORCH)
    for pp in (2, 3, 5):
        for order in schedule.actions(pp, 40 * pp, vpp):
            assert isinstance(order, Periodic)
            assert count_refetches(order, vpp) == count_refetches(list(order), vpp)


class RandomWork:
    """Random works of many microbatches, whose ranks and collectives differ as a draw has it."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.spread = self.random.choice([0, 0.01, 0.2, 0.9])
        self.message = self.random.choice([0, 0.01, 0.2, 1, 2])
        self.collective = self.random.choice([0.01, 0.1, 0.3, 1])
        self.kind = self.random.choice(["plain", "at the ends", "each pass", "units", "overlap"])
        self.has = {
            name: self.random.random() < 0.6 for name in ("gather", "reduce", "stay", "all")
        }
        self.num_parts = self.random.choice([1, 2, 3])

    def time_ps(self, share: float = 1.0) -> int:
        return 1 + int(share * 10**9 * (1 - self.spread * self.random.random()))

    def messages(self) -> Message:
        return Message(
            int(self.message * self.time_ps()), self.random.choice([0, self.time_ps(0.1)])
        )

    def segments(self) -> tuple[PassSegment, ...]:
        part = [PassSegment(self.time_ps(), self.time_ps(self.collective)) for _ in range(3)]
        return tuple(part[: self.num_parts])

    def unit(self) -> UnitWork:
        time_ps, choice = self.time_ps(self.collective), self.random.choice
        return UnitWork(
            self.time_ps(),
            gather_ps=time_ps if self.has["gather"] else 0,
            reduce_ps=time_ps if self.has["reduce"] else 0,
            accumulate_ps=choice([0, time_ps]),
            last_ps=choice([0, time_ps]),
            unpack_ps=choice([0, time_ps]),
            pack_ps=choice([0, time_ps]),
            stays=self.has["stay"],
        )

    def virtual_stage(self) -> dict[Phase, PassWork]:
        forward_ps, backward_ps = self.time_ps(), self.time_ps(2)
        forward = PassWork(forward_ps, self.messages())
        backward = PassWork(backward_ps, self.messages(), reduces_every_microbatch=self.has["all"])
        if self.kind in ("at the ends", "each pass"):
            gathers, reductions = self.segments(), self.segments()
            every = self.kind == "each pass"
            forward_ps = sum(each.compute_ps for each in gathers)
            backward_ps = sum(each.compute_ps for each in reductions)
            forward = forward._replace(compute_ps=forward_ps, gathers=gathers)
            backward = PassWork(
                backward_ps, backward.message, reductions=reductions, reduces_every_microbatch=every
            )
        if self.kind == "units":
            units = tuple(self.unit() for _ in range(self.num_parts))
            forward, backward = forward._replace(units=units), backward._replace(units=units[::-1])
        return {Phase.FORWARD: forward, Phase.BACKWARD: backward}

    def work(self) -> StepWork:
        overlaps, choice = self.kind == "overlap", self.random.choice
        interleaves = overlaps or self.random.random() < 0.5
        pp, vpp = choice([2, 3, 4]) if interleaves else choice([1, 2, 4, 6]), 1 + interleaves
        schedule = get_schedule("interleaved" if interleaves else "1f1b", CORE, beside=overlaps)
        count = choice([each for each in range(120, 200) if not schedule.refusal(pp, each, vpp)])
        hidden = {
            (a, b): OverlapSavings(self.time_ps(0.1), self.time_ps(0.2))
            for a in (0, 1)
            for b in (0, 1)
        }
        ranks = tuple(
            RankWork(
                virtual_stages=tuple(self.virtual_stage() for _ in range(vpp)),
                reduce_ps=self.time_ps(),
                norm_all_reduce_ps=self.time_ps(),
                optimizer_ps=self.time_ps(),
                hidden=hidden,
            )
            for _ in range(pp)
        )
        return StepWork(
            ranks=ranks,
            actions=schedule.actions(pp, count, vpp),
            pairs=[schedule.pairs(each, pp, count, vpp) for each in range(pp)] if overlaps else (),
            num_microbatches=count,
            blocking_messages=choice([False, True]),
            shared_port=choice([False, True]),
            prefetches=choice([False, True]),
            keeps_units=self.kind == "units" and choice([False, True]),
            norm_ps=self.time_ps(),
            overhead_per_million=4000,
        )


def whole(work: StepWork) -> StepWork:
    """Return *work* with orders of which no part is known to come again."""
    return work._replace(actions=[list(order) for order in work.actions])


def test_random_works_take_the_times_of_a_whole_run() -> None:
    found, kinds = 0, set()
    for seed in range(60):
        drawn = RandomWork(seed)
        work = drawn.work()
        times, expected = simulate_folded(work), simulate_folded(whole(work))
        assert times == expected
        if isinstance(times.ranks[0].starts_ps, Periodic):
            found += 1
            kinds.add(drawn.kind)
            assert times.num_passes <= expected.num_passes / 2
    assert found > 30
    assert len(kinds) == 5


def random_plans(seed: int) -> Iterator[tuple[BuiltStep, CostModel]]:
    """Yield steps of random plans that can run, with what they were priced with."""
    random, choice = Random(seed), Random(seed).choice
    while True:
        name, cluster_name, stacks = choice(CASES)
        model, cluster = load_model(name), load_cluster(cluster_name)
        stack, schedule = load_stack(choice(stacks)), choice(["1f1b", "interleaved"])
        interleaves = schedule == "interleaved"
        pp, vpp = choice([1, 2, 3, 4, 6, 8, 12]), choice([2, 3, 4, 6]) if interleaves else 1
        tp, dp, cp, ep = choice([1, 2, 8]), choice([1, 2, 32]), choice([1, 1, 2]), choice([1, 4])
        num_stages, is_even = pp * vpp, choice([False, True])
        if num_stages > model.num_layers:
            continue
        cuts = sorted(random.sample(range(1, model.num_layers), num_stages - 1))
        ends = zip([0, *cuts], [*cuts, model.num_layers], strict=True)
        count = pp * choice([20, 40, 60]) + choice([60, 61, 119])
        job = TrainingJob(model=model, global_batch_size=count * dp, seq_len=2048)
        try:
            plan = ParallelPlan(
                tp=tp,
                pp=pp,
                dp=dp,
                cp=cp,
                ep=ep if name in ("deepseek-v3", "mixtral-8x7b") else 1,
                num_virtual_stages=vpp,
                zero_stage=choice([0, 1, 2, 3]),
                recompute=choice(list(Recompute)),
                schedule=schedule,
                stages=None if is_even else tuple(last - first for first, last in ends),
                sync_each_microbatch=choice([None, None, True, False]),
                expert_overlap=choice([None, None, ExpertOverlap.MICROBATCHES]),
            )
            resolved = resolve(job, cluster, stack, plan)
            check_plan(job, resolved, cluster, stack)
        except PlanError:
            continue
        costs = CostModel(cluster, stack, resolved.world_size)
        yield build_step(job, resolved, costs), costs


def results(built: BuiltStep, costs: CostModel) -> tuple[StepResult, StepResult]:
    """Return the result of a step, and that of its whole run."""
    expected = replace(built, work=whole(built.work))
    return (
        account(built, simulate_folded(built.work), costs),
        account(expected, simulate_folded(expected.work), costs),
    )


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.bench)])
def test_results_of_random_plans_are_those_of_a_whole_run(count: int) -> None:
    found = 0
    for built, costs in islice(random_plans(seed=count), count):
        result, expected = results(built, costs)
        assert result == expected
        assert result.times is not None
        found += isinstance(result.times.ranks[0].actions, Periodic)
    assert found >= 0.6 * count


def test_results_of_long_published_runs_are_those_of_a_whole_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[BuiltStep] = []

    def both(
        built: BuiltStep, times: StepTimes, costs: CostModel, memory_limit_bytes: int | None
    ) -> StepResult:
        result = account(built, times, costs, memory_limit_bytes)
        if isinstance(times.ranks[0].actions, Periodic):
            expected = replace(built, work=whole(built.work))
            whole_times = simulate_folded(expected.work)
            assert result == account(expected, whole_times, costs, memory_limit_bytes)
            found.append(built)
        return result

    monkeypatch.setattr(simulation, "account", both)
    runs = load_published_runs()
    long = [each for each in runs if each.plan.num_microbatches(each.job) > 100]
    for run in long[::4]:
        simulate_run(run)
    assert len(found) > 8


def test_what_overlapped_passes_hide_is_that_of_all_passes() -> None:
    """Groups of microbatches leave a rest, whose passes stand by other ones than the period's."""
    cluster, stack = load_cluster("dgx-h100"), load_stack("megatron-core")
    model, stages = load_model("deepseek-v3"), (4, 5, 5, 6, 5, 5, 5, 5, 5, 5, 6, 5)
    job = TrainingJob(model=model, global_batch_size=8 * 503, seq_len=4096)
    plan = ParallelPlan(
        pp=4,
        dp=8,
        ep=4,
        num_virtual_stages=3,
        schedule="interleaved",
        stages=stages,
        expert_overlap=ExpertOverlap.MICROBATCHES,
    )
    resolved = resolve(job, cluster, stack, plan)
    costs = CostModel(cluster, stack, resolved.world_size)
    result, expected = results(build_step(job, resolved, costs), costs)
    assert result.times is not None
    assert isinstance(result.times.ranks[0].actions, Periodic)
    assert result == expected


def long_job(num_microbatches: int) -> TrainingJob:
    return TrainingJob(model=load_model("gpt2"), global_batch_size=num_microbatches, seq_len=1024)


@pytest.mark.parametrize(("stack_name", "vpp"), [("megatron-core", 3), ("torchtitan", 2)])
def test_what_lists_each_pass_lists_those_of_a_whole_run(stack_name: str, vpp: int) -> None:
    cluster, stack, job = load_cluster("dgx-a100"), load_stack(stack_name), long_job(320)
    schedule = "1f1b" if vpp == 1 else "interleaved"
    plan = ParallelPlan(pp=2, dp=2, num_virtual_stages=vpp, schedule=schedule)
    resolved = resolve(job, cluster, stack, plan)
    costs = CostModel(cluster, stack, resolved.world_size)
    built = build_step(job, resolved, costs)
    result, expected = results(built, costs)
    assert result == expected
    assert result.times is not None
    assert expected.times is not None
    assert isinstance(result.times.ranks[0].actions, Periodic)
    # PyTorch's runtime holds what it sends until the step ends.
    order = list(result.times.ranks[0].actions)
    assert (built.memory[0].growth_bytes(order) > 0) is (stack_name == "torchtitan")
    assert chrome_trace(result) == chrome_trace(expected)
    assert critical_path(built, result.times) == critical_path(built, expected.times)
    assert timeline_layers(result) == timeline_layers(expected)


def test_a_million_microbatches_take_as_much_more_as_a_thousand() -> None:
    def step_ps(count: int, **fields: object) -> int:
        plan = ParallelPlan(pp=4, **fields)  # type: ignore[arg-type]
        work = build_step(
            long_job(count), resolve(long_job(count), cluster, stack, plan), costs
        ).work
        return simulate_folded(work._replace(overhead_per_million=0)).step_ps

    cluster, stack = load_cluster("dgx-a100"), load_stack("megatron-core")
    costs = CostModel(cluster, stack, 4)
    for fields in ({}, {"schedule": "interleaved", "num_virtual_stages": 3}):
        least, more, most = (step_ps(each, **fields) for each in (400, 1400, 1_000_400))
        assert most - more == 999 * (more - least)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steady, "TRIED", ())
            assert [step_ps(each, **fields) for each in (400, 1400)] == [least, more]
            with pytest.raises(PlanError, match="1000400 microbatches are too many to simulate"):
                step_ps(1_000_400, **fields)


def test_passes_too_many_to_run_or_to_list_are_refused() -> None:
    cluster, stack = load_cluster("dgx-a100"), load_stack("megatron-core")
    with pytest.raises(PlanError, match="too many to simulate; allowed: 500000 in all"):
        simulate(long_job(10**6), ParallelPlan(pp=4, schedule="gpipe"), cluster, stack)
    result = simulate(long_job(10**6), ParallelPlan(pp=4), cluster, stack)
    assert result.times is not None
    with pytest.raises(PlanError, match="too many to trace"):
        chrome_trace(result)
    with pytest.raises(PlanError, match="too many to draw"):
        plot_timeline(result)
    costs = CostModel(cluster, stack, 4)
    built = build_step(result.job, result.plan, costs)
    with pytest.raises(PlanError, match="too many to explain"):
        critical_path(built, result.times)


def test_a_search_simulates_layouts_of_a_million_microbatches() -> None:
    cluster, stack = load_cluster("dgx-a100"), load_stack("megatron-core")
    limits = SpaceLimits().pinned(pp=(4,), microbatch_size=(1,), recompute=(Recompute.NONE,))
    found = search(long_job(10**6), cluster, stack, 4, limits=limits, top=1)
    assert found.optimal
    assert found.plans[0].times is not None
    assert found.plans[0].times.num_passes < 1000
    again = simulate(long_job(10**6), found.plans[0].plan, cluster, stack)
    assert found.plans[0].step_ps == again.step_ps
