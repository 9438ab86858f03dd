"""Bytes of a walk: what it keeps, and the most that lives at one time."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshwright.simulator.graph.backward import Backward
from meshwright.simulator.graph.tape import Phase, Run
from meshwright.simulator.graph.tensors import Size, largest


class Memory(NamedTuple):
    """Bytes of a pass through a block.

    Args:
        saved: Kept from forward to backward.
        cached: Beside that, what lives until the whole forward pass is over.
        forward: The most that forward needs beside what it keeps.
        backward: The most that backward needs beside what was kept.
        arrival: The most that lives beside that when a weight's gradient has come.
        holding: As *backward*, with the gradient of what it hands on held to the end.
        left: What is still there in the end, such as gradients that are kept.
        received: What enters the block.
        sent: What it hands on.
        buffer: What it shares with other blocks, from the first pass on.
    """

    saved: Size
    cached: Size
    forward: Size
    backward: Size
    arrival: Size
    holding: Size
    left: Size
    received: Size
    sent: Size
    buffer: Size

    @classmethod
    def of(cls, walk: Backward) -> "Memory":
        """Return the bytes of *walk*; columns where its sizes are."""
        tape = walk.tape
        events = tape.storages.events
        ran, returned = tape.marks
        levels = _levels([each.nbytes * sign for each, sign in events])
        output = tape.block.operators[-1].outputs[0]
        gone = [each.nbytes for each, _ in events[ran:returned] if each is not output.storage]
        saved = levels[returned]
        free = _arriving_is_free(walk)
        held = [each + walk.arriving.nbytes for each in levels[free:]]
        return cls(
            saved=saved,
            cached=sum(gone),
            forward=_most(levels[: ran + 1]) - saved,
            backward=_most(levels[returned:]) - saved,
            arrival=_most([levels[each] for each in walk.arrivals] or [saved]) - saved,
            holding=_most([*levels[returned:free], *held]) - saved,
            left=levels[-1],
            received=events[0][0].nbytes,
            sent=output.nbytes,
            buffer=largest([0, *(each.nbytes for each in tape.block.buffers)]),
        )


class NestedMemory(NamedTuple):
    """Bytes of a pass through a block around a part of it whose weights are a unit of their own.

    All are the most that lives beside what forward keeps; 0 of what there is not.

    Args:
        before: Forward, until the part begins.
        entry: When it does.
        inside: While it runs.
        behind: From there on.
        is_repeated: 1 if the part runs again before its backward begins, else 0; where what it
            hands on is read by no one, it begins before that, and *back_inside* has both.
        again_before: Until it does.
        again: While it does.
        again_behind: From there on, until backward reaches what is behind it.
        back_behind: Backward, until it reaches the part.
        back_entry: When it does, or when the part runs again before that.
        back_inside: While that of the part runs.
        back_before: From there on.
        back_done: When the part's gradients are there.
    """

    before: Size
    entry: Size
    inside: Size
    behind: Size
    is_repeated: Size
    again_before: Size
    again: Size
    again_behind: Size
    back_behind: Size
    back_entry: Size
    back_inside: Size
    back_before: Size
    back_done: Size

    @classmethod
    def of(cls, walk: Backward, part: str) -> "NestedMemory":
        """Return the bytes around *part* in *walk*."""
        tape = walk.tape
        levels = _levels([each.nbytes * sign for each, sign in tape.storages.events])
        (ran, returned), last = tape.marks, len(levels) - 1
        forward, again, back = (_span(tape.runs, phase, part, last) for phase in Phase)
        if forward is None or back is None:
            return cls(*[0] * len(cls._fields))
        if again is not None and back.begin < again.begin:
            again = None

        def most(first: int, last: int) -> Size:
            return _most(levels[first : last + 1]) - levels[returned]

        end = min(forward.end, ran)
        return cls(
            before=most(0, forward.begin),
            entry=levels[forward.begin] - levels[returned],
            inside=most(forward.begin, end),
            behind=most(end, ran),
            is_repeated=int(again is not None),
            again_before=most(returned, again.begin) if again else 0,
            again=most(again.begin, again.end) if again else 0,
            again_behind=most(again.end, again.over) if again else 0,
            back_behind=most(again.over if again else returned, back.begin),
            back_entry=levels[(again or back).begin] - levels[returned],
            back_inside=most(back.begin, back.end),
            back_before=most(back.end, last),
            back_done=levels[back.end] - levels[returned],
        )


class _Span(NamedTuple):
    """After how many events a part begins and has ended in a phase, and the phase is over."""

    begin: int
    end: int
    over: int


def _span(runs: Sequence[Run], phase: Phase, part: str, last: int) -> _Span | None:
    """Return where a *part* runs in a *phase* of so many events; None if it does not."""
    own = [index for index, run in enumerate(runs) if run.phase is phase]
    inside = [index for index in own if part in runs[index].operator.region]
    if not inside:
        return None
    begins = [*(run.begin for run in runs), last]
    return _Span(begins[inside[0]], begins[inside[-1] + 1], begins[own[-1] + 1])


def _arriving_is_free(walk: Backward) -> int:
    """Return the number of events after which a pass no longer needs the gradient that came.

    What holds on to it takes a tensor more from then on: also where autograd would add another
    gradient to it in place, which it does not with one that something else holds.
    """
    if walk.summed_into_arriving is not None:
        return walk.summed_into_arriving
    events = enumerate(walk.tape.storages.events)
    (last,) = deque((at for at, (each, _) in events if each is walk.arriving), maxlen=1)
    return last + 1


def _levels(changes: Sequence[Size]) -> list[Size]:
    """Return how much lives before each of *changes*, and after the last."""
    return list(accumulate(changes, initial=0))


def _most(levels: Sequence[Size]) -> Size:
    if all(isinstance(each, int) for each in levels):
        return max(levels)
    return np.asarray(np.max(np.stack(np.broadcast_arrays(*levels)), axis=0), np.int64)
