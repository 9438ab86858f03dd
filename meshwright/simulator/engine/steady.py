"""Long steps: a shorter step is simulated and its steady phase repeated, where that is exact.

A pass starts when the previous one on its rank has ended and its message has arrived: times are
sums and maxima of earlier times, in a fixed order.  In the steady phase the passes of each group of
microbatches depend on each other as those of the previous group.  Once all times of some groups are
those of as many earlier groups plus one constant, they also solve the longer step's equations, and
so do those of the cooldown, whose dependencies are unchanged.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, count
from operator import sub
from typing import NamedTuple, cast

from meshwright.simulator.engine.record import Mark, Messages, RankTimes, Span, moved_spans
from meshwright.simulator.engine.work import StepWork, shortened
from meshwright.simulator.schedules import Action, Periodic, shifted_actions, shifted_times

# Lengths of steady phases to try, in the shortest that often shows the period; the whole step must
# have so many times their microbatches.
TRIED = (1, 4)
TIMES_LONGER = 3


class Period(NamedTuple):
    """Period of the steady phase of a step.

    Args:
        num_groups: Groups of microbatches in a period.
        size: Actions of a rank in a period.
        ahead: Actions after it on each rank, to the end of the steady phase.
        behind: Actions before it on whose times, or collectives, it depends.
        time_ps: Time of a period.
    """

    num_groups: int
    size: int
    ahead: int
    behind: int
    time_ps: int = 0


class RankRecord(NamedTuple):
    """A rank's shorter simulation and its steady phase.

    Args:
        times: Times of the rank.
        marks: Progress before passes with overlapped collectives, and at the end.
        order: Its actions, with the period of the schedule once.
        end: Position of the end of its steady phase.
        sent: Number of messages sent before each action, and after the last.
    """

    times: RankTimes
    marks: Sequence[Mark]
    order: Periodic[Action]
    end: int
    sent: Sequence[int]

    @classmethod
    def of(cls, times: RankTimes, marks: Sequence[Mark], order: Periodic[Action]) -> "RankRecord":
        """Return the record of a simulation whose *order* has fewer copies of its period."""
        copies = (len(times.actions) - len(order.once)) // order.size
        sends = (action[:2] not in times.silent for action in times.actions)
        sent = [*accumulate(sends, initial=0)] if times.silent else range(len(times.actions) + 1)
        return cls(times, marks, order, order.end + copies * order.size, sent)

    def mark(self, position: int) -> Mark:
        """Return the first mark from *position* on."""
        return self.marks[bisect_left(self.marks, position, key=lambda mark: mark.position)]

    def later_by(self, period: Period) -> int | None:
        """Return the time between two periods, if all times that the next one depends on agree.

        Returns:
            None where they differ.
        """
        size, last = period.size, self.end - period.size
        first = last - period.ahead - period.behind
        period_start, period_end, next_start, next_end = map(
            self.mark, (first, last, first + size, self.end)
        )
        sent, issued = self.sent[first], period_start.num_issued
        counts = self.sent[last] - sent, period_end.num_issued - issued
        is_alike = (
            period_start.num_queued == next_start.num_queued
            and period_end.num_queued == next_end.num_queued
        )
        if not is_alike or next_end.num_issued - next_start.num_issued != counts[1]:
            return None
        times = self.times
        spans = times.collectives[issued : next_end.num_issued]
        sent_on, issued_on = self.sent[first + size], next_start.num_issued - issued
        parts = (
            period_start.num_parts,
            next_start.num_parts,
            period_end.num_parts - period_start.num_parts,
        )
        later = {
            *_differences(times.starts_ps, first, first + size, last - first),
            *_differences(times.ends_ps, first, first + size, last - first),
            *_differences(times.messages.ends_ps, sent, sent_on, counts[0]),
            *_differences(times.part_starts_ps, *parts),
            *_differences([each.start_ps for each in spans], 0, issued_on, counts[1]),
            *_differences([each.end_ps for each in spans], 0, issued_on, counts[1]),
        }
        return later.pop() if len(later) == 1 else None

    @property
    def has_collectives(self) -> bool:
        """True where collectives overlap passes of the steady phase."""
        return self.mark(self.order.end).position < self.end

    def is_in_time(self, period: Period, *, shared_port: bool) -> bool:
        """Return True if collectives issued before the end of *period* end within one more.

        Otherwise a backlog could delay the collectives of the cooldown.
        """
        end, times = self.end - period.ahead, self.times
        issued, sent, is_periodic = self.mark(end).num_issued, self.sent[end], self.has_collectives
        last = [times.collectives[issued - 1].end_ps] if issued else []
        last += [times.messages.ends_ps[sent - 1]] if shared_port and is_periodic and sent else []
        limit_ps = times.starts_ps[end] + (period.time_ps if is_periodic else 0)
        return max(last, default=0) <= limit_ps

    def repeated(self, period: Period, copies: int) -> RankTimes:
        """Return the times with *copies* more of *period*."""
        times, end = self.times, self.end - period.ahead
        period_start, period_end = self.mark(end - period.size), self.mark(end)
        time_ps, moved_ps = period.time_ps, copies * period.time_ps

        def later(values: Sequence[int], last: int, size: int) -> Periodic[int]:
            return Periodic(values, last, size, copies, time_ps, shifted_times)

        pairs, num_microbatches = times.pairs, period.num_groups * self.order.distance
        sent, sent_before = self.sent[end], self.sent[end - period.size]
        parts, num_parts = period_end.num_parts, period_end.num_parts - period_start.num_parts
        issued, num_issued = period_end.num_issued, period_end.num_issued - period_start.num_issued
        messages = (later(each, sent, sent - sent_before) for each in times.messages)
        waited_ps = period_end.gather_wait_ps - period_start.gather_wait_ps
        return times._replace(
            actions=Periodic(
                times.actions, end, period.size, copies, num_microbatches, shifted_actions
            ),
            pairs=pairs and range(pairs.start, pairs.stop + copies * period.size, pairs.step),
            starts_ps=later(times.starts_ps, end, period.size),
            ends_ps=later(times.ends_ps, end, period.size),
            part_starts_ps=later(times.part_starts_ps, parts, num_parts),
            messages=Messages(*cast("Iterator[list[int]]", messages)),
            collectives=Periodic[Span](
                times.collectives, issued, num_issued, copies, time_ps, moved_spans
            ),
            closing=moved_spans(times.closing, moved_ps),
            gather_wait_ps=times.gather_wait_ps + copies * waited_ps,
            passes_end_ps=times.passes_end_ps + moved_ps,
            reduce_end_ps=times.reduce_end_ps + moved_ps,
            update_start_ps=times.update_start_ps + moved_ps,
            end_ps=times.end_ps + moved_ps,
        )


def _differences(times_ps: Sequence[int], first: int, second: int, count: int) -> set[int]:
    """Return the differences of *count* times from *second* on to those from *first* on."""
    return {*map(sub, times_ps[second : second + count], times_ps[first : first + count])}


def run_shorter(
    work: StepWork, run: Callable[[StepWork], Iterable[tuple[RankTimes, Sequence[Mark]]]]
) -> tuple[list[RankTimes] | None, int]:
    """Simulate shorter steps than *work* for its times.

    Args:
        work: The step.
        run: Function that simulates a step; returns times and marks of each rank.

    Returns:
        The times of each rank, None if no period was found; and the number of passes simulated.
    """
    orders = [each for each in work.actions if isinstance(each, Periodic)]
    copies, num_passes = _tried_copies(work, orders), 0
    while copies:
        short = shortened(work, orders, copies[0])
        if TIMES_LONGER * short.num_microbatches > work.num_microbatches:
            break
        records = [RankRecord.of(*ran, each) for ran, each in zip(run(short), orders, strict=True)]
        num_passes += sum(map(len, short.actions))
        period, left = find_period(short, records), orders[0].copies - copies.pop(0)
        if period is None:
            continue
        times, rest = divmod(left, period.num_groups)
        # Only whole periods can be repeated: else a step longer by the rest is simulated.
        if not rest:
            return [each.repeated(period, times) for each in records], num_passes
        copies.insert(0, orders[0].copies - left + rest)
    return None, num_passes


def _tried_copies(work: StepWork, orders: Sequence[Periodic[Action]]) -> list[int]:
    """Return the numbers of periods of the shorter steps to try, the smallest first."""
    stages = chain.from_iterable(rank.virtual_stages for rank in work.ranks)
    # Pending activation copies are not compared, so such steps are simulated whole.
    if not orders or any(each.copies for stage in stages for each in stage.values()):
        return []
    # A delay that travels down the pipeline and back has a period of as many microbatches as
    # ranks: they are simulated twice, and some more; a multiple of them is left out.
    most, group = orders[0].copies, orders[0].distance
    round_trip, least = max(1, work.pp // group), 4 - (-(2 * work.pp + 12) // group)
    tried = (times * least for times in TRIED)
    return [each + (most - each) % round_trip for each in tried]


def reach(pp: int, vpp: int, group: int) -> tuple[int, int]:
    """Return by how many passes a message's sender is at most ahead of its receiver, and behind.

    Passes are counted from the start of the steady phase of their rank.  There a rank is ahead of
    the next one by up to four forward passes; from the last rank a group of microbatches goes on to
    the first one's next virtual stage, and back.
    """
    return (4 * pp + 4 if vpp > 1 else 4), 2 * group + 12


def find_period(work: StepWork, records: Sequence[RankRecord]) -> Period | None:
    """Return the shortest period of the steady phase of a simulated short step.

    Returns:
        None if there is none.
    """
    order, vpp = records[0].order, work.num_virtual_stages
    ahead, behind = reach(work.pp, vpp, order.distance)
    # A collective waits for earlier ones, and pauses for messages until it ends.
    extra_periods = int(any(each.has_collectives for each in records))
    for num_groups in count(1):
        size = num_groups * order.size
        period = Period(
            num_groups, size, ahead + extra_periods * size, behind + extra_periods * size
        )
        # The steady phase must hold a period and all that it depends on.
        needed = period.size + period.ahead + period.behind
        if any(each.end - needed < each.order.end for each in records):
            break
        later = records[0].later_by(period)
        # All ranks must repeat with the same period.
        if later is None or any(each.later_by(period) != later for each in records[1:]):
            continue
        period = period._replace(time_ps=later)
        if all(each.is_in_time(period, shared_port=work.shared_port) for each in records):
            return period
    return None
