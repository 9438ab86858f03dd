"""Variables of Megatron-Core's schedules, which keep p2p buffers alive, named as there.

megatron/core/pipeline_parallel/schedules.py of core 0.16; groups are as large as the pipeline.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from meshwright.simulator.schedules import Action, Phase

Buffer = Callable[[Phase, int], Tensor]
"""Of a virtual stage."""

Pass = tuple[int, int]
"""A virtual stage and a microbatch."""


class ScheduleVariables:
    """Variables of `forward_backward_pipelining_without_interleaving`.

    Args:
        buffer: Makes a message's buffer.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.kept: dict[object, object] = {}

    def take(self, phase: Phase, one: Pass) -> Tensor:
        """Return the buffer of a message that a pass begins with."""
        return self.buffer(phase, one[0])

    def begin_forward(self, one: Pass, inputs: Tensor) -> None:
        """Keep a pass's input in its module, until the next one's."""
        self.kept[one[0]] = inputs

    def end_forward(self, _one: Pass, _sent: Tensor | None, root: Tensor) -> None:
        """Keep the output's graph."""
        self.kept["output_tensor"] = root

    def begin_backward(self, _one: Pass, root: Tensor) -> None:
        """Keep the graph that runs backward."""
        self.kept["output_tensor"] = root

    def receive_gradient(self, gradient: Tensor) -> None:
        """Keep the gradient of an output until the next one."""
        self.kept["output_tensor_grad"] = gradient

    def end_backward(self, _one: Pass, gradient: Tensor | None) -> None:
        """Keep the gradient of an input until the next one."""
        self.kept["input_tensor_grad"] = gradient

    def end_step(self) -> None:
        """Keep what lies in modules alone."""
        self.kept = {name: each for name, each in self.kept.items() if isinstance(name, int)}


class InterleavedVariables(ScheduleVariables):
    """Variables of `forward_backward_pipelining_with_interleaving`, with ``overlap_p2p_comm``.

    Args:
        buffer: Makes a message's buffer.
        actions: Actions of the rank, in order.
        place: Pipeline rank, and number of pipeline ranks.
        vpp: Its virtual stages.
    """

    def __init__(
        self, buffer: Buffer, actions: Sequence[Action], place: tuple[int, int], vpp: int
    ) -> None:
        super().__init__(buffer)
        pp_rank, pp = place
        passes = {phase: _passes_and_receives(actions, phase, pp_rank, pp, vpp) for phase in Phase}
        self._following = {phase: dict(pairs) for phase, pairs in passes.items()}
        forward, backward = ([one for one, _ in pairs] for pairs in passes.values())
        warmup = min(2 * (pp - 1 - pp_rank) + (vpp - 1) * pp, len(forward))
        self._last_warmup = forward[warmup - 1]
        self._alternating = {
            Phase.FORWARD: {*forward[warmup:]},
            Phase.BACKWARD: {*backward[: len(forward) - warmup]},
        }
        is_asked = self._alternating[Phase.BACKWARD] and pp_rank < pp - 1
        self._first_gradient = backward[0] if is_asked else None
        self._last = forward[-1]
        self._waiting: dict[tuple[Phase, Pass], Tensor] = {}
        self._requested: list[Pass] = []
        self._running = backward[0]

    def take(self, phase: Phase, one: Pass) -> Tensor:
        """Return the buffer of a message that a pass begins with; most were made before."""
        known = self._waiting.pop((phase, one), None)
        return self.buffer(phase, one[0]) if known is None else known

    def begin_forward(self, one: Pass, inputs: Tensor) -> None:
        """Let the last output go, which has been sent."""
        self.kept.pop("sending", None)
        super().begin_forward(one, inputs)

    def end_forward(self, one: Pass, sent: Tensor | None, root: Tensor) -> None:
        """Request the next input; the output is kept while a backward pass follows."""
        received = self._wait(Phase.FORWARD, self._following[Phase.FORWARD][one])
        if one in self._alternating[Phase.FORWARD]:
            self.kept["sending"] = sent
        if one == self._last_warmup:
            self.kept["input_tensor"] = received
            if self._first_gradient is not None:
                self._requested.append(self._first_gradient)
                self._wait(Phase.BACKWARD, self._first_gradient)
        if one == self._last:
            self.kept["output_tensor"] = None if sent is None else root

    def begin_backward(self, one: Pass, _root: Tensor) -> None:
        """Let the last output go when no forward pass is left."""
        self._running = one
        if one not in self._alternating[Phase.BACKWARD]:
            self.kept.pop("sending", None)

    def receive_gradient(self, gradient: Tensor) -> None:
        """Keep the gradient for the pass; in the cooldown the request keeps it."""
        self.kept["output_tensor_grad"] = gradient
        if self._requested:
            self._requested.pop(0)
            if self._running not in self._alternating[Phase.BACKWARD]:
                self.kept["recv_next_wait_handle"] = gradient

    def end_backward(self, one: Pass, gradient: Tensor | None) -> None:
        """Request the next gradient of an output."""
        super().end_backward(one, gradient)
        self.kept.pop("output_tensor_grad", None)
        following = self._following[Phase.BACKWARD][one]
        if one in self._alternating[Phase.BACKWARD]:
            self.kept["send_prev_wait_handle"] = gradient
            if following is not None:
                self._requested.append(following)
        self._wait(Phase.BACKWARD, following)

    def _wait(self, phase: Phase, one: Pass | None) -> Tensor | None:
        """Return the buffer of a message that is to come; make it if there is none."""
        if one is None:
            return None
        if (phase, one) not in self._waiting:
            self._waiting[phase, one] = self.buffer(phase, one[0])
        return self._waiting[phase, one]


def _passes_and_receives(
    actions: Sequence[Action], phase: Phase, pp_rank: int, pp: int, vpp: int
) -> list[tuple[Pass, Pass | None]]:
    """Return the passes of a phase, each with that whose message is received after it, if one is.

    Between neighbours that is the next pass.  What returns from the other end of the pipeline
    comes as soon as that has made it, pp - 1 passes before (`recv_tensor_from_previous_stage` of
    megatron/core/pipeline_parallel/schedules.py, core 0.16).

    >>> order = [Action(Phase.FORWARD, *each) for each in ((0, 0), (0, 1), (1, 0), (1, 1))]
    >>> [received for _, received in _passes_and_receives(order, Phase.FORWARD, 0, 2, 2)]
    [None, (1, 0), (1, 1), None]
    """
    passes = [each[1:] for each in actions if each.phase is phase]
    is_forward = phase is Phase.FORWARD
    if pp_rank != (0 if is_forward else pp - 1):
        return [*zip(passes, [*passes[1:], None], strict=True)]
    step = 1 if is_forward else -1
    sources = passes[: max(0, len(passes) - pp)]
    arriving = [
        (virtual_stage + step, microbatch) if 0 <= virtual_stage + step < vpp else None
        for virtual_stage, microbatch in sources
    ]
    none_yet = [None] * (len(passes) - 1 - len(sources))
    return [*zip(passes, [*none_yet, *arriving, None], strict=True)]
