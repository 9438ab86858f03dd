"""What Megatron-Core's schedules hold of messages beside the inputs of passes in flight.

Names of variables below are those of megatron/core/pipeline_parallel/schedules.py (core 0.16).
Four kinds of tensors are meant: the input that a virtual stage receives in a pass, its gradient,
the output that it sends, and the gradient of that, which it receives.  An input lies in a module
until its next forward pass (`set_input_tensor`), over the step's end, too, and with it its
gradient, its ``grad``; so does that of a pass whose output a variable holds, by the output's graph.
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
MODULES_HOLD = 2
"""Tensors as large as its input that a module holds over the step's end."""


class PipelinePlace(NamedTuple):
    """Which rank of how many, counted from 0."""

    pp_rank: int
    pp: int


class HeldSpans(NamedTuple):
    """From which actions on, and before which, messages are held so many times each.

    None is where it ends before it starts.  A source is twice the virtual stage for what is as
    large as its output, one more for what is as large as the gradient that it sends, its input.
    """

    starts: Numbers
    ends: Numbers
    sources: Numbers
    times: int = 1


def message_counts(actions: Sequence[Action], place: PipelinePlace, vpp: int) -> NDArray[np.int16]:
    """Return how many messages are held in each action beside what passes keep and need.

    A backward pass itself needs the gradient of its output, from its first operator to its last.

    Args:
        actions: What a rank runs.
        place: Which rank it is.
        vpp: Its virtual stages.

    Returns:
        A row for each action, a column for each source of `HeldSpans`.

    >>> from meshwright.simulator.schedules import Phase
    >>> order = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    >>> actions = [Action(Phase(name), 0, index) for name, index in order]
    >>> message_counts(actions, PipelinePlace(1, 3), 1).tolist()
    [[0, 0], [0, 0], [0, 0], [1, 2], [0, 1], [0, 1]]
    """
    if vpp == 1:
        return _counted(_plain(actions), 2, len(actions))
    group = next(at for at, action in enumerate(actions) if action.virtual_stage)
    return _interleaved_counts(place, actions[-1].microbatch + 1, group, vpp)


@lru_cache(maxsize=2048)
def _interleaved_counts(
    place: PipelinePlace, num_microbatches: int, group: int, vpp: int
) -> NDArray[np.int16]:
    """Return the counts of a rank that runs an interleaved order."""
    spans = _Interleaved.of(place, num_microbatches, group, vpp).spans()
    return _counted(spans, 2 * vpp, 2 * vpp * num_microbatches)


def _counted(spans: Iterable[HeldSpans], num_sources: int, num_actions: int) -> NDArray[np.int16]:
    """Return how many messages of each source *spans* hold in each action."""
    held = [*spans]
    columns = zip(*(span[:3] for span in held), strict=True)
    starts, ends, sources = (np.array([*chain.from_iterable(each)], np.int64) for each in columns)
    times = np.repeat([span.times for span in held], [len(span.starts) for span in held])
    lasts = ends > starts
    places = num_sources * np.stack([starts, ends])[:, lasts] + sources[lasts]
    weights = np.stack([times, -times])[:, lasts]
    # Sums of small whole numbers, which are exact as floats.
    num_places = num_sources * (num_actions + 1)
    changes = np.bincount(places.ravel(), weights.ravel(), minlength=num_places)
    held_at = changes.reshape(-1, num_sources).cumsum(axis=0)[:-1]
    return held_at.astype(np.int16)  # orders are kept: few are ever held


def most_messages(vpp: int, larger: int) -> int:
    """Return how many messages a rank holds at most.

    Modules of its *vpp* virtual stages hold an input and its gradient each, three more wait for
    their pass or are sent, and two for each microbatch by which groups are *larger* than the
    pipeline.
    """
    return 2 * vpp + 3 + 2 * larger


def _plain(actions: Sequence[Action]) -> Iterator[HeldSpans]:
    """Yield what `forward_backward_pipelining_without_interleaving` holds.

    A backward pass leaves ``output_tensor`` (so its input), ``input_tensor_grad`` and
    ``output_tensor_grad`` behind; the next one begins with its own in place of all but the second.
    """
    directions = [action.phase.direction for action in actions]
    first, end = directions.index(-1), len(directions)
    yield HeldSpans([first + 1], [end], [1])
    forward = [at for at in range(first, end) if directions[at] > 0]
    for source in (0, 1):
        yield HeldSpans(forward, [at + 1 for at in forward], [source] * len(forward))


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
        """Return the order of *actions*, with so many microbatches in a step."""
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
    """An order of passes, and where a rank runs them among all actions, in order and by number."""

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
        place: Which rank it is.
        num_microbatches: Of a step.
        group: How many of them go through a virtual stage before the first goes on.
        warmup: Forward passes before those that alternate with backward passes.
        forward: Its forward passes.
        backward: Its backward passes.
    """

    place: PipelinePlace
    num_microbatches: int
    group: int
    warmup: int
    forward: _Passes
    backward: _Passes

    @classmethod
    def of(
        cls, place: PipelinePlace, num_microbatches: int, group: int, vpp: int
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

    def spans(self) -> Iterator[HeldSpans]:
        """Yield what is held."""
        yield from _waiting(self)
        yield from _in_modules(self)
        yield from self._by_variables()

    def output(self, number: int) -> int:
        """Return the source of a number's output; that of its input is one more."""
        return 2 * (number // self.num_microbatches)

    @property
    def alternating(self) -> int:
        """Forward passes that do, and backward passes."""
        return len(self.forward.positions) - self.warmup

    @cached_property
    def after(self) -> Numbers:
        """From where on each number's backward pass is over."""
        return [ended + 1 for ended in self.backward.place_of]

    @cached_property
    def left_module(self) -> Numbers:
        """From where on the next microbatch's input is in the module, for each number."""
        following = [*self.forward.place_of[1:], self.end]
        last = self.num_microbatches - 1
        following[last :: self.num_microbatches] = [self.end] * self.vpp
        return following

    @cached_property
    def lying(self) -> Numbers:
        """The numbers whose input lies in the module when their backward pass is over."""
        longer = map(gt, self.left_module, self.after)
        return [*compress(range(len(self.after)), longer)]

    @property
    def vpp(self) -> int:
        """Virtual stages."""
        return len(self.forward.positions) // self.num_microbatches

    @property
    def end(self) -> int:
        """Position after the last action."""
        return 2 * len(self.forward.positions)

    @cached_property
    def next_inputs(self) -> Numbers:
        """The number whose input is received after each forward pass, if one is."""
        order = self.forward.order.numbers
        if self.place.pp_rank:
            return [*order[1:], NONE]
        return _received(order, self.num_microbatches, self.place.pp)

    @cached_property
    def next_gradients(self) -> Numbers:
        """The number whose output's gradient is received after each backward pass, if one is."""
        order = self.backward.order.numbers
        if not self.is_last:
            return [*order[1:], NONE]
        return _received(order, -self.num_microbatches, self.place.pp)

    @property
    def is_last(self) -> bool:
        """Whether the rank is the last one."""
        return self.place.pp_rank == self.place.pp - 1

    def _by_variables(self) -> Iterator[HeldSpans]:
        """Yield what variables hold of passes that are over, unless it lies in a module."""
        gradients, inputs, order = _held_gradients(self), _held_inputs(self), self.backward.order
        numbers = [*gradients]
        starts, sources = [self.after[each] for each in numbers], [*map(self.output, numbers)]
        yield HeldSpans(starts, [*gradients.values()], sources)
        over = [position + 1 for position in self.backward.positions]
        begins = over.copy()
        for number in self.lying:
            begins[order.places[number]] = self.left_module[number]
        places = [order.places[number] for number in inputs]
        starts, sources = [begins[each] for each in places], [order.inputs[each] for each in places]
        yield HeldSpans(starts, [*inputs.values()], sources, 2)
        for place, until in zip(places, inputs.values(), strict=True):
            begins[place] = max(begins[place], until)
        # "input_tensor_grad" until the next backward pass is over, and "send_prev_wait_handle".
        ends = [*over[1:], self.end]
        if self.alternating:
            ends[self.alternating - 1] = self.end
        yield HeldSpans(begins, ends, order.inputs)


def _waiting(rank: _Interleaved) -> Iterator[HeldSpans]:
    """Yield what waits for its pass, and what a runtime still sends."""
    forward, backward = rank.forward, rank.backward
    yield _received_spans(forward, rank.next_inputs, forward.order.inputs)
    yield _received_spans(backward, rank.next_gradients, backward.order.outputs)
    running = backward.positions[: rank.alternating]
    if running and not rank.is_last:
        yield HeldSpans([rank.warmup], running[:1], backward.order.outputs[:1])
    # The output that is being sent is kept until the next forward pass.
    yield HeldSpans(running, [at + 1 for at in running], forward.order.outputs[rank.warmup :])


def _received_spans(passes: _Passes, following: Numbers, sources: Numbers) -> HeldSpans:
    """Return the spans of what is received for *following* numbers, one after each of *passes*.

    Args:
        passes: In order.
        following: What is received after each of them.
        sources: What each of *passes* receives.
    """
    order, positions, _ = passes
    starts = [position + 1 for position in positions]
    if following[:-1] == order.numbers[1:]:  # each time that of the next pass
        return HeldSpans(starts[:-1], positions[1:], sources[1:])
    places = [order.places[number] for number in following if number != NONE]
    return HeldSpans(
        [*compress(starts, [number != NONE for number in following])],
        [*map(positions.__getitem__, places)],
        [*map(sources.__getitem__, places)],
    )


def _in_modules(rank: _Interleaved) -> Iterator[HeldSpans]:
    """Yield inputs of passes that are over, with their gradients; first, of the step before."""
    sources = range(1, 2 * rank.vpp, 2)
    begun = rank.forward.place_of[:: rank.num_microbatches]
    yield HeldSpans([0] * rank.vpp, begun, [*sources], 2)
    starts, ends = ([each[at] for at in rank.lying] for each in (rank.after, rank.left_module))
    yield HeldSpans(starts, ends, [rank.output(number) + 1 for number in rank.lying], 2)


def _held_inputs(rank: _Interleaved) -> dict[int, int]:
    """Return until where variables hold a number's input: "input_tensor", and slots."""
    found: dict[int, int] = {}
    if rank.place.pp_rank == 0:
        received = rank.next_inputs[rank.warmup :]
        found = _filled(rank, received, rank.forward.positions[rank.warmup :])
    first = rank.next_inputs[rank.warmup - 1]
    if first != NONE:
        found[first] = rank.end
    return found


def _held_gradients(rank: _Interleaved) -> dict[int, int]:
    """Return until where variables hold the gradient of a number's output.

    Beside slots that is "recv_next_wait_handle": after the last forward pass each backward pass
    whose gradient was requested before takes it in turn.
    """
    found: dict[int, int] = {}
    received, running = rank.next_gradients[: rank.alternating], rank.backward.order.numbers
    ended = rank.backward.place_of
    if rank.is_last:
        found = _filled(rank, received, rank.backward.positions[: rank.alternating])
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


def _filled(rank: _Interleaved, received: Numbers, positions: Numbers) -> dict[int, int]:
    """Return until where an end's slots hold what is *received* after passes at *positions*."""
    ends = _slot_ends(positions, received, rank.group - rank.place.pp + 1, rank.end)
    return {number: end for number, end in zip(received, ends, strict=True) if number != NONE}


def _received(order: Numbers, step: int, pp: int) -> Numbers:
    """Return what is received after each pass of *order* at the end of a pipeline of *pp* ranks.

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
    """Return until where slots hold what is *received* after the passes at *positions*.

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
