"""What ran in a step: noted by the engine as it runs, read by memory, pictures and traces."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from meshwright.simulator.schedules import Action, Periodic, Phase


class SpanKind(StrEnum):
    """What a stream is busy with, or waits for, beside passes."""

    OPTIMIZER = "optimizer"
    ACTIVATION_MESSAGE = "activation message"
    GRADIENT_MESSAGE = "gradient message"
    PARAMETER_GATHER = "parameter gather"
    GRADIENT_REDUCTION = "gradient reduction"
    REDUCTION_WAIT = "wait for gradient reductions"
    TENSOR_SUM = "sum over tensor ranks"
    SHARED_EMBEDDING = "shared embedding reduction"
    GRADIENT_NORM = "gradient norm"
    ACTIVATION_OFFLOAD = "activations to the host"
    ACTIVATION_RELOAD = "activations to the device"


# By the direction of a pass.
MESSAGES = {1: SpanKind.ACTIVATION_MESSAGE, -1: SpanKind.GRADIENT_MESSAGE}
COPIES = {1: SpanKind.ACTIVATION_OFFLOAD, -1: SpanKind.ACTIVATION_RELOAD}
COMPUTED = (SpanKind.TENSOR_SUM, SpanKind.OPTIMIZER)


class Messages(NamedTuple):
    """When messages leave a port, in order and one after the other."""

    starts_ps: list[int]
    ends_ps: list[int]


class Mark(NamedTuple):
    """What a rank had done when a pass began beside which collectives run, or its end.

    Args:
        position: Of the pass among the rank's actions.
        gather_wait_ps: Time that passes had waited for parameters.
        num_parts: Parts of passes that had begun.
        num_issued: Collectives that had been issued.
        num_queued: Those of them that had not been brought to the group.
    """

    position: int
    gather_wait_ps: int
    num_parts: int
    num_issued: int
    num_queued: int


class Span(NamedTuple):
    """A stretch of one stream: a pass, by the label of its phase, or a `SpanKind`.

    Virtual stage and microbatch are -1 where they mean nothing.
    """

    kind: str
    start_ps: int
    end_ps: int
    virtual_stage: int = -1
    microbatch: int = -1


class RankStreams(NamedTuple):
    """The streams of one rank, each in order of time and without overlap.

    Args:
        compute: Passes, with what they waited for parameters; sums of gradients over
            tensor-parallel ranks that are left to the end; the optimizer.
        messages: Times at which a pipeline message leaves the rank's port.
        data_parallel: Collectives over replicas, from start to end: where messages share the
            port, a collective pauses for each of them.
    """

    compute: tuple[Span, ...]
    messages: tuple[Span, ...]
    data_parallel: tuple[Span, ...]


class RankTimes(NamedTuple):
    """When one rank did what.

    Args:
        actions: Its passes, in order.
        pairs: Where among them forward passes are that ran beside the backward pass behind them;
            they stand one after the other, in the time that both took.
        starts_ps: Start of each.
        ends_ps: End of each, before its message leaves.
        part_starts_ps: Start of each part of those passes that gather parameters for theirs.
        silent: Phase and virtual stage of the passes that send no message.
        messages: When the messages of the others left the port.
        collectives: Those of its data-parallel group that passes or their end call for, in order.
        closing: What follows the last pass, in order: waiting for reductions, sums, the update.
        gather_wait_ps: Time passes waited for parameters, or copied them and their gradients from
            and to the buffers of collectives.
        copy_waits_ps: Time that each pass waited for copies of activations; none where none are.
        copies: Copies of activations, those to the host first.
        copies_behind: The most layers whose copies to the host were not over at a time.
        passes_end_ps: End of the last action, a blocking message included.
        reduce_end_ps: When gradients are reduced, sums over tensor-parallel ranks and a tied
            table included.
        reduce_wait_ps: Time that its reductions kept the rank from going on; neither the sums
            nor waiting for the other end before a tied table's reduction are in it.
        update_start_ps: Start of the optimizer, the same on all ranks.
        end_ps: End of the rank's step.
    """

    actions: Sequence[Action]
    starts_ps: Sequence[int]
    ends_ps: Sequence[int]
    part_starts_ps: Sequence[int]
    silent: tuple[tuple[Phase, int], ...]
    messages: Messages
    collectives: Sequence[Span]
    closing: Sequence[Span]
    gather_wait_ps: int
    passes_end_ps: int
    reduce_end_ps: int
    reduce_wait_ps: int
    update_start_ps: int
    end_ps: int
    pairs: range = range(0)
    copy_waits_ps: Sequence[int] = ()
    copies: Sequence[Span] = ()
    copies_behind: int = 0

    @property
    def senders(self) -> list[Action]:
        """The passes that sent a message, in order."""
        return [action for action in self.actions if action[:2] not in self.silent]

    @property
    def sent_ps(self) -> list[tuple[int, int]]:
        """When the message of each of `senders` left the port, from start to end."""
        return list(zip(*self.messages, strict=True))

    def ran(self, position: int) -> tuple[Action, int, int]:
        """Return one of its passes from start to end."""
        return self.actions[position], self.starts_ps[position], self.ends_ps[position]

    def ran_once(self, position: int) -> tuple[Action, int, int]:
        """Return a pass from start to end by its position where the period stands once."""
        order = self.actions
        return self.ran(order.place(position) if isinstance(order, Periodic) else position)

    @property
    def pairs_once(self) -> range:
        """The `pairs` where the period stands once."""
        pairs, left_out = self.pairs, 0
        if isinstance(self.actions, Periodic):
            left_out = self.actions.size * self.actions.copies
        return pairs and range(pairs.start, pairs.stop - left_out, pairs.step)

    def passes(self) -> Iterator[tuple[Action, int, int]]:
        """Return its passes, each from start to end."""
        return zip(self.actions, self.starts_ps, self.ends_ps, strict=True)

    def streams(self) -> RankStreams:
        """Return what each of its streams did."""
        sent = ((each, *times) for each, times in zip(self.senders, self.sent_ps, strict=True))
        closing = [span for span in self.closing if span.kind is not SpanKind.REDUCTION_WAIT]
        return RankStreams(
            compute=(
                *_spans(lambda phase: phase.label, self.passes()),
                *(span for span in closing if span.kind in COMPUTED),
            ),
            messages=_spans(lambda phase: MESSAGES[phase.direction], sent),
            data_parallel=(
                *self.collectives,
                *(span for span in closing if span.kind not in COMPUTED),
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """The outcome of a run: the step's time and each simulated rank's times.

    ``num_passes`` are those that the engine ran for it: fewer than there are where the steady part
    of a long step is that of a shorter one, again and again.
    """

    step_ps: int
    ranks: tuple[RankTimes, ...]
    num_passes: int = field(default=0, compare=False, repr=False)


def moved_spans(spans: Sequence[Span], distance_ps: int) -> list[Span]:
    """Return *spans* so much later."""
    return [
        each._replace(start_ps=each.start_ps + distance_ps, end_ps=each.end_ps + distance_ps)
        for each in spans
    ]


def _spans(
    kind: Callable[[Phase], str], ran: Iterable[tuple[Action, int, int]]
) -> tuple[Span, ...]:
    """Return what took time."""
    return tuple(
        Span(kind(action.phase), start_ps, end_ps, action.virtual_stage, action.microbatch)
        for action, start_ps, end_ps in ran
        if end_ps > start_ps
    )
