"""Bytes of a walk: what it keeps, and the most that lives at one time."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from meshwright.simulator.graph.backward import Backward
from meshwright.simulator.graph.order import Node, Region
from meshwright.simulator.graph.tape import Phase, Run, Tape
from meshwright.simulator.graph.tensors import Size, Tensor, chosen, largest, sum_of

Held = TypeVar("Held")
NOTHING: Any = 0


class SavedOffload(NamedTuple):
    """Saved tensors that wait on the host from forward to backward.

    Args:
        parts: Those that nodes of these parts save; of all nodes where there are none.
        least: Of so many elements, or more.
    """

    parts: frozenset[str]
    least: int

    def tensors(self, walk: Backward) -> "OffloadedTensors":
        """Return those of a block.

        Megatron-Core copies what each node saves, so that what one gives out and another reads
        leaves twice; Transformer Engine copies each tensor of a layer once, and all of one that
        another is a view of (`TensorGroupProcessor` of pytorch/cpu_offload.py, 2.10).
        """
        tape, made = walk.tape, {*_live(walk.tape.storages.events[: walk.tape.marks.returned])}
        copies: Counter[Tensor] = Counter()
        staying: set[Tensor] = set()
        for node, saved in _savings(tape):
            for each in saved:
                if not self._has(node):
                    staying.add(each.storage)
                elif each.storage in made:
                    copies[each if self.parts else each.storage] += 1
        leaving = {each.storage for each in copies} - staying
        return OffloadedTensors(
            {each: self._bytes(each) for each in _lasting(tape) if each in leaving},
            sum_of(
                self._bytes(each) * (count if self.parts else 1) for each, count in copies.items()
            ),
        )

    def _has(self, node: Node) -> bool:
        """Return whether a *node* is in one of the parts."""
        names = {name.partition(":")[0] for op in node for name in op.region}
        return not self.parts or not names.isdisjoint(self.parts)

    def _bytes(self, tensor: Tensor) -> Size:
        """Return what leaves of a tensor, whose scales are one of their own."""
        count, scales = tensor.numel, tensor.nbytes - tensor.numel * tensor.width
        elements = chosen(count >= self.least, count * tensor.width, 0)
        return elements + chosen(scales >= self.least, scales, 0)


class OffloadedTensors(NamedTuple):
    """What leaves the device of each storage until backward, and what is copied there and back."""

    moved: dict[Tensor, Size]
    copied: Size


NO_TENSORS = OffloadedTensors({}, 0)


def _live(events: Iterable[tuple[Tensor, int]]) -> Iterator[Tensor]:
    """Yield the storages that came in some *events*."""
    return (each for each, sign in events if sign > 0)


def _lasting(tape: Tape) -> Iterator[Tensor]:
    """Yield what lives when forward has returned."""
    counts: Counter[Tensor] = Counter()
    for each, sign in tape.storages.events[: tape.marks.returned]:
        counts[each] += sign
    return (each for each, count in counts.items() if count)


def _savings(tape: Tape) -> Iterator[tuple[Node, list[Tensor]]]:
    """Yield nodes with what they save; of a part that runs again the first, with its inputs."""
    entered: set[Region] = set()
    for node in tape.order.nodes:
        region = tape.repetition.region(node[0])
        if not region:
            yield node, tape.reads(node)
        elif region not in entered:
            entered.add(region)
            yield node, tape.order.inputs[region]


class BlockMemory(NamedTuple, Generic[Held]):
    """Bytes of a pass through a block, of one shape or columns of them over several.

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
        moved: What it keeps elsewhere; forward and backward need this and *copied* beside the rest.
        copied: What is copied there and back.
        waiting: What its backward makes and the embedding's backward takes, if both are on one
            stage.
    """

    saved: Held
    cached: Held
    forward: Held
    backward: Held
    arrival: Held
    holding: Held
    left: Held
    received: Held
    sent: Held
    buffer: Held
    moved: Held
    copied: Held
    waiting: Held = NOTHING

    @staticmethod
    def of(walk: Backward, offloaded: OffloadedTensors = NO_TENSORS) -> "BlockMemory[Size]":
        """Return the bytes of *walk*, some of them *offloaded*; columns where its sizes are."""
        tape, moved = walk.tape, sum_of(offloaded.moved.values())
        events = tape.storages.events
        ran, returned = tape.marks
        changes = [each.nbytes * sign for each, sign in events]
        for place in range(returned, len(events)):
            each, sign = events[place]
            changes[place] = changes[place] - sign * offloaded.moved.get(each, 0)
        levels = _levels(changes)
        levels[returned:] = [each - moved for each in levels[returned:]]
        output = tape.block.operators[-1].outputs[0]
        gone = [each.nbytes for each, _ in events[ran:returned] if each is not output.storage]
        saved = levels[returned]
        free = _arriving_is_free(walk)
        held = [each + walk.arriving.nbytes for each in levels[free:]]
        return BlockMemory(
            saved=saved,
            cached=sum(gone),
            forward=_most(levels[: ran + 1]) - saved - moved,
            backward=_most(levels[returned:]) - saved,
            arrival=_most([levels[each] for each in walk.arrivals] or [saved]) - saved,
            holding=_most([*levels[returned:free], *held]) - saved,
            left=levels[-1],
            received=events[0][0].nbytes,
            sent=output.nbytes,
            buffer=largest([0, *(each.nbytes for each in tape.block.buffers)]),
            moved=moved,
            copied=offloaded.copied,
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
