"""What Megatron-Core's schedules hold of messages beside the inputs of passes in flight.

Names of variables below are those of megatron/core/pipeline_parallel/schedules.py (core 0.16).
Four kinds of tensors are meant: the input that a virtual stage receives in a pass, its gradient,
the output that it sends, and the gradient of that, which it receives.  An input lies in a module
until its next forward pass (`set_input_tensor`), over the step's end, too, and with it its
gradient, its ``grad``; so does that of a pass whose output a variable holds, by the output's graph.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.simulator.memory.sent_messages import SentBytes
from meshwright.simulator.schedules import Action, Pass, Phase, passes_and_receives


class PipelinePlace(NamedTuple):
    """Which rank of how many, counted from 0."""

    pp_rank: int
    pp: int


def held_messages(
    actions: Sequence[Action], sent: Sequence[SentBytes], place: PipelinePlace
) -> Iterator[int]:
    """Yield the bytes that are held in each action beside what passes keep and need.

    A backward pass itself needs the gradient of its output, from its first operator to its last.

    Args:
        actions: What a rank runs.
        sent: What each of its virtual stages sends; it receives gradients as large as its outputs,
            and inputs as large as the gradients that it sends.
        place: Which rank it is.

    >>> order = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    >>> actions = [Action(Phase(name), 0, index) for name, index in order]
    >>> list(held_messages(actions, [SentBytes(output=10, gradient=1)], PipelinePlace(1, 3)))
    [0, 0, 0, 12, 1, 1]
    """
    if len(sent) > 1:
        return _Interleaved.of(actions, sent, place).levels(place)
    return _plain_levels(actions, sent[0])


def held_between_steps(sent: Sequence[SentBytes]) -> int:
    """Return what lies in the modules until the next step: their last inputs, and gradients."""
    return sum(2 * each.gradient for each in sent)


def _plain_levels(actions: Sequence[Action], sent: SentBytes) -> Iterator[int]:
    """Yield the levels of `forward_backward_pipelining_without_interleaving`.

    A backward pass leaves ``output_tensor`` (so its input), ``input_tensor_grad`` and
    ``output_tensor_grad`` behind; the next one begins with its own in place of all but the second.
    """
    left = 2 * sent.gradient + sent.output
    is_first = True
    for phase, _, _ in actions:
        is_backward = phase is Phase.BACKWARD
        yield 0 if is_first else sent.gradient if is_backward else left
        is_first &= not is_backward


@dataclass(slots=True)
class _Interleaved:
    """The variables of `forward_backward_pipelining_with_interleaving` with ``overlap_p2p_comm``.

    Args:
        sent: What each virtual stage sends.
        forward: Passes, each with that whose input is received after it.
        backward: Passes, each with that whose output's gradient is received after it.
        begun: Forward passes of each virtual stage.
        ended: Backward passes of each.
        inputs: Variables that hold an input besides modules and what waits for it, by its pass.
        input_gradients: Variables that hold the gradient of an input.
        gradients: Variables that hold the gradient of an output besides what waits for it.
        requested: ``recv_next_wait_handles``, by what each receives.
        held_bytes: What waits for its pass, and in modules the inputs of those that are over.
    """

    sent: Sequence[SentBytes]
    forward: list[tuple[Pass, Pass | None]]
    backward: list[tuple[Pass, Pass | None]]
    begun: list[int]
    ended: list[int]
    inputs: dict[object, Pass] = field(default_factory=dict)
    input_gradients: dict[object, Pass] = field(default_factory=dict)
    gradients: dict[object, Pass] = field(default_factory=dict)
    requested: deque[Pass] = field(default_factory=deque)
    held_bytes: int = 0

    @classmethod
    def of(
        cls, actions: Sequence[Action], sent: Sequence[SentBytes], place: PipelinePlace
    ) -> "_Interleaved":
        """Return the variables before a rank runs *actions*; modules hold old inputs."""
        none = [0] * len(sent)
        forward, backward = (
            passes_and_receives(actions, phase, *place, len(sent))
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        return cls(
            sent,
            forward,
            backward,
            none,
            [*none],
            held_bytes=held_between_steps(sent) + sent[0].gradient,
        )

    def levels(self, place: PipelinePlace) -> Iterator[int]:
        """Yield what is held in each action."""
        pp_rank, pp = place
        group = next(index for index, (one, _) in enumerate(self.forward) if one[0])
        behind = 2 * (pp - 1 - pp_rank)
        warmup = min(behind + (len(self.sent) - 1) * group, len(self.forward))
        # fwd_recv_buffer and bwd_recv_buffer have as many slots on the first and the last rank.
        slots = [group - pp + 1 if pp_rank == end else 1 for end in (0, pp - 1)]
        for index in range(warmup):
            yield self._run_forward(index)
        _put(self.inputs, "input_tensor", self.forward[warmup - 1][1])
        alternating = len(self.forward) - warmup
        if alternating and pp_rank < pp - 1:
            self._wait(self.backward[0][0], is_requested=True)
        for index in range(alternating):
            yield self._run_forward(warmup + index, slots[0])
            # The output that is being sent is kept until the next forward pass.
            output_bytes = self.sent[self.forward[warmup + index][0][0]].output
            yield output_bytes + self._run_backward(index, slots[1])
        last = self.forward[-1][0]
        _put(self.inputs, "output_tensor", last if self.sent[last[0]].output else None)
        if not alternating:
            self._wait(self.backward[0][0])
        for index in range(alternating, len(self.backward)):
            yield self._run_backward(index)

    def _run_forward(self, index: int, num_slots: int = 1) -> int:
        """Run a forward pass and what follows it; return what was held in it."""
        (virtual_stage, _), received = self.forward[index]
        size_bytes = self.sent[virtual_stage].gradient
        is_over = self.begun[virtual_stage] == self.ended[virtual_stage]
        self.held_bytes -= 3 * size_bytes if is_over else size_bytes
        self.begun[virtual_stage] += 1
        during = self._held()
        if received is not None:
            self.held_bytes += self.sent[received[0]].gradient
        if num_slots > 1:
            _fill(self.inputs, index, received, num_slots)
        return during

    def _run_backward(self, index: int, num_slots: int = 0) -> int:
        """Run a backward pass and what follows it; return what was held in it.

        With *num_slots* it follows a forward pass: messages go meanwhile.
        """
        one, received = self.backward[index]
        virtual_stage, _ = one
        output_bytes, size_bytes = self.sent[virtual_stage]
        self.held_bytes -= output_bytes
        if self.requested and output_bytes:
            waited_for = self.requested.popleft()
            if not num_slots:
                self.gradients["recv_next_wait_handle"] = waited_for
        during = self._held()
        self.ended[virtual_stage] += 1
        if self.begun[virtual_stage] == self.ended[virtual_stage]:
            self.held_bytes += 2 * size_bytes
        self.input_gradients["input_tensor_grad"] = one
        if num_slots:
            self.input_gradients["send_prev_wait_handle"] = one
        if received is not None:
            self._wait(received, is_requested=num_slots > 0)
        if num_slots > 1:
            _fill(self.gradients, index, received, num_slots)
        return during

    def _wait(self, one: Pass, *, is_requested: bool = False) -> None:
        """Receive the gradient of the output of *one*, or request it."""
        self.held_bytes += self.sent[one[0]].output
        if is_requested:
            self.requested.append(one)

    def _held(self) -> int:
        """Return the bytes that are held, but for the gradient of the running pass's output."""
        total, sent, ended = self.held_bytes, self.sent, self.ended
        holders = {*self.inputs.values()}
        for one in holders:
            if one[1] < ended[one[0]] and not self._is_in_module(one):
                total += 2 * sent[one[0]].gradient
        for one in {*self.input_gradients.values()}:
            if one not in holders and not self._is_in_module(one):
                total += sent[one[0]].gradient
        if self.gradients:
            for virtual_stage, microbatch in {*self.gradients.values()}:
                if microbatch < ended[virtual_stage]:
                    total += sent[virtual_stage].output
        return total

    def _is_in_module(self, one: Pass) -> bool:
        return one[1] == self.begun[one[0]] - 1


def _put(variables: dict[object, Pass], name: object, one: Pass | None) -> None:
    """Let a variable hold what is of *one*, or nothing."""
    variables.pop(name, None)
    if one is not None:
        variables[name] = one


def _fill(variables: dict[object, Pass], index: int, received: Pass | None, num_slots: int) -> None:
    """Put what was *received* into the slot of a pass, and empty that of the next one."""
    _put(variables, index % num_slots, received)
    if received is not None:
        _put(variables, (index + 1) % num_slots, None)
