"""Meetings of ranks: lockstep groups, and the stream of a group's collectives."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from simpy import Environment, Event

from meshwright.simulator.engine.record import Messages, Span, SpanKind

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


def busy_end_ps(start_ps: int, work_ps: int, messages: Messages) -> int:
    """Return when *work_ps* of port time is done if *messages* go first.

    A pipeline message is small and a stage waits for it, a collective is large and usually
    hidden: while a message leaves, the collective on the same port pauses.

    Args:
        start_ps: Earliest start of the collective.
        work_ps: Port time it needs.
        messages: Those of its port.

    >>> busy_end_ps(0, 10, Messages([2, 11, 30], [5, 12, 40]))
    14
    """
    end_ps = start_ps + work_ps
    for place in range(bisect_right(messages.ends_ps, start_ps), len(messages.ends_ps)):
        # The first may have left before: it counts from the collective's start.
        begin_ps = max(messages.starts_ps[place], start_ps)
        if begin_ps >= end_ps:
            break
        end_ps += messages.ends_ps[place] - begin_ps
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

    def run(self, ready_ps: int, issued: QueuedCollective, messages: Sequence[Messages]) -> int:
        """Return the end of the next collective, which gives way to *messages* of members."""
        start_ps = max(self._free_ps, ready_ps)
        end_ps = start_ps + issued.work_ps
        # A ring goes at the pace of its slowest member: the one with most messages on its port.
        for each in messages:
            end_ps = max(end_ps, busy_end_ps(start_ps, issued.work_ps, each))
        if issued.work_ps:
            self.record.append(Span(issued.kind, start_ps, end_ps, issued.virtual_stage))
        self._free_ps = end_ps
        return end_ps
