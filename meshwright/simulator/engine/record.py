"""Record of a simulated step: times of ranks, read by memory, pictures and traces."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from meshwright.simulator.schedules import Action, Periodic, Phase


class SpanKind(StrEnum):
    """Kind of a span that is no pass."""

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
    """Start and end of each message on a port, in order."""

    starts_ps: list[int]
    ends_ps: list[int]


class Mark(NamedTuple):
    """Progress of a rank at the start of a pass with collectives, or at the end of its passes.

    Args:
        position: Index of the pass among the rank's actions.
        gather_wait_ps: Time waited for parameters so far.
        num_parts: Parts of passes started.
        num_issued: Collectives issued.
        num_queued: Collectives issued but not submitted to the group.
    """

    position: int
    gather_wait_ps: int
    num_parts: int
    num_issued: int
    num_queued: int


class Span(NamedTuple):
    """A span of one stream: a pass, by the label of its phase, or a `SpanKind`.

    Virtual stage and microbatch are -1 where they do not apply.
    """

    kind: str
    start_ps: int
    end_ps: int
    virtual_stage: int = -1
    microbatch: int = -1


class RankStreams(NamedTuple):
    """The streams of one rank, each in order of time and without overlap.

    Args:
        compute: Passes, with waits for parameters; all-reduces of norm gradients over tp after the
            last pass; the optimizer.
        messages: P2p messages on the rank's port.
        data_parallel: Data-parallel collectives; on a shared port a collective pauses for each
            message.
    """

    compute: tuple[Span, ...]
    messages: tuple[Span, ...]
    data_parallel: tuple[Span, ...]


class RankTimes(NamedTuple):
    """Times of one rank.

    Args:
        actions: Its passes, in order.
        pairs: Positions of forward passes that were overlapped with the backward pass after them;
            they are recorded one after the other, in the time of both.
        starts_ps: Start of each.
        ends_ps: End of each, before its message leaves.
        part_starts_ps: Start of each part of passes that gather parameters.
        silent: Phase and virtual stage of the passes that send no message.
        messages: Times of the other passes' messages on the port.
        collectives: Collectives of its data-parallel group, in order.
        closing: Spans after the last pass, in order: waits for reductions, all-reduces, update.
        gather_wait_ps: Time of passes waiting for parameters, or copying into and out of the
            buffers of collectives.
        copy_waits_ps: Time of each pass waiting for activation offload; empty without offload.
        copies: Copies of activations, those to the host first.
        pending_offloads: Peak number of layers whose offload had not ended.
        passes_end_ps: End of the last action, a blocking message included.
        reduce_end_ps: End of all gradient reductions, those over tp and of the tied embedding
            included.
        reduce_wait_ps: Exposed time of its reductions, without those over tp and without the wait
            for the other stage before the tied embedding's.
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
    pending_offloads: int = 0

    @property
    def senders(self) -> list[Action]:
        """The passes that sent a message, in order."""
        return [action for action in self.actions if action[:2] not in self.silent]

    @property
    def sent_ps(self) -> list[tuple[int, int]]:
        """Start and end of the message of each of `senders`."""
        return list(zip(*self.messages, strict=True))

    def ran(self, position: int) -> tuple[Action, int, int]:
        """Return one of its passes with start and end."""
        return self.actions[position], self.starts_ps[position], self.ends_ps[position]

    def ran_once(self, position: int) -> tuple[Action, int, int]:
        """Return a pass with start and end, by its position without repeated periods."""
        order = self.actions
        return self.ran(order.place(position) if isinstance(order, Periodic) else position)

    @property
    def pairs_without_repeats(self) -> range:
        """The `pairs` of the order without repeated periods."""
        pairs, left_out = self.pairs, 0
        if isinstance(self.actions, Periodic):
            left_out = self.actions.size * self.actions.copies
        return pairs and range(pairs.start, pairs.stop - left_out, pairs.step)

    def passes(self) -> Iterator[tuple[Action, int, int]]:
        """Return its passes, each with start and end."""
        return zip(self.actions, self.starts_ps, self.ends_ps, strict=True)

    def streams(self) -> RankStreams:
        """Return the spans of each of its streams."""
        sent = ((each, *times) for each, times in zip(self.senders, self.sent_ps, strict=True))
        # A wait is no work of any stream.
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
    """Result of a simulation: the step's time and each simulated rank's times.

    ``num_passes`` is the number of passes simulated: fewer than the step has where the steady part
    of a long step repeats that of a shorter one.
    """

    step_ps: int
    ranks: tuple[RankTimes, ...]
    num_passes: int = field(default=0, compare=False, repr=False)


def moved_spans(spans: Sequence[Span], distance_ps: int) -> list[Span]:
    """Return *spans* moved by *distance_ps*."""
    return [
        each._replace(start_ps=each.start_ps + distance_ps, end_ps=each.end_ps + distance_ps)
        for each in spans
    ]


def _spans(
    kind: Callable[[Phase], str], ran: Iterable[tuple[Action, int, int]]
) -> tuple[Span, ...]:
    """Return the spans of passes or messages that took time."""
    return tuple(
        Span(kind(action.phase), start_ps, end_ps, action.virtual_stage, action.microbatch)
        for action, start_ps, end_ps in ran
        if end_ps > start_ps
    )
