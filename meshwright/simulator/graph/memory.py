"""Bytes of a walk: what it keeps, and the most that lives at one time."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshwright.simulator.graph.backward import Backward
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
