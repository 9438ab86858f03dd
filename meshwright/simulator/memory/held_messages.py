"""P2p buffers that Megatron-Core's schedules keep alive beside inputs of passes in flight.

Names of variables are those of megatron/core/pipeline_parallel/schedules.py (core 0.16). Four kinds
of tensors are meant: the input that a virtual stage receives in a pass, its gradient, the output
that it sends, and the gradient of that, which it receives. A module holds an input and its ``grad``
until its next forward pass (`set_input_tensor`), over the step's end, too, as a variable does.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, compress
from operator import gt
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.schedules import Action, group_passes

Numbers: TypeAlias = list[int]
NONE = -1
MODULE_TENSORS = 2
"""Tensors as large as its input that a module holds over the step's end."""


class PipelinePosition(NamedTuple):
    """Position of a rank in the pipeline, counted from 0."""

    pp_rank: int
    pp: int


class LiveSpans(NamedTuple):
    """Positions of actions from which on, and before which, p2p buffers are alive.

    None is where it ends before it starts.  A source is twice the virtual stage for what is as
    large as its output, one more for what is as large as the gradient that it sends, its input.
    """

    starts: Numbers
    ends: Numbers
    sources: Numbers
    times: int = 1


def live_message_counts(
    actions: Sequence[Action], place: PipelinePosition, vpp: int
) -> NDArray[np.int16]:
    """Return the number of p2p buffers alive in each action beside activations and workspaces.

    A backward pass itself needs the gradient of its output, from its first operator to its last.

    Args:
        actions: Passes of a rank, in order.
        place: Its position in the pipeline.
        vpp: Virtual stages of a rank.

    Returns:
        A row for each action, a column for each source of `LiveSpans`.

    >>> from meshwright.simulator.schedules import Phase
    >>> order = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    >>> actions = [Action(Phase(name), 0, index) for name, index in order]
    >>> live_message_counts(actions, PipelinePosition(1, 3), 1).tolist()
    [[0, 0], [0, 0], [0, 0], [1, 2], [0, 1], [0, 1]]
    """
    if vpp == 1:
        return _counted(_noninterleaved_spans(actions), 2, len(actions))
    group = next(at for at, action in enumerate(actions) if action.virtual_stage)
    return _interleaved_counts(place, actions[-1].microbatch + 1, group, vpp)


@lru_cache(maxsize=2048)
def _interleaved_counts(
    place: PipelinePosition, num_microbatches: int, group: int, vpp: int
) -> NDArray[np.int16]:
    """Return the counts of a rank that runs an interleaved order."""
    spans = _Interleaved.of(place, num_microbatches, group, vpp).spans()
    return _counted(spans, 2 * vpp, 2 * vpp * num_microbatches)


def _counted(spans: Iterable[LiveSpans], num_sources: int, num_actions: int) -> NDArray[np.int16]:
    """Return the number of buffers of each source that *spans* keep alive in each action."""
    held = [*spans]
    columns = zip(*(span[:3] for span in held), strict=True)
    starts, ends, sources = (np.array([*chain.from_iterable(each)], np.int64) for each in columns)
    times = np.repeat([span.times for span in held], [len(span.starts) for span in held])
    lasts = ends > starts
    places = num_sources * np.stack([starts, ends])[:, lasts] + sources[lasts]
    weights = np.stack([times, -times])[:, lasts]
    num_places = num_sources * (num_actions + 1)
    changes = np.bincount(places.ravel(), weights.ravel(), minlength=num_places)
    alive = changes.reshape(-1, num_sources).cumsum(axis=0)[:-1]
    return alive.astype(np.int16)  # orders are kept: few are ever held


def max_live_messages(vpp: int, larger: int) -> int:
    """Return an upper bound of the p2p buffers that a rank keeps alive.

    Modules of its *vpp* virtual stages hold an input and its gradient each, three more wait for
    their pass or are sent, and two for each microbatch by which groups are *larger* than the
    pipeline.
    """
    return 2 * vpp + 3 + 2 * larger


def _noninterleaved_spans(actions: Sequence[Action]) -> Iterator[LiveSpans]:
    """Yield the buffers that `forward_backward_pipelining_without_interleaving` keeps alive.

    A backward pass leaves ``output_tensor`` (so its input), ``input_tensor_grad`` and
    ``output_tensor_grad`` behind; the next one begins with its own in place of all but the second.
    """
    directions = [action.phase.direction for action in actions]
    first, end = directions.index(-1), len(directions)
    yield LiveSpans([first + 1], [end], [1])
    forward = [at for at in range(first, end) if directions[at] > 0]
    for source in (0, 1):
        yield LiveSpans(forward, [at + 1 for at in forward], [source] * len(forward))


class _Order(NamedTuple):
    """Forward passes, or backward passes, in the order in which they run, the same on all ranks.

    A pass has a number: stages one after the other, in each the microbatches one after the other.
    ``places`` says by number which of them it is; the source of each one's output is in
    ``outputs``, that of its input in ``inputs``.
    """

    numbers: Numbers
    places: Numbers
    outputs: Numbers
    inputs: Numbers

    @classmethod
    def of(cls, actions: Sequence[Action], num_microbatches: int) -> "_Order":
        """Return the order of *actions*, of so many microbatches."""
        numbers = [stage * num_microbatches + microbatch for _, stage, microbatch in actions]
        places = [0] * len(numbers)
        for place, number in enumerate(numbers):
            places[number] = place
        outputs = [2 * action.virtual_stage for action in actions]
        return cls(numbers, places, outputs, [source + 1 for source in outputs])


@lru_cache(maxsize=32)
def _orders(group: int, num_microbatches: int, vpp: int) -> tuple[_Order, _Order]:
    """Return the order of forward passes, and of backward passes."""
    forward, backward = group_passes(group, num_microbatches, vpp)
    return _Order.of(forward, num_microbatches), _Order.of(backward, num_microbatches)


class _Passes(NamedTuple):
    """An order of passes, with their positions among all actions, in order and by number."""

    order: _Order
    positions: Numbers
    place_of: Numbers

    @classmethod
    def of(cls, order: _Order, positions: Numbers) -> "_Passes":
        """Return the passes of *order* at *positions*."""
        return cls(order, positions, [*map(positions.__getitem__, order.places)])


@dataclass(frozen=True)
class _Interleaved:
    """The variables of `forward_backward_pipelining_with_interleaving` with ``overlap_p2p_comm``.

    ``output_tensor`` holds what lies in its module, too.

    Args:
        place: Position of the rank in the pipeline.
        num_microbatches: Microbatches of a step.
        group: How many of them go through a virtual stage before the first goes on.
        warmup: Forward passes before those that alternate with backward passes.
        forward: Its forward passes.
        backward: Its backward passes.
    """

    place: PipelinePosition
    num_microbatches: int
    group: int
    warmup: int
    forward: _Passes
    backward: _Passes

    @classmethod
    def of(
        cls, place: PipelinePosition, num_microbatches: int, group: int, vpp: int
    ) -> "_Interleaved":
        """Return the variables of a rank."""
        num_passes = vpp * num_microbatches
        warmup = min(2 * (place.pp - 1 - place.pp_rank) + (vpp - 1) * group, num_passes)
        alternated = 2 * num_passes - warmup
        positions = (
            [*range(warmup), *range(warmup, alternated, 2)],
            [*range(warmup + 1, alternated, 2), *range(alternated, 2 * num_passes)],
        )
        orders = _orders(group, num_microbatches, vpp)
        return cls(place, num_microbatches, group, warmup, *map(_Passes.of, orders, positions))

    def spans(self) -> Iterator[LiveSpans]:
        """Yield all spans in which buffers are alive."""
        yield from _pending_spans(self)
        yield from _module_spans(self)
        yield from self._by_variables()

    def output(self, number: int) -> int:
        """Return the source of a number's output; that of its input is one more."""
        return 2 * (number // self.num_microbatches)

    @property
    def alternating(self) -> int:
        """Number of forward passes that alternate with backward passes."""
        return len(self.forward.positions) - self.warmup

    @cached_property
    def after(self) -> Numbers:
        """Position after each number's backward pass."""
        return [ended + 1 for ended in self.backward.place_of]

    @cached_property
    def replaced_at(self) -> Numbers:
        """Position at which the next microbatch's input replaces each number's in the module."""
        following = [*self.forward.place_of[1:], self.end]
        last = self.num_microbatches - 1
        following[last :: self.num_microbatches] = [self.end] * self.vpp
        return following

    @cached_property
    def held_by_module(self) -> Numbers:
        """Numbers whose input is still in the module when their backward pass is over."""
        longer = map(gt, self.replaced_at, self.after)
        return [*compress(range(len(self.after)), longer)]

    @property
    def vpp(self) -> int:
        """Number of virtual stages."""
        return len(self.forward.positions) // self.num_microbatches

    @property
    def end(self) -> int:
        """Position after the last action."""
        return 2 * len(self.forward.positions)

    @cached_property
    def next_inputs(self) -> Numbers:
        """Number whose input is received after each forward pass, or `NONE`."""
        order = self.forward.order.numbers
        if self.place.pp_rank:
            return [*order[1:], NONE]
        return _received(order, self.num_microbatches, self.place.pp)

    @cached_property
    def next_gradients(self) -> Numbers:
        """Number whose output gradient is received after each backward pass, or `NONE`."""
        order = self.backward.order.numbers
        if not self.is_last:
            return [*order[1:], NONE]
        return _received(order, -self.num_microbatches, self.place.pp)

    @property
    def is_last(self) -> bool:
        """Whether the rank is the last one."""
        return self.place.pp_rank == self.place.pp - 1

    def _by_variables(self) -> Iterator[LiveSpans]:
        """Yield buffers that variables keep alive after their pass, unless a module has them."""
        gradients, inputs, order = _held_gradients(self), _held_inputs(self), self.backward.order
        numbers = [*gradients]
        starts, sources = [self.after[each] for each in numbers], [*map(self.output, numbers)]
        yield LiveSpans(starts, [*gradients.values()], sources)
        over = [position + 1 for position in self.backward.positions]
        begins = over.copy()
        for number in self.held_by_module:
            begins[order.places[number]] = self.replaced_at[number]
        places = [order.places[number] for number in inputs]
        starts, sources = [begins[each] for each in places], [order.inputs[each] for each in places]
        yield LiveSpans(starts, [*inputs.values()], sources, 2)
        for place, until in zip(places, inputs.values(), strict=True):
            begins[place] = max(begins[place], until)
        ends = [*over[1:], self.end]
        if self.alternating:
            ends[self.alternating - 1] = self.end
        yield LiveSpans(begins, ends, order.inputs)


def _pending_spans(rank: _Interleaved) -> Iterator[LiveSpans]:
    """Yield buffers that wait for their pass, and those still being sent."""
    forward, backward = rank.forward, rank.backward
    yield _received_spans(forward, rank.next_inputs, forward.order.inputs)
    yield _received_spans(backward, rank.next_gradients, backward.order.outputs)
    running = backward.positions[: rank.alternating]
    if running and not rank.is_last:
        yield LiveSpans([rank.warmup], running[:1], backward.order.outputs[:1])
    yield LiveSpans(running, [at + 1 for at in running], forward.order.outputs[rank.warmup :])


def _received_spans(passes: _Passes, following: Numbers, sources: Numbers) -> LiveSpans:
    """Return the spans of buffers received for *following* numbers, one after each of *passes*.

    Args:
        passes: Passes in order.
        following: Number received after each of them.
        sources: Source that each of *passes* receives.
    """
    order, positions, _ = passes
    starts = [position + 1 for position in positions]
    if following[:-1] == order.numbers[1:]:  # each time that of the next pass
        return LiveSpans(starts[:-1], positions[1:], sources[1:])
    places = [order.places[number] for number in following if number != NONE]
    return LiveSpans(
        [*compress(starts, [number != NONE for number in following])],
        [*map(positions.__getitem__, places)],
        [*map(sources.__getitem__, places)],
    )


def _module_spans(rank: _Interleaved) -> Iterator[LiveSpans]:
    """Yield inputs, with their gradients, of passes that are over; first, of the step before."""
    sources = range(1, 2 * rank.vpp, 2)
    begun = rank.forward.place_of[:: rank.num_microbatches]
    yield LiveSpans([0] * rank.vpp, begun, [*sources], 2)
    starts, ends = (
        [each[at] for at in rank.held_by_module] for each in (rank.after, rank.replaced_at)
    )
    yield LiveSpans(starts, ends, [rank.output(number) + 1 for number in rank.held_by_module], 2)


def _held_inputs(rank: _Interleaved) -> dict[int, int]:
    """Return the position until which variables hold a number's input: "input_tensor", slots."""
    found: dict[int, int] = {}
    if rank.place.pp_rank == 0:
        received = rank.next_inputs[rank.warmup :]
        found = _slot_spans(rank, received, rank.forward.positions[rank.warmup :])
    first = rank.next_inputs[rank.warmup - 1]
    if first != NONE:
        found[first] = rank.end
    return found


def _held_gradients(rank: _Interleaved) -> dict[int, int]:
    """Return the position until which variables hold the gradient of a number's output.

    Beside slots that is "recv_next_wait_handle": after the last forward pass each backward pass
    whose gradient was requested before takes it in turn.
    """
    found: dict[int, int] = {}
    received, running = rank.next_gradients[: rank.alternating], rank.backward.order.numbers
    ended = rank.backward.place_of
    if rank.is_last:
        found = _slot_spans(rank, received, rank.backward.positions[: rank.alternating])
        first = len(running) - rank.num_microbatches  # of the last virtual stage
        running = [number for number in running if number < first]
    num_requested = len(received) - received.count(NONE)
    num_requested += rank.alternating > 0 and not rank.is_last
    alternated = rank.warmup + 2 * rank.alternating
    requested = [each for each in running[:num_requested] if ended[each] >= alternated]
    until = [*(ended[number] for number in requested), rank.end][1:]
    for number, left in zip(requested, until, strict=True):
        found[number] = max(found.get(number, 0), left)
    return found


def _slot_spans(rank: _Interleaved, received: Numbers, positions: Numbers) -> dict[int, int]:
    """Return the position until which slots hold what is *received* after passes at *positions*."""
    ends = _slot_ends(positions, received, rank.group - rank.place.pp + 1, rank.end)
    return {number: end for number, end in zip(received, ends, strict=True) if number != NONE}


def _received(order: Numbers, step: int, pp: int) -> Numbers:
    """Return the numbers received after each pass of *order* at an end of *pp* ranks.

    What returns from the other end comes as soon as that has made it, pp - 1 passes before, for the
    number that is *step* farther (`recv_tensor_from_previous_stage`).
    """
    sources = order[: max(0, len(order) - pp)]
    numbers = [number + step for number in sources]
    exists = range(len(order))
    arriving = [number if number in exists else NONE for number in numbers]
    none_yet = [NONE] * (min(pp, len(order)) - 1)
    return [*none_yet, *arriving, NONE]


def _slot_ends(positions: Numbers, received: Numbers, num_slots: int, end: int) -> Numbers:
    """Return the position until which slots hold what is *received* after passes.

    Of ``fwd_recv_buffer`` or ``bwd_recv_buffer`` a pass fills the next slot in turn with what is
    received after it, and then empties that of the next pass; a single slot holds nothing.
    """
    if num_slots == 1:
        return [0] * len(received)
    ends = [end] * len(received)
    for at, position in enumerate(positions[num_slots - 1 :]):
        if received[at + num_slots - 1] != NONE:
            ends[at] = position + 1
        elif at + num_slots < len(positions):
            ends[at] = positions[at + num_slots] + 1
    return ends
