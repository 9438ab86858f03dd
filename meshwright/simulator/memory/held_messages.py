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
from itertools import accumulate
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


@dataclass(frozen=True)
class _Interleaved:
    """The variables of `forward_backward_pipelining_with_interleaving` with ``overlap_p2p_comm``.

    A virtual stage's pass of a microbatch has a number: stages one after the other, in each the
    microbatches one after the other.  ``output_tensor`` holds what lies in its module, too.

    Args:
        place: Which rank it is.
        num_microbatches: Of a step.
        forward: Numbers of forward passes in order.
        backward: Numbers of backward passes in order.
        began: Position of each number's forward pass among all actions.
        ended: Position of its backward pass.
    """

    place: PipelinePlace
    num_microbatches: int
    forward: Numbers
    backward: Numbers
    began: Numbers
    ended: Numbers

    @classmethod
    def of(cls, actions: Sequence[Action], place: PipelinePlace) -> "_Interleaved":
        """Return the variables of a rank that runs *actions*."""
        phases, virtual_stages, microbatches = zip(*actions, strict=True)
        count = max(microbatches) + 1
        pairs = zip(virtual_stages, microbatches, strict=True)
        numbers = [stage * count + microbatch for stage, microbatch in pairs]
        order: dict[Phase, Numbers] = {phase: [] for phase in Phase}
        times = {phase: [0] * (len(actions) // 2) for phase in Phase}
        for position, (phase, number) in enumerate(zip(phases, numbers, strict=True)):
            order[phase].append(number)
            times[phase][number] = position
        return cls(place, count, *order.values(), *times.values())

    def spans(self) -> Iterator[HeldSpans]:
        """Yield what is held."""
        yield from _waiting(self)
        yield from _in_modules(self)
        yield from self._by_variables()

    @cached_property
    def outputs(self) -> Numbers:
        """The source of each number's output."""
        return [2 * (number // self.num_microbatches) for number in range(len(self.forward))]

    @cached_property
    def inputs(self) -> Numbers:
        """The source of each number's input."""
        return [source + 1 for source in self.outputs]

    @cached_property
    def group(self) -> int:
        """How many microbatches go through a virtual stage before the first goes on."""
        return next(at for at, each in enumerate(self.forward) if each >= self.num_microbatches)

    @cached_property
    def warmup(self) -> int:
        """Forward passes before those that alternate with backward passes."""
        pp_rank, pp = self.place
        before = 2 * (pp - 1 - pp_rank) + self.outputs[-1] // 2 * self.group
        return min(before, len(self.forward))

    @property
    def alternating(self) -> int:
        """Forward passes that do, and backward passes."""
        return len(self.forward) - self.warmup

    @cached_property
    def left_module(self) -> Numbers:
        """From where on the next microbatch's input is in the module, for each number."""
        following = [*self.began[1:], self.end]
        last = self.num_microbatches - 1
        following[last :: self.num_microbatches] = [self.end] * (self.outputs[-1] // 2 + 1)
        return following

    @property
    def end(self) -> int:
        """Position after the last action."""
        return 2 * len(self.forward)

    @cached_property
    def next_inputs(self) -> Numbers:
        """The number whose input is received after each forward pass, if one is."""
        if self.place.pp_rank:
            return [*self.forward[1:], NONE]
        return _received(self.forward, self.num_microbatches, self.place.pp)

    @cached_property
    def next_gradients(self) -> Numbers:
        """The number whose output's gradient is received after each backward pass, if one is."""
        if not self.is_last:
            return [*self.backward[1:], NONE]
        return _received(self.backward, -self.num_microbatches, self.place.pp)

    @property
    def is_last(self) -> bool:
        """Whether the rank is the last one."""
        return self.place.pp_rank == self.place.pp - 1

    def _by_variables(self) -> Iterator[HeldSpans]:
        """Yield what variables hold of passes that are over, unless it lies in a module."""
        after = [ended + 1 for ended in self.ended]
        yield HeldSpans(after, self._held_gradients(), self.outputs)
        inputs, begins = self._held_inputs(), [*map(max, after, self.left_module)]
        yield HeldSpans(begins, inputs, self.inputs, 2)
        # "input_tensor_grad" until the next backward pass is over, and "send_prev_wait_handle".
        until = [*(after[number] for number in self.backward[1:]), self.end]
        if self.alternating:
            until[self.alternating - 1] = self.end
        gradients = [0] * len(until)
        for number, left in zip(self.backward, until, strict=True):
            gradients[number] = left
        yield HeldSpans([*map(max, begins, inputs)], gradients, self.inputs)

    def _held_inputs(self) -> Numbers:
        """Return until where variables hold each number's input: "input_tensor", and slots."""
        found = [0] * len(self.forward)
        if self.place.pp_rank == 0:
            positions = [self.began[number] for number in self.forward[self.warmup :]]
            _fill(self, found, self.next_inputs[self.warmup :], positions)
        first = self.next_inputs[self.warmup - 1]
        if first != NONE:
            found[first] = self.end
        return found

    def _held_gradients(self) -> Numbers:
        """Return until where variables hold the gradient of each number's output.

        Beside slots that is "recv_next_wait_handle": after the last forward pass each backward pass
        whose gradient was requested before takes it in turn.
        """
        found, received = [0] * len(self.forward), self.next_gradients[: self.alternating]
        running = self.backward
        if self.is_last:
            positions = [self.ended[number] for number in running[: self.alternating]]
            _fill(self, found, received, positions)
            last = self.outputs[-1]
            running = [number for number in running if self.outputs[number] < last]
        num_requested = sum(each != NONE for each in received)
        num_requested += self.alternating > 0 and not self.is_last
        alternated = self.warmup + 2 * self.alternating
        requested = [each for each in running[:num_requested] if self.ended[each] >= alternated]
        until = [*(self.ended[number] for number in requested), self.end][1:]
        for number, left in zip(requested, until, strict=True):
            found[number] = max(found[number], left)
        return found


def _waiting(rank: _Interleaved) -> Iterator[HeldSpans]:
    """Yield what waits for its pass, and what a runtime still sends."""
    began, ended, outputs = rank.began, rank.ended, rank.outputs
    for places, order, following, sources in (
        (began, rank.forward, rank.next_inputs, rank.inputs),
        (ended, rank.backward, rank.next_gradients, outputs),
    ):
        pairs = [pair for pair in zip(order, following, strict=True) if pair[1] != NONE]
        numbers = [number for _, number in pairs]
        yield HeldSpans(
            [places[before] + 1 for before, _ in pairs],
            [places[number] for number in numbers],
            [sources[number] for number in numbers],
        )
    if rank.alternating and not rank.is_last:
        first = rank.backward[0]
        yield HeldSpans([rank.warmup], [ended[first]], [outputs[first]])
    # The output that is being sent is kept until the next forward pass.
    running = [ended[number] for number in rank.backward[: rank.alternating]]
    sent = [outputs[number] for number in rank.forward[rank.warmup :]]
    yield HeldSpans(running, [at + 1 for at in running], sent)


def _in_modules(rank: _Interleaved) -> Iterator[HeldSpans]:
    """Yield inputs of passes that are over, with their gradients; first, of the step before."""
    first = range(0, len(rank.forward), rank.num_microbatches)
    sources = [rank.inputs[number] for number in first]
    yield HeldSpans([0] * len(sources), [rank.began[number] for number in first], sources, 2)
    yield HeldSpans([ended + 1 for ended in rank.ended], rank.left_module, rank.inputs, 2)


def _fill(rank: _Interleaved, until: Numbers, received: Numbers, positions: Numbers) -> None:
    """Write until where an end's slots hold what is *received* after passes at *positions*."""
    ends = _slot_ends(positions, received, rank.group - rank.place.pp + 1, rank.end)
    for number, end in zip(received, ends, strict=True):
        if number != NONE:
            until[number] = end


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
