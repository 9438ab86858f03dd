"""Activation memory of a block: saved bytes and peaks of its forward and backward walk."""

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
NO_BYTES: Any = 0


class SavedOffload(NamedTuple):
    """Activation offload: saved tensors that are on the host from forward to backward.

    Args:
        parts: Parts whose saved tensors are offloaded; all nodes if empty.
        least: Elements of the smallest tensor that is offloaded.
    """

    parts: frozenset[str]
    least: int

    def tensors(self, walk: Backward) -> "OffloadedTensors":
        """Return the offloaded tensors of a block.

        Megatron-Core copies what each node saves: a tensor saved by two nodes is copied twice.
        Transformer Engine copies each tensor of a layer once, and of a view the whole base
        (`TensorGroupProcessor` of pytorch/cpu_offload.py, 2.10).
        """
        tape, allocated = walk.tape, {*_live(walk.tape.storages.events[: walk.tape.marks.returned])}
        copies: Counter[Tensor] = Counter()
        staying: set[Tensor] = set()
        for node, saved in _saved_by_node(tape):
            for each in saved:
                if not self._has(node):
                    staying.add(each.storage)
                elif each.storage in allocated:
                    copies[each if self.parts else each.storage] += 1
        leaving = {each.storage for each in copies} - staying
        return OffloadedTensors(
            {each: self._bytes(each) for each in _lasting(tape) if each in leaving},
            sum_of(
                self._bytes(each) * (count if self.parts else 1) for each, count in copies.items()
            ),
        )

    def _has(self, node: Node) -> bool:
        """Return True if a *node* is in one of the parts."""
        names = {name.partition(":")[0] for op in node for name in op.region}
        return not self.parts or not names.isdisjoint(self.parts)

    def _bytes(self, tensor: Tensor) -> Size:
        """Return the offloaded bytes of a tensor; its fp8 scales are a tensor of their own."""
        count, scales = tensor.numel, tensor.nbytes - tensor.numel * tensor.width
        elements = chosen(count >= self.least, count * tensor.width, 0)
        return elements + chosen(scales >= self.least, scales, 0)


class OffloadedTensors(NamedTuple):
    """Offloaded bytes of each storage, and bytes copied to the host and back."""

    moved: dict[Tensor, Size]
    copied: Size


NO_TENSORS = OffloadedTensors({}, 0)


def _live(events: Iterable[tuple[Tensor, int]]) -> Iterator[Tensor]:
    """Yield the storages that *events* allocate."""
    return (each for each, sign in events if sign > 0)


def _lasting(tape: Tape) -> Iterator[Tensor]:
    """Yield the storages alive when forward has returned."""
    counts: Counter[Tensor] = Counter()
    for each, sign in tape.storages.events[: tape.marks.returned]:
        counts[each] += sign
    return (each for each, count in counts.items() if count)


def _saved_by_node(tape: Tape) -> Iterator[tuple[Node, list[Tensor]]]:
    """Yield nodes with their saved tensors; of a recomputed part the first, with its inputs."""
    entered: set[Region] = set()
    for node in tape.order.nodes:
        region = tape.repetition.region(node[0])
        if not region:
            yield node, tape.reads(node)
        elif region not in entered:
            entered.add(region)
            yield node, tape.order.inputs[region]


class BlockMemory(NamedTuple, Generic[Held]):
    """Bytes of a pass through a block: of one shape, or columns of several.

    Args:
        saved: Kept from forward to backward.
        cached: Beside that, alive until the whole forward pass is over.
        forward: Peak of forward, beside *saved*.
        backward: Peak of backward, beside *saved*.
        arrival: Peak beside *saved* when a weight's gradient is ready.
        holding: As *backward*, with the gradient of the output alive to the end.
        left: Still alive after backward, such as kept gradients.
        received: Input of the block.
        sent: Output of the block.
        buffer: Global buffer shared with other blocks, from the first pass on.
        moved: Saved on the host; forward and backward need this and *copied* on top.
        copied: Copied to the host and back.
        waiting: Gradient from its backward to the embedding's, if both are on one stage.
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
    waiting: Held = NO_BYTES

    @staticmethod
    def of(walk: Backward, offloaded: OffloadedTensors = NO_TENSORS) -> "BlockMemory[Size]":
        """Return the bytes of *walk* with *offloaded* tensors; columns for columns of sizes."""
        tape, moved = walk.tape, sum_of(offloaded.moved.values())
        events = tape.storages.events
        ran, returned = tape.marks
        changes = [each.nbytes * sign for each, sign in events]
        for place in range(returned, len(events)):
            each, sign = events[place]
            # Offloaded tensors are not on the device, so backward does not free them there.
            changes[place] = changes[place] - sign * offloaded.moved.get(each, 0)
        levels = _levels(changes)
        levels[returned:] = [each - moved for each in levels[returned:]]
        output = tape.block.operators[-1].outputs[0]
        # The output counts as the next block's input.
        gone = [each.nbytes for each, _ in events[ran:returned] if each is not output.storage]
        saved = levels[returned]
        gradient_end = _output_gradient_end(walk)
        # A pipeline's p2p buffer may keep the gradient alive beyond its last use.
        with_output_gradient = [each + walk.arriving.nbytes for each in levels[gradient_end:]]
        return BlockMemory(
            saved=saved,
            cached=sum(gone),
            forward=_peak(levels[: ran + 1]) - saved - moved,
            backward=_peak(levels[returned:]) - saved,
            arrival=_peak([levels[each] for each in walk.arrivals] or [saved]) - saved,
            holding=_peak([*levels[returned:gradient_end], *with_output_gradient]) - saved,
            left=levels[-1],
            received=events[0][0].nbytes,
            sent=output.nbytes,
            buffer=largest([0, *(each.nbytes for each in tape.block.buffers)]),
            moved=moved,
            copied=offloaded.copied,
        )


class NestedMemory(NamedTuple):
    """Peak bytes of a pass around a part of the block that is an FSDP unit of its own.

    All are beside what forward saves; 0 where a phase does not run.

    Args:
        before: Forward, until the part begins.
        entry: Forward, as the part begins.
        inside: Forward, while the part runs.
        behind: Forward, after the part.
        is_repeated: 1 if the part is recomputed before its backward begins, else 0; where its
            output is read by no one, backward begins first, and *back_inside* covers both.
        again_before: Recomputation, until the part begins.
        again: Recomputation, while the part runs.
        again_behind: Recomputation, after the part.
        back_behind: Backward, until it reaches the part.
        back_entry: As backward or recomputation of the part begins.
        back_inside: Backward, while the part's runs.
        back_before: Backward, after the part's.
        back_done: When the part's gradients are ready.
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

        def peak(first: int, last: int) -> Size:
            return _peak(levels[first : last + 1]) - levels[returned]

        end = min(forward.end, ran)
        return cls(
            before=peak(0, forward.begin),
            entry=levels[forward.begin] - levels[returned],
            inside=peak(forward.begin, end),
            behind=peak(end, ran),
            is_repeated=int(again is not None),
            again_before=peak(returned, again.begin) if again else 0,
            again=peak(again.begin, again.end) if again else 0,
            again_behind=peak(again.end, again.over) if again else 0,
            back_behind=peak(again.over if again else returned, back.begin),
            back_entry=levels[(again or back).begin] - levels[returned],
            back_inside=peak(back.begin, back.end),
            back_before=peak(back.end, last),
            back_done=levels[back.end] - levels[returned],
        )


class _Span(NamedTuple):
    """Numbers of events before a part begins, it ends, and its phase ends."""

    begin: int
    end: int
    over: int


def _span(runs: Sequence[Run], phase: Phase, part: str, last: int) -> _Span | None:
    """Return the span of a *part* in a *phase*; None if it does not run there."""
    phase_runs = [index for index, run in enumerate(runs) if run.phase is phase]
    inside = [index for index in phase_runs if part in runs[index].operator.region]
    if not inside:
        return None
    begins = [*(run.begin for run in runs), last]
    return _Span(begins[inside[0]], begins[inside[-1] + 1], begins[phase_runs[-1] + 1])


def _output_gradient_end(walk: Backward) -> int:
    """Return the number of events after which backward no longer needs its output's gradient.

    Whoever still refers to it then costs a tensor more: so does autograd's accumulation, which
    is in place only for a gradient that nothing else refers to.
    """
    if walk.summed_into_output_gradient is not None:
        return walk.summed_into_output_gradient
    events = enumerate(walk.tape.storages.events)
    (last,) = deque((at for at, (each, _) in events if each is walk.arriving), maxlen=1)
    return last + 1


def _levels(changes: Sequence[Size]) -> list[Size]:
    """Return the live bytes before each of *changes*, and after the last."""
    return list(accumulate(changes, initial=0))


def _peak(levels: Sequence[Size]) -> Size:
    if all(isinstance(each, int) for each in levels):
        return max(levels)
    return np.asarray(np.max(np.stack(np.broadcast_arrays(*levels)), axis=0), np.int64)
