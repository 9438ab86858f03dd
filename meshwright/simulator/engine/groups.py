"""Group barriers of ranks, and the collective stream of a data-parallel group."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from simpy import Environment, Event

from meshwright.simulator.engine.record import Messages, Span, SpanKind

T = TypeVar("T")
R = TypeVar("R")


class GroupBarrier(Generic[T, R]):
    """Reusable barrier of a group of ranks, with a reduction.

    Each rank contributes an item; when the last one has arrived, *resolve* reduces the items to the
    result that all get.  A group of one never waits and needs no event.
    """

    def __init__(self, env: Environment, size: int, resolve: Callable[[Sequence[T]], R]) -> None:
        self._env = env
        self._size = size
        self.is_alone = size == 1
        self._resolve = resolve
        self._items: list[T] = []
        self._done = Event(env)

    def alone(self, item: T) -> R:
        """Return the result of a group of one rank with *item*."""
        return self._resolve([item])

    def arrive(self, item: T) -> Event:
        """Add *item*; return the event that carries the result."""
        self._items.append(item)
        done = self._done
        if len(self._items) == self._size:
            # Reset before anyone resumes: the first rank may arrive at the next barrier while
            # others have not yet left this one.
            result = self._resolve(self._items)
            self._items = []
            self._done = Event(self._env)
            done.succeed(result)
        return done


def busy_end_ps(start_ps: int, work_ps: int, messages: Messages) -> int:
    """Return the end of *work_ps* of port time if *messages* have priority.

    A p2p message is small and a stage waits for it, a collective is large and usually overlapped:
    while a message leaves, the collective on the same port pauses.

    Args:
        start_ps: Earliest start of the collective.
        work_ps: Port time it needs.
        messages: Messages of the port.

    >>> busy_end_ps(0, 10, Messages([2, 11, 30], [5, 12, 40]))
    14
    """
    end_ps = start_ps + work_ps
    for place in range(bisect_right(messages.ends_ps, start_ps), len(messages.ends_ps)):
        # The first may have started before: it counts from the collective's start.
        begin_ps = max(messages.starts_ps[place], start_ps)
        if begin_ps >= end_ps:
            break
        end_ps += messages.ends_ps[place] - begin_ps
    return end_ps


class QueuedCollective(NamedTuple):
    """A collective that a rank has issued: ready time, port time and kind.

    It is submitted to the group when the rank waits for it, not when issued: by then all messages
    with priority over it are known.
    """

    ready_ps: int
    work_ps: int
    kind: SpanKind
    virtual_stage: int = -1


class CollectiveStream:
    """Communication stream of one data-parallel group: collectives in order, one at a time."""

    def __init__(self) -> None:
        self._free_ps = 0
        self.record: list[Span] = []

    def run(self, ready_ps: int, issued: QueuedCollective, messages: Sequence[Messages]) -> int:
        """Run the next collective and return its end; its ranks' *messages* have priority."""
        start_ps = max(self._free_ps, ready_ps)
        end_ps = start_ps + issued.work_ps
        # A ring runs at the pace of its slowest rank: the one with most messages on its port.
        for each in messages:
            end_ps = max(end_ps, busy_end_ps(start_ps, issued.work_ps, each))
        # A group of one rank has collectives of no time: they are no spans.
        if issued.work_ps:
            self.record.append(Span(issued.kind, start_ps, end_ps, issued.virtual_stage))
        self._free_ps = end_ps
        return end_ps
