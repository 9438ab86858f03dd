"""The event engine against a longest path without events, and against itself unfolded."""

from collections.abc import Iterable
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Environment

from meshwright.simulator.engine import (
    Message,
    PassSegment,
    PassWork,
    RankTimes,
    RankWork,
    StepTimes,
    StepWork,
    simulate_folded,
    simulate_unfolded,
    with_overhead,
)
from meshwright.simulator.engine.groups import CollectiveStream, QueuedCollective, busy_end_ps
from meshwright.simulator.engine.record import Messages, SpanKind
from meshwright.simulator.engine.run import Submission, collective_barrier
from meshwright.simulator.errors import DeadlockError
from meshwright.simulator.layout import Axis
from meshwright.simulator.layout.mesh import Mesh
from meshwright.simulator.schedules import Action, Phase, get_schedule

RELAXED = settings(deadline=None, max_examples=60)  # shared machines stall now and then
TIMES = st.integers(0, 50)
PLAIN_STAGE = {Phase.FORWARD: PassWork(1), Phase.BACKWARD: PassWork(2)}
Node = tuple[str, int, int]  # kind, pp_rank, index


class LongestPath:
    """A graph of pieces of work; each starts when all it waits for is over."""

    def __init__(self) -> None:
        self._before: dict[Node, dict[Node, int]] = {}
        self._duration_ps: dict[Node, int] = {}

    def add(self, node: Node, duration_ps: int, after: Iterable[tuple[Node, int]]) -> None:
        """Add *node*, which starts some delay after each of *after* at the earliest."""
        self._before[node] = dict(after)
        self._duration_ps[node] = duration_ps

    def ends_ps(self) -> dict[Node, int]:
        ends: dict[Node, int] = {}
        for node in TopologicalSorter(self._before).static_order():
            ready = [ends[each] + delay for each, delay in self._before[node].items()]
            ends[node] = max(ready, default=0) + self._duration_ps[node]
        return ends


def producer(work: StepWork, pp_rank: int, action: Action) -> tuple[int, Action] | None:
    """Return the pass whose message *action* waits for, by its virtual stage in model order."""
    step = -1 if action.phase is Phase.FORWARD else 1
    stage = action.virtual_stage * work.pp + pp_rank + step
    if not 0 <= stage < work.pp * work.num_virtual_stages:
        return None
    virtual_stage, other = divmod(stage, work.pp)
    return other, action._replace(virtual_stage=virtual_stage)


def message_of(work: StepWork, pp_rank: int, action: Action) -> Message:
    """Return what a pass sends: nothing at the ends of the model."""
    stage = action.virtual_stage * work.pp + pp_rank
    virtual_stage = work.ranks[pp_rank].virtual_stages[action.virtual_stage]
    if action.phase is Phase.FORWARD:
        is_end = stage == work.pp * work.num_virtual_stages - 1
        return Message() if is_end else virtual_stage[action.phase].message
    return Message() if stage == 0 else virtual_stage[action.phase].message


def segments_of(work: StepWork, pp_rank: int, action: Action) -> tuple[PassSegment, ...]:
    """Return the parts of a pass: itself, or parts with collectives between."""
    passes = work.ranks[pp_rank].virtual_stages[action.virtual_stage][action.phase]
    if action.phase is Phase.FORWARD:
        parts = passes.gathers if action.microbatch == 0 else ()
    else:
        parts = passes.reductions if action.microbatch == work.num_microbatches - 1 else ()
    return parts or (PassSegment(passes.compute_ps, 0),)


class RankPath:
    """Adds the pieces of one rank: compute, messages and collectives, each in its own order."""

    def __init__(self, graph: LongestPath, work: StepWork, pp_rank: int) -> None:
        self.graph, self.work, self.pp_rank = graph, work, pp_rank
        self.compute, self.port, self.wire = (
            (kind, pp_rank, -1) for kind in ("start", "send", "wire")
        )
        for node in (self.compute, self.port, self.wire):
            graph.add(node, 0, [])
        self.num_parts = 0

    def add_all(self) -> None:
        for index, action in enumerate(self.work.actions[self.pp_rank]):
            self.add_start(index, action)
            for segment in segments_of(self.work, self.pp_rank, action):
                self.add_part(action.phase, segment)
            self.add_end(index, action)
        self.add_reduction()

    def free(self) -> list[tuple[Node, int]]:
        """Return what the next pass waits for on its own rank."""
        return [(self.compute, 0)] + ([(self.port, 0)] if self.work.blocking_messages else [])

    def add_start(self, index: int, action: Action) -> None:
        after = self.free()
        source = producer(self.work, self.pp_rank, action)
        if source is not None:
            sender, sent = source
            place = list(self.work.actions[sender]).index(sent)
            delay_ps = message_of(self.work, sender, sent).delay_ps
            after.append((("send", sender, place), delay_ps))
        self.compute = ("start", self.pp_rank, index)
        self.graph.add(self.compute, 0, after)

    def add_part(self, phase: Phase, segment: PassSegment) -> None:
        part, collective = ((kind, self.pp_rank, self.num_parts) for kind in ("part", "collective"))
        if phase is Phase.FORWARD:
            self.graph.add(collective, segment.collective_ps, [(self.wire, 0)])
            self.graph.add(part, segment.compute_ps, [(self.compute, 0), (collective, 0)])
        else:
            self.graph.add(part, segment.compute_ps, [(self.compute, 0)])
            self.graph.add(collective, segment.collective_ps, [(self.wire, 0), (part, 0)])
        self.compute, self.wire = part, collective
        self.num_parts += 1

    def add_end(self, index: int, action: Action) -> None:
        self.graph.add(("end", self.pp_rank, index), 0, [(self.compute, 0)])
        sending_ps = message_of(self.work, self.pp_rank, action).occupy_ps
        before = [(self.compute, 0), (self.port, 0)]
        self.port = ("send", self.pp_rank, index)
        self.graph.add(self.port, sending_ps, before)

    def add_reduction(self) -> None:
        rank, after = self.work.ranks[self.pp_rank], self.free()
        sums, reduced = (("sums", self.pp_rank, 0), ("reduced", self.pp_rank, 0))
        under = any(stage[Phase.BACKWARD].reductions for stage in rank.virtual_stages)
        if self.work.sums_first:
            self.graph.add(sums, rank.norm_all_reduce_ps, after)
            after = [(sums, 0)]
        if rank.reduce_ps or under:
            after.append((self.wire, 0))
        if not self.work.sums_first:
            self.graph.add(sums, rank.reduce_ps, after)
            after = [(sums, 0)]
        self.graph.add(
            reduced, rank.reduce_ps if self.work.sums_first else rank.norm_all_reduce_ps, after
        )


def reference(work: StepWork) -> tuple[int, list[tuple[list[int], list[int]]]]:
    """Return the step's time and each rank's starts and ends, without a shared port."""
    assert not work.shared_port
    graph = LongestPath()
    for pp_rank in range(work.pp):
        RankPath(graph, work, pp_rank).add_all()
    ends = graph.ends_ps()
    done = [ends["reduced", pp_rank, 0] for pp_rank in range(work.pp)]
    shared_ps = [rank.shared_embedding_ps for rank in work.ranks]
    if work.pp > 1 and shared_ps[0]:
        met_ps = max(done[0], done[-1])
        done[0], done[-1] = met_ps + shared_ps[0], met_ps + shared_ps[-1]
    update_ps = max(done) + work.norm_ps
    end_ps = max(update_ps + rank.optimizer_ps + rank.gather_ps for rank in work.ranks)
    passes = [
        tuple([ends[kind, pp_rank, i] for i in range(len(actions))] for kind in ("start", "end"))
        for pp_rank, actions in enumerate(work.actions)
    ]
    return with_overhead(end_ps, work.overhead_per_million), passes


@st.composite
def messages(draw: st.DrawFn) -> Message:
    return Message(draw(TIMES), draw(TIMES))


def segments(draw: st.DrawFn, *, wanted: bool) -> tuple[PassSegment, ...]:
    if not wanted:
        return ()
    # A collective takes time: one of no length has no place among the messages of a port.
    parts = st.builds(PassSegment, compute_ps=TIMES, collective_ps=st.integers(1, 80))
    return tuple(draw(st.lists(parts, min_size=1, max_size=3)))


def virtual_stage_works(
    draw: st.DrawFn, *, gathers: bool, reductions: bool
) -> dict[Phase, PassWork]:
    gathered = segments(draw, wanted=gathers)
    reduced = segments(draw, wanted=reductions)
    forward_ps, backward_ps = (
        sum(part.compute_ps for part in parts) if parts else draw(TIMES)
        for parts in (gathered, reduced)
    )
    return {
        Phase.FORWARD: PassWork(forward_ps, draw(messages()), gathers=gathered),
        Phase.BACKWARD: PassWork(backward_ps, draw(messages()), reductions=reduced),
    }


@st.composite
def works(draw: st.DrawFn, *, collectives: bool, shared_port: bool = False) -> StepWork:
    """Draw a step of any registered schedule with stages that differ."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    interleaves = name == "interleaved"
    pp = draw(st.integers(1 + interleaves, 5))
    vpp = draw(st.integers(2, 3)) if interleaves else 1
    num_microbatches = pp * draw(st.integers(1, 2)) if interleaves else draw(st.integers(1, 7))
    gathers, reductions = (collectives and draw(st.booleans()) for _ in range(2))
    tied_ps = draw(TIMES)
    ranks = tuple(
        RankWork(
            virtual_stages=tuple(
                virtual_stage_works(draw, gathers=gathers, reductions=reductions)
                for _ in range(vpp)
            ),
            reduce_ps=0 if reductions else draw(TIMES),
            norm_all_reduce_ps=draw(TIMES),
            shared_embedding_ps=tied_ps,
            optimizer_ps=draw(TIMES),
            gather_ps=0 if gathers else draw(TIMES),
        )
        for _ in range(pp)
    )
    return StepWork(
        ranks=ranks,
        actions=get_schedule(name).actions(pp, num_microbatches, vpp),
        num_microbatches=num_microbatches,
        blocking_messages=draw(st.booleans()),
        shared_port=shared_port and draw(st.booleans()),
        sums_first=draw(st.booleans()),
        norm_ps=draw(TIMES),
        overhead_per_million=draw(st.integers(0, 500_000)),
    )


def assert_same_as_reference(work: StepWork) -> None:
    step_ps, passes = reference(work)
    times = simulate_folded(work)
    assert [(rank.starts_ps, rank.ends_ps) for rank in times.ranks] == passes
    assert times.step_ps == step_ps


@RELAXED
@given(work=works(collectives=False))
def test_random_stages_and_messages_take_the_longest_path(work: StepWork) -> None:
    assert_same_as_reference(work)


@RELAXED
@given(work=works(collectives=True))
def test_overlapped_gathers_and_reductions_take_the_longest_path(work: StepWork) -> None:
    assert_same_as_reference(work)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_slow_port_makes_messages_queue(name: str, *, blocking: bool) -> None:
    virtual_stage = {
        Phase.FORWARD: PassWork(10, Message(35, 4)),
        Phase.BACKWARD: PassWork(20, Message(25, 4)),
    }
    work = StepWork(
        ranks=(RankWork(virtual_stages=(virtual_stage,)),) * 3,
        actions=get_schedule(name).actions(3, 6, 1),
        num_microbatches=6,
        blocking_messages=blocking,
    )
    assert_same_as_reference(work)
    first = simulate_folded(work).ranks[0]
    # GPipe's first rank sends all its forward messages one after the other.
    if name == "gpipe" and not blocking:
        assert first.ends_ps[:6] == [10, 20, 30, 40, 50, 60]
        assert simulate_folded(work).ranks[1].starts_ps[:6] == [49, 84, 119, 154, 189, 224]
    if name == "gpipe" and blocking:
        assert first.starts_ps[:6] == [0, 45, 90, 135, 180, 225]


def folded_view(times: StepTimes, mesh: Mesh) -> list[RankTimes]:
    """Return the times of each rank of *mesh* in a folded run."""
    return [times.ranks[mesh.coordinates(rank)[Axis.PP]] for rank in range(mesh.world_size)]


def assert_unfolded_equals_folded(work: StepWork, mesh: Mesh) -> None:
    folded, unfolded = simulate_folded(work), simulate_unfolded(work, mesh)
    assert unfolded.step_ps == folded.step_ps
    assert list(unfolded.ranks) == folded_view(folded, mesh)


@RELAXED
@given(work=works(collectives=True, shared_port=True), tp=st.integers(1, 4), dp=st.integers(1, 4))
def test_every_rank_of_a_mesh_runs_like_its_representative(
    work: StepWork, tp: int, dp: int
) -> None:
    assert_unfolded_equals_folded(work, Mesh(tp=tp, dp=dp, pp=work.pp, node_size=8))


@settings(deadline=None, max_examples=3)
@given(work=works(collectives=True, shared_port=True), data=st.data())
def test_512_ranks_run_like_their_representatives(work: StepWork, data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from([1, 2, 4, 8]))
    dp = 512 // (tp * work.pp)
    assert_unfolded_equals_folded(work, Mesh(tp=tp, dp=dp, pp=work.pp, node_size=8))


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("shared_port", [False, True])
def test_512_ranks_with_everything_at_once_run_like_their_representatives(
    *, blocking: bool, shared_port: bool
) -> None:
    virtual_stages = tuple(
        {
            Phase.FORWARD: PassWork(
                30 + c, Message(7, 3), gathers=(PassSegment(10 + c, 45), PassSegment(20, 50))
            ),
            Phase.BACKWARD: PassWork(
                60 + c, Message(8, 2), reductions=(PassSegment(40, 70), PassSegment(20 + c, 90))
            ),
        }
        for c in range(2)
    )
    ranks = tuple(
        RankWork(
            virtual_stages=virtual_stages,
            norm_all_reduce_ps=9 - r,
            shared_embedding_ps=33,
            optimizer_ps=11 + r,
        )
        for r in range(4)
    )
    work = StepWork(
        ranks=ranks,
        actions=get_schedule("interleaved").actions(4, 8, 2),
        num_microbatches=8,
        blocking_messages=blocking,
        shared_port=shared_port,
        norm_ps=5,
        overhead_per_million=4_000,
    )
    assert_unfolded_equals_folded(work, Mesh(tp=8, dp=16, pp=4, node_size=8))


def test_a_mesh_of_another_depth_is_a_callers_mistake() -> None:
    work = plain_work(pp=2, num_microbatches=2)
    with pytest.raises(ValueError, match="mesh has pp=3, the work pp=2"):
        simulate_unfolded(work, Mesh(tp=1, dp=1, pp=3, node_size=8))


def leaving(sent: list[tuple[int, int]]) -> Messages:
    return Messages([begin for begin, _ in sent], [end for _, end in sent])


def busy_end_by_single_steps(start_ps: int, work_ps: int, sent: list[tuple[int, int]]) -> int:
    """Return the end of a collective that works in each picosecond without a message."""
    busy = {ps for begin, end in sent for ps in range(begin, end)}
    now = start_ps
    while work_ps:
        work_ps -= now not in busy
        now += 1
    return now


@settings(deadline=None, max_examples=400)
@given(
    start_ps=st.integers(0, 60),
    work_ps=st.integers(1, 60),
    marks=st.lists(st.integers(0, 120), unique=True, max_size=16),
)
def test_a_collective_pauses_while_messages_leave(
    start_ps: int, work_ps: int, marks: list[int]
) -> None:
    ordered = sorted(marks)
    sent = list(zip(ordered[::2], ordered[1::2], strict=False))
    expected = busy_end_by_single_steps(start_ps, work_ps, sent)
    assert busy_end_ps(start_ps, work_ps, leaving(sent)) == expected


@RELAXED
@given(marks=st.lists(st.integers(0, 60), unique=True, min_size=3, max_size=9))
def test_messages_that_touch_leave_no_gap_for_a_collective(marks: list[int]) -> None:
    sent = list(pairwise(sorted(marks)))
    for start_ps in range(62):
        expected = busy_end_by_single_steps(start_ps, 5, sent)
        assert busy_end_ps(start_ps, 5, leaving(sent)) == expected


def test_a_shared_port_delays_reductions_by_the_messages_on_it() -> None:
    virtual_stage = {
        Phase.FORWARD: PassWork(10, Message(6, 0)),
        Phase.BACKWARD: PassWork(20, Message(6, 0), reductions=(PassSegment(20, 100),)),
    }
    work = StepWork(
        ranks=(RankWork(virtual_stages=(virtual_stage,)),) * 2,
        actions=get_schedule("1f1b").actions(2, 1, 1),
        num_microbatches=1,
        shared_port=True,
    )
    alone, shared = simulate_folded(work._replace(shared_port=False)), simulate_folded(work)
    # Rank 1 runs 16-26 and 26-46, then its reduction and its last message start together.
    assert alone.ranks[1].reduce_end_ps == 46 + 100
    assert shared.ranks[1].reduce_end_ps == 46 + 100 + 6
    assert shared.ranks[0].reduce_end_ps == alone.ranks[0].reduce_end_ps == 52 + 20 + 100


def test_a_prefetched_gather_hides_under_what_runs_before_it() -> None:
    gathers = (PassSegment(10, 8), PassSegment(10, 8), PassSegment(10, 25))
    virtual_stage = {Phase.FORWARD: PassWork(30, gathers=gathers), Phase.BACKWARD: PassWork(60)}
    work = StepWork(
        ranks=(RankWork(virtual_stages=(virtual_stage,)),),
        actions=get_schedule("1f1b").actions(1, 2, 1),
        num_microbatches=2,
    )
    rank = simulate_folded(work).ranks[0]
    # Gathers end at 8, 16 and 41; the parts run 8-18, 18-28 and 41-51.
    assert rank.ends_ps == [51, 111, 141, 201]
    assert rank.gather_wait_ps == 8 + 0 + 13


def plain_work(*, pp: int, num_microbatches: int) -> StepWork:
    return StepWork(
        ranks=(RankWork(virtual_stages=(PLAIN_STAGE,)),) * pp,
        actions=get_schedule("1f1b").actions(pp, num_microbatches, 1),
        num_microbatches=num_microbatches,
    )


def with_list(work: StepWork, pp_rank: int, actions: Iterable[Action]) -> StepWork:
    lists = list(work.actions)
    lists[pp_rank] = list(actions)
    return work._replace(actions=lists)


def test_a_backward_before_its_forward_is_a_deadlock_that_names_the_message() -> None:
    work = plain_work(pp=3, num_microbatches=2)
    wrong = with_list(work, 0, reversed(work.actions[0]))
    expected = (
        "3 of 3 ranks never finished; rank 0 stopped after 0 actions, "
        "waiting for the backward message of microbatch 1, chunk 0"
    )
    for run in (lambda: simulate_folded(wrong), lambda: unfold(wrong)):
        with pytest.raises(DeadlockError) as caught:
            run()
        assert str(caught.value).endswith(expected[expected.index("rank 0") :])
    with pytest.raises(DeadlockError) as caught:
        simulate_folded(wrong)
    assert str(caught.value) == expected


def unfold(work: StepWork) -> StepTimes:
    return simulate_unfolded(work, Mesh(tp=2, dp=2, pp=work.pp, node_size=8))


def test_a_message_that_is_never_sent_is_named_by_the_rank_that_waits() -> None:
    work = plain_work(pp=2, num_microbatches=3)
    skipped = [action for action in work.actions[0] if action.microbatch != 2]
    with pytest.raises(DeadlockError) as caught:
        simulate_folded(with_list(work, 0, skipped))
    assert str(caught.value) == (
        "2 of 2 ranks never finished; rank 1 stopped after 4 actions, "
        "waiting for the forward message of microbatch 2, chunk 0"
    )


def test_a_pass_listed_twice_waits_for_a_second_message() -> None:
    work = plain_work(pp=2, num_microbatches=1)
    twice = [*work.actions[1], work.actions[1][0]]
    with pytest.raises(DeadlockError) as caught:
        simulate_folded(with_list(work, 1, twice))
    assert str(caught.value) == (
        "2 of 2 ranks never finished; rank 1 stopped after 2 actions, "
        "waiting for the forward message of microbatch 0, chunk 0"
    )


def test_the_chunk_of_an_interleaved_deadlock_is_named() -> None:
    actions = get_schedule("interleaved").actions(2, 2, 2)
    work = StepWork(
        ranks=(RankWork(virtual_stages=(PLAIN_STAGE,) * 2),) * 2,
        actions=actions,
        num_microbatches=2,
    )
    first = [action for action in actions[1] if action != Action(Phase.FORWARD, 0, 1)]
    with pytest.raises(DeadlockError, match=r"forward message of microbatch 1, chunk 1$"):
        simulate_folded(with_list(work, 1, first))


@RELAXED
@given(work=works(collectives=True, shared_port=True))
def test_the_same_work_gives_the_same_bytes_twice(work: StepWork) -> None:
    assert repr(simulate_folded(work)) == repr(simulate_folded(work))
    mesh = Mesh(tp=2, dp=2, pp=work.pp, node_size=2)
    assert repr(simulate_unfolded(work, mesh)) == repr(simulate_unfolded(work, mesh))


@given(time_ps=st.integers(0, 10**16), more_ps=st.integers(0, 10**12), ppm=st.integers(0, 10**6))
def test_overhead_keeps_the_order_of_times(time_ps: int, more_ps: int, ppm: int) -> None:
    assert with_overhead(time_ps, 0) == time_ps
    assert with_overhead(time_ps, ppm) == time_ps * (1_000_000 + ppm) // 1_000_000
    assert with_overhead(time_ps, ppm) <= with_overhead(time_ps + more_ps, ppm)


def test_a_collective_starts_when_its_last_member_is_ready() -> None:
    """Ready at 5 and 9 it takes 3, until 12; the next waits for it, then for a message of 2."""
    stream = CollectiveStream()
    meeting = collective_barrier(Environment(), 2, stream, shared_port=True)
    kind = SpanKind.GRADIENT_REDUCTION
    ready = ((5, 6), (9, 10))
    first, last = (
        Submission([QueuedCollective(each, 3, kind) for each in times], leaving(sent))
        for times, sent in zip(ready, ([], [(13, 15)]), strict=True)
    )
    assert not meeting.arrive(first).triggered
    assert meeting.arrive(last).value == 17
    assert [(each.start_ps, each.end_ps) for each in stream.record] == [(9, 12), (12, 17)]
