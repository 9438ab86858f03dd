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
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.memory.sent_messages import SentBytes
from meshwright.simulator.schedules import Action, Phase

Column: TypeAlias = NDArray[np.int64]
NONE = -1


class PipelinePlace(NamedTuple):
    """Which rank of how many, counted from 0."""

    pp_rank: int
    pp: int


class PassColumns(NamedTuple):
    """What a rank runs, in order."""

    is_backward: NDArray[np.bool_]
    virtual_stage: Column
    microbatch: Column

    @classmethod
    def of(cls, actions: Sequence[Action]) -> "PassColumns":
        """Return *actions* as columns."""
        phases, virtual_stages, microbatches = zip(*actions, strict=True)
        is_backward = np.array([phase is Phase.BACKWARD for phase in phases])
        return cls(is_backward, np.array(virtual_stages), np.array(microbatches))


class _Span(NamedTuple):
    """From which action on, and before which one, messages of a size are held so many times.

    ``source`` is twice the virtual stage for its output, one more for the gradient that it sends.
    """

    start: Column
    end: Column
    source: Column
    times: int = 1


class HeldMessages(NamedTuple):
    """By how much the number of messages held changes before an action, by their ``source``."""

    num_actions: int
    position: Column
    source: Column
    change: Column

    @classmethod
    def of(cls, passes: PassColumns, place: PipelinePlace) -> "HeldMessages":
        """Return what a rank holds that runs *passes*.

        A backward pass itself needs the gradient of its output, from its first operator to its
        last.

        Args:
            passes: What it runs.
            place: Which rank it is.
        """
        is_interleaved = passes.virtual_stage.any()
        spans = [*(_Interleaved.of(passes, place).spans() if is_interleaved else _plain(passes))]
        starts = [each.start for each in spans]
        ends = [np.maximum(each.start, each.end) for each in spans]
        counts = np.repeat([each.times for each in spans], [*map(len, starts)])
        return cls(
            len(passes.is_backward),
            np.concatenate([*starts, *ends]),
            np.concatenate([each.source for each in spans] * 2),
            np.concatenate([counts, -counts]),
        )

    def sums(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what is held in each action.

        Args:
            sizes: Of what each virtual stage sends, two rows each: its output, then the gradient.
                It receives gradients as large as its outputs, and inputs as large as the
                gradients that it sends.

        Returns:
            A row for each action, with the columns of *sizes*.
        """
        width = sizes.shape[1]
        changes = np.zeros((self.num_actions + 1) * width, np.int64)
        at = self.position[:, None] * width + np.arange(width)
        np.add.at(changes, at.ravel(), (sizes[self.source] * self.change[:, None]).ravel())
        return np.asarray(changes.reshape(-1, width)[:-1].cumsum(axis=0), np.int64)


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
    sizes = np.array(sent, np.int64).reshape(-1, 1)
    held: list[int] = HeldMessages.of(PassColumns.of(actions), place).sums(sizes)[:, 0].tolist()
    return held


def held_between_steps(sent: Sequence[SentBytes]) -> int:
    """Return what lies in the modules until the next step: their last inputs, and gradients."""
    return sum(2 * each.gradient for each in sent)


def _outputs(virtual_stages: Column) -> Column:
    return 2 * virtual_stages


def _inputs(virtual_stages: Column) -> Column:
    return 2 * virtual_stages + 1


def _plain(passes: PassColumns) -> Iterator[_Span]:
    """Yield what `forward_backward_pipelining_without_interleaving` holds.

    A backward pass leaves ``output_tensor`` (so its input), ``input_tensor_grad`` and
    ``output_tensor_grad`` behind; the next one begins with its own in place of all but the second.
    """
    is_backward, stages, _ = passes
    first = int(is_backward.argmax())
    yield _Span(np.array([first + 1]), np.array([len(stages)]), _inputs(stages[:1]))
    forward = np.flatnonzero(~is_backward[first:]) + first
    for source in (_inputs, _outputs):
        yield _Span(forward, forward + 1, source(stages[forward]))


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
    forward: Column
    backward: Column
    began: Column
    ended: Column

    @classmethod
    def of(cls, passes: PassColumns, place: PipelinePlace) -> "_Interleaved":
        """Return the variables of a rank that runs *passes*."""
        is_backward, virtual_stage, microbatch = passes
        num_microbatches = int(microbatch.max()) + 1
        numbers = virtual_stage * num_microbatches + microbatch
        positions = [np.flatnonzero(~is_backward), np.flatnonzero(is_backward)]
        orders = [numbers[each] for each in positions]
        places = [np.empty_like(each) for each in orders]
        for each, order, position in zip(places, orders, positions, strict=True):
            each[order] = position
        return cls(place, num_microbatches, *orders, *places)

    def spans(self) -> Iterator[_Span]:
        """Yield what is held."""
        yield from _waiting(self)
        yield from self._in_modules()
        yield from self._by_variables()

    @cached_property
    def stages(self) -> Column:
        """The virtual stage of each number."""
        return np.arange(len(self.forward)) // self.num_microbatches

    @cached_property
    def group(self) -> int:
        """How many microbatches go through a virtual stage before the first goes on."""
        return int((self.forward >= self.num_microbatches).argmax())

    @cached_property
    def warmup(self) -> int:
        """Forward passes before those that alternate with backward passes."""
        pp_rank, pp = self.place
        before = 2 * (pp - 1 - pp_rank) + int(self.stages[-1]) * self.group
        return min(before, len(self.forward))

    @cached_property
    def alternating(self) -> int:
        """Forward passes that do, and backward passes."""
        return len(self.forward) - self.warmup

    @cached_property
    def left_module(self) -> Column:
        """From where on the next microbatch's input is in the module, for each number."""
        following = np.append(self.began[1:], 0)
        following[self.num_microbatches - 1 :: self.num_microbatches] = self._end
        return following

    @property
    def _end(self) -> int:
        return 2 * len(self.forward)

    @cached_property
    def inputs(self) -> Column:
        """The number whose input is received after each forward pass, if one is."""
        if self.place.pp_rank:
            return np.append(self.forward[1:], NONE)
        return _received(self.forward, self.num_microbatches, 1, self.place.pp)

    @cached_property
    def gradients(self) -> Column:
        """The number whose output's gradient is received after each backward pass, if one is."""
        if not self.is_last:
            return np.append(self.backward[1:], NONE)
        return _received(self.backward, self.num_microbatches, -1, self.place.pp)

    @property
    def is_last(self) -> bool:
        """Whether the rank is the last one."""
        return self.place.pp_rank == self.place.pp - 1

    def _in_modules(self) -> Iterator[_Span]:
        """Yield inputs of passes that are over, with their gradients; first, of the step before."""
        first = np.arange(0, len(self.forward), self.num_microbatches)
        yield _Span(np.zeros_like(first), self.began[first], _inputs(self.stages[first]), 2)
        yield _Span(self.ended + 1, self.left_module, _inputs(self.stages), 2)

    def _by_variables(self) -> Iterator[_Span]:
        """Yield what variables hold of passes that are over, unless it lies in a module."""
        inputs, begins = self._held_inputs(), np.maximum(self.ended + 1, self.left_module)
        yield _Span(begins, inputs, _inputs(self.stages), 2)
        # "input_tensor_grad" until the next backward pass is over, and "send_prev_wait_handle".
        until = np.append(self.ended[self.backward[1:]] + 1, self._end)
        if self.alternating:
            until[self.alternating - 1] = self._end
        gradients = np.empty_like(until)
        gradients[self.backward] = until
        yield _Span(np.maximum(begins, inputs), gradients, _inputs(self.stages))
        yield _Span(self.ended + 1, self._held_gradients(), _outputs(self.stages))

    def _held_inputs(self) -> Column:
        """Return until where variables hold each number's input: "input_tensor", and slots."""
        found = np.zeros_like(self.began)
        if self.place.pp_rank == 0:
            self._fill(found, self.inputs[self.warmup :], self.began[self.forward[self.warmup :]])
        first = self.inputs[self.warmup - 1]
        if first != NONE:
            found[first] = self._end
        return found

    def _held_gradients(self) -> Column:
        """Return until where variables hold the gradient of each number's output.

        Beside slots that is "recv_next_wait_handle": after the last forward pass each backward pass
        whose gradient was requested before takes it in turn.
        """
        found, received = np.zeros_like(self.ended), self.gradients[: self.alternating]
        running = self.backward
        if self.is_last:
            self._fill(found, received, self.ended[running[: self.alternating]])
            running = running[self.stages[running] < self.stages[-1]]
        num_requested = (received != NONE).sum() + (self.alternating > 0 and not self.is_last)
        requested = running[:num_requested]
        requested = requested[self.ended[requested] >= self.warmup + 2 * self.alternating]
        until = np.append(self.ended[requested], self._end)[1:]
        found[requested] = np.maximum(found[requested], until)
        return found

    def _fill(self, until: Column, received: Column, positions: Column) -> None:
        """Write until where an end's slots hold what is *received* after passes at *positions*."""
        ends = _slot_ends(positions, received, self.group - self.place.pp + 1, self._end)
        until[received[received != NONE]] = ends[received != NONE]


def _waiting(rank: _Interleaved) -> Iterator[_Span]:
    """Yield what waits for its pass, and what a runtime still sends."""
    stages, began, ended = rank.stages, rank.began, rank.ended
    found = rank.inputs != NONE
    number = rank.inputs[found]
    yield _Span(began[rank.forward[found]] + 1, began[number], _inputs(stages[number]))
    found = rank.gradients != NONE
    number = rank.gradients[found]
    yield _Span(ended[rank.backward[found]] + 1, ended[number], _outputs(stages[number]))
    if rank.alternating and not rank.is_last:
        first = rank.backward[:1]
        yield _Span(np.array([rank.warmup]), ended[first], _outputs(stages[first]))
    # The output that is being sent is kept until the next forward pass.
    number, running = rank.forward[rank.warmup :], rank.backward[: rank.alternating]
    yield _Span(ended[running], ended[running] + 1, _outputs(stages[number]))


def _received(order: Column, num_microbatches: int, step: int, pp: int) -> Column:
    """Return what is received after each pass of *order* at the end of a pipeline of *pp* ranks.

    What returns from the other end comes as soon as that has made it, pp - 1 passes before, for the
    virtual stage that is *step* farther (`recv_tensor_from_previous_stage`).
    """
    sources = order[: max(0, len(order) - pp)]
    numbers = sources + step * num_microbatches
    found = np.full(len(order), NONE)
    exists = (numbers >= 0) & (numbers < len(order))
    found[pp - 1 : pp - 1 + len(sources)] = np.where(exists, numbers, NONE)
    return found


def _slot_ends(positions: Column, received: Column, num_slots: int, end: int) -> Column:
    """Return until where slots hold what is *received* after the passes at *positions*.

    Of ``fwd_recv_buffer`` or ``bwd_recv_buffer`` a pass fills the next slot in turn with what is
    received after it, and then empties that of the next pass; a single slot holds nothing.
    """
    if num_slots == 1:
        return np.zeros_like(positions)
    ends = np.full(len(received), end)
    later = positions[num_slots:] + 1
    ends[: len(later)] = later
    later = positions[num_slots - 1 :] + 1
    empties = received[num_slots - 1 :] != NONE
    ends[: len(later)][empties] = later[empties]
    return ends
