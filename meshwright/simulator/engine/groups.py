"""Meetings of ranks: lockstep groups, and the stream of a group's collectives."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from simpy import Environment, Event

from meshwright.simulator.engine.record import Span, SpanKind

T = TypeVar("T")
R = TypeVar("R")


class Meeting(Generic[T, R]):
    """A place where the members of a group wait for each other, again and again.

    Each member brings something; when the last one has come, *resolve* turns all of it into
    the result that everyone leaves with.  A group of one never waits: it needs no event.
    """

    def __init__(self, env: Environment, size: int, resolve: Callable[[Sequence[T]], R]) -> None:
        self._env = env
        self._size = size
        self.is_alone = size == 1
        self._resolve = resolve
        self._brought: list[T] = []
        self._done = Event(env)

    def alone(self, item: T) -> R:
        """Return the result of this meeting, whose only member brings *item*."""
        return self._resolve([item])

    def arrive(self, item: T) -> Event:
        """Return the event of this meeting; it carries the result."""
        self._brought.append(item)
        done = self._done
        if len(self._brought) == self._size:
            # Made anew before anyone leaves: the first to go on may come to the next meeting while
            # others have not yet been woken from this one.
            result = self._resolve(self._brought)
            self._brought = []
            self._done = Event(self._env)
            done.succeed(result)
        return done


Intervals = list[tuple[int, int]]


def busy_end_ps(start_ps: int, work_ps: int, messages: Intervals) -> int:
    """Return when *work_ps* of port time is done if *messages* go first.

    A pipeline message is small and a stage waits for it, a collective is large and usually
    hidden: while a message leaves, the collective on the same port pauses.

    Args:
        start_ps: Earliest start of the collective.
        work_ps: Port time it needs.
        messages: Times at which messages leave, in order and disjoint.

    >>> busy_end_ps(0, 10, [(2, 5), (11, 12), (30, 40)])
    14
    """
    end_ps = start_ps + work_ps
    first = bisect_right(messages, (start_ps, start_ps))
    # The message that left before may not be out yet: it counts from the collective's start.
    if first and messages[first - 1][1] > start_ps:
        first -= 1
    for begin, finish in messages[first:]:
        if begin >= end_ps:
            break
        end_ps += finish - max(begin, start_ps)
    return end_ps


class QueuedCollective(NamedTuple):
    """A collective that a rank has issued: when it is ready, its port time, for what.

    It is brought to the group when the rank waits for it, not when it is issued: by then all the
    messages that it gives way to are known.
    """

    ready_ps: int
    work_ps: int
    kind: SpanKind
    virtual_stage: int = -1


class CollectiveStream:
    """The collectives of one data-parallel group, one at a time and in order."""

    def __init__(self) -> None:
        self._free_ps = 0
        self.record: list[Span] = []

    def run(self, ready_ps: int, issued: QueuedCollective, messages: Sequence[Intervals]) -> int:
        """Return the end of the next collective, given the messages of each member."""
        start_ps = max(self._free_ps, ready_ps)
        # A ring goes at the pace of its slowest member: the one with most messages on its port.
        self._free_ps = max([busy_end_ps(start_ps, issued.work_ps, each) for each in messages])
        if issued.work_ps:
            self.record.append(Span(issued.kind, start_ps, self._free_ps, issued.virtual_stage))
        return self._free_ps
