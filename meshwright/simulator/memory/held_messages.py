"""What Megatron-Core's schedules hold of messages beside the inputs of passes in flight.

Names of variables below are those of megatron/core/pipeline_parallel/schedules.py (core 0.16).
Four kinds of tensors are meant: the input that a virtual stage receives in a pass, its gradient,
the output that it sends, and the gradient of that, which it receives.  An input lies in a module
until its next forward pass (`set_input_tensor`), over the step's end, too, and with it its
gradient, its ``grad``; so does that of a pass whose output a variable holds, by the output's graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from typing import NamedTuple, TypeAlias

from meshwright.simulator.memory.sent_messages import SentBytes
from meshwright.simulator.schedules import Action, Phase

Numbers: TypeAlias = list[int]
NONE = -1


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


def held_messages(
    actions: Sequence[Action], sent: Sequence[SentBytes], place: PipelinePlace
) -> list[int]:
    """Return the bytes that are held in each action beside what passes keep and need.

    Args:
        actions: What a rank runs.
        sent: What each of its virtual stages sends.
        place: Which rank it is.

    >>> order = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    >>> actions = [Action(Phase(name), 0, index) for name, index in order]
    >>> held_messages(actions, [SentBytes(output=10, gradient=1)], PipelinePlace(1, 3))
    [0, 0, 0, 12, 1, 1]
    """
    sizes = [size_bytes for each in sent for size_bytes in each]
    changes = [0] * (len(actions) + 1)
    for starts, ends, sources, times in held_spans(actions, place):
        for start, end, source in zip(starts, ends, sources, strict=True):
            if end > start:
                size_bytes = sizes[source] * times
                changes[start] += size_bytes
                changes[end] -= size_bytes
    return [*accumulate(changes[:-1])]


def held_between_steps(sent: Sequence[SentBytes]) -> int:
    """Return what lies in the modules until the next step: their last inputs, and gradients."""
    return sum(2 * each.gradient for each in sent)


def most_messages(vpp: int, larger: int) -> int:
    """Return how many messages a rank holds at most.

    Modules of its *vpp* virtual stages hold an input and its gradient each, three more wait for
    their pass or are sent, and two for each microbatch by which groups are *larger* than the
    pipeline.
    """
    return 2 * vpp + 3 + 2 * larger


def held_spans(actions: Sequence[Action], place: PipelinePlace) -> Iterator[HeldSpans]:
    """Yield what a rank holds beside what its passes keep and need.

    A backward pass itself needs the gradient of its output, from its first operator to its last.

    Args:
        actions: What it runs.
        place: Which rank it is.
    """
    if any(action.virtual_stage for action in actions):
        yield from _Interleaved.of(actions, place).spans()
    else:
        yield from _plain(actions)


def _plain(actions: Sequence[Action]) -> Iterator[HeldSpans]:
    """Yield what `forward_backward_pipelining_without_interleaving` holds.

    A backward pass leaves ``output_tensor`` (so its input), ``input_tensor_grad`` and
    ``output_tensor_grad`` behind; the next one begins with its own in place of all but the second.
    """
    phases = [action.phase for action in actions]
    first, end = phases.index(Phase.BACKWARD), len(phases)
    yield HeldSpans([first + 1], [end], [1])
    forward = [at for at in range(first, end) if phases[at] is Phase.FORWARD]
    for source in (0, 1):
        yield HeldSpans(forward, [at + 1 for at in forward], [source] * len(forward))


class _Passes(NamedTuple):
    """The numbers of forward passes, or of backward passes, and their positions among all actions.

    Both in the order in which they run; ``place_of`` has the positions by the number.
    """

    numbers: Numbers
    positions: Numbers
    place_of: Numbers

    @classmethod
    def of(cls, actions: Sequence[Action], positions: Numbers, count: int) -> "_Passes":
        """Return those of *actions* at *positions*, with so many microbatches in a step."""
        numbers = [stage * count + microbatch for _, stage, microbatch in actions]
        place_of = [0] * len(numbers)
        for number, position in zip(numbers, positions, strict=True):
            place_of[number] = position
        return cls(numbers, positions, place_of)


@dataclass(frozen=True)
class _Interleaved:
    """The variables of `forward_backward_pipelining_with_interleaving` with ``overlap_p2p_comm``.

    A virtual stage's pass of a microbatch has a number: stages one after the other, in each the
    microbatches one after the other.  ``output_tensor`` holds what lies in its module, too.

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
    def of(cls, actions: Sequence[Action], place: PipelinePlace) -> "_Interleaved":
        """Return the variables of a rank that runs *actions*."""
        count, num_passes = actions[-1].microbatch + 1, len(actions) // 2
        group = next(at for at, action in enumerate(actions) if action.virtual_stage)
        ahead = 2 * (place.pp - 1 - place.pp_rank) + (num_passes // count - 1) * group
        warmup = min(ahead, num_passes)
        alternated = 2 * num_passes - warmup
        begun, left = range(warmup), range(alternated, len(actions))
        forward = [*begun, *range(warmup, alternated, 2)]
        backward = [*range(warmup + 1, alternated, 2), *left]
        return cls(
            place,
            count,
            group,
            warmup,
            _Passes.of([*actions[:warmup], *actions[warmup:alternated:2]], forward, count),
            _Passes.of(
                [*actions[warmup + 1 : alternated : 2], *actions[alternated:]], backward, count
            ),
        )

    def spans(self) -> Iterator[HeldSpans]:
        """Yield what is held."""
        yield from _waiting(self)
        yield from _in_modules(self)
        yield from self._by_variables()

    @cached_property
    def outputs(self) -> Numbers:
        """The source of each number's output."""
        num_passes, count = len(self.forward.numbers), self.num_microbatches
        return [2 * stage for stage in range(num_passes // count) for _ in range(count)]

    @cached_property
    def inputs(self) -> Numbers:
        """The source of each number's input."""
        return [source + 1 for source in self.outputs]

    @property
    def alternating(self) -> int:
        """Forward passes that do, and backward passes."""
        return len(self.outputs) - self.warmup

    @cached_property
    def after(self) -> Numbers:
        """From where on each number's backward pass is over."""
        return [ended + 1 for ended in self.backward.place_of]

    @cached_property
    def left_module(self) -> Numbers:
        """From where on the next microbatch's input is in the module, for each number."""
        following = [*self.forward.place_of[1:], self.end]
        last = self.num_microbatches - 1
        following[last :: self.num_microbatches] = [self.end] * (self.outputs[-1] // 2 + 1)
        return following

    @cached_property
    def lying(self) -> Numbers:
        """The numbers whose input lies in the module when their backward pass is over."""
        pairs = enumerate(zip(self.left_module, self.after, strict=True))
        return [number for number, (left, over) in pairs if left > over]

    @property
    def end(self) -> int:
        """Position after the last action."""
        return 2 * len(self.outputs)

    @cached_property
    def next_inputs(self) -> Numbers:
        """The number whose input is received after each forward pass, if one is."""
        order = self.forward.numbers
        if self.place.pp_rank:
            return [*order[1:], NONE]
        return _received(order, self.num_microbatches, self.place.pp)

    @cached_property
    def next_gradients(self) -> Numbers:
        """The number whose output's gradient is received after each backward pass, if one is."""
        order = self.backward.numbers
        if not self.is_last:
            return [*order[1:], NONE]
        return _received(order, -self.num_microbatches, self.place.pp)

    @property
    def is_last(self) -> bool:
        """Whether the rank is the last one."""
        return self.place.pp_rank == self.place.pp - 1

    def _by_variables(self) -> Iterator[HeldSpans]:
        """Yield what variables hold of passes that are over, unless it lies in a module."""
        after, sources, begins = self.after, self.inputs, self.after.copy()
        gradients, inputs = self._held_gradients(), self._held_inputs()
        for number in self.lying:
            begins[number] = self.left_module[number]
        yield HeldSpans(
            [after[number] for number in gradients],
            [*gradients.values()],
            [self.outputs[number] for number in gradients],
        )
        yield HeldSpans(
            [begins[number] for number in inputs],
            [*inputs.values()],
            [sources[number] for number in inputs],
            2,
        )
        for number, until in inputs.items():
            begins[number] = max(begins[number], until)
        # "input_tensor_grad" until the next backward pass is over, and "send_prev_wait_handle".
        order, positions, _ = self.backward
        ends = [*(position + 1 for position in positions[1:]), self.end]
        if self.alternating:
            ends[self.alternating - 1] = self.end
        begun = map(begins.__getitem__, order)
        yield HeldSpans([*begun], ends, [*map(sources.__getitem__, order)])

    def _held_inputs(self) -> dict[int, int]:
        """Return until where variables hold a number's input: "input_tensor", and slots."""
        found: dict[int, int] = {}
        if self.place.pp_rank == 0:
            received = self.next_inputs[self.warmup :]
            found = _filled(self, received, self.forward.positions[self.warmup :])
        first = self.next_inputs[self.warmup - 1]
        if first != NONE:
            found[first] = self.end
        return found

    def _held_gradients(self) -> dict[int, int]:
        """Return until where variables hold the gradient of a number's output.

        Beside slots that is "recv_next_wait_handle": after the last forward pass each backward pass
        whose gradient was requested before takes it in turn.
        """
        found: dict[int, int] = {}
        received, running = self.next_gradients[: self.alternating], self.backward.numbers
        ended = self.backward.place_of
        if self.is_last:
            found = _filled(self, received, self.backward.positions[: self.alternating])
            last = self.outputs[-1]
            running = [number for number in running if self.outputs[number] < last]
        num_requested = len(received) - received.count(NONE)
        num_requested += self.alternating > 0 and not self.is_last
        alternated = self.warmup + 2 * self.alternating
        requested = [each for each in running[:num_requested] if ended[each] >= alternated]
        until = [*(ended[number] for number in requested), self.end][1:]
        for number, left in zip(requested, until, strict=True):
            found[number] = max(found.get(number, 0), left)
        return found


def _waiting(rank: _Interleaved) -> Iterator[HeldSpans]:
    """Yield what waits for its pass, and what a runtime still sends."""
    outputs = rank.outputs
    for passes, following, sources in (
        (rank.forward, rank.next_inputs, rank.inputs),
        (rank.backward, rank.next_gradients, outputs),
    ):
        receives = [number != NONE for number in following]
        starts = [position + 1 for position in compress(passes.positions, receives)]
        numbers = [*compress(following, receives)]
        places = [*map(passes.place_of.__getitem__, numbers)]
        yield HeldSpans(starts, places, [*map(sources.__getitem__, numbers)])
    running = rank.backward.positions[: rank.alternating]
    if running and not rank.is_last:
        yield HeldSpans([rank.warmup], running[:1], [outputs[rank.backward.numbers[0]]])
    # The output that is being sent is kept until the next forward pass.
    sent = [outputs[number] for number in rank.forward.numbers[rank.warmup :]]
    yield HeldSpans(running, [at + 1 for at in running], sent)


def _in_modules(rank: _Interleaved) -> Iterator[HeldSpans]:
    """Yield inputs of passes that are over, with their gradients; first, of the step before."""
    first = slice(0, None, rank.num_microbatches)
    begun, sources = rank.forward.place_of[first], rank.inputs[first]
    yield HeldSpans([0] * len(sources), begun, sources, 2)
    spans = rank.after, rank.left_module, rank.inputs
    starts, ends, sources = ([each[number] for number in rank.lying] for each in spans)
    yield HeldSpans(starts, ends, sources, 2)


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
