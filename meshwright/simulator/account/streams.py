"""What each stream of a pipeline rank did in a simulated step, from the engine's record."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from meshwright.simulator.engine import (
    Instruction,
    Intervals,
    RankTimes,
    StepTimes,
    StepWork,
    UnitPart,
    busy_end_ps,
    compile_rank,
)
from meshwright.simulator.schedules import Action, Phase


class SpanKind(StrEnum):
    """What a stream is busy with."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    ACTIVATION_MESSAGE = "activation message"
    GRADIENT_MESSAGE = "gradient message"
    PARAMETER_GATHER = "parameter gather"
    GRADIENT_REDUCTION = "gradient reduction"
    TENSOR_SUM = "sum over tensor ranks"
    SHARED_EMBEDDING = "shared embedding reduction"
    GRADIENT_NORM = "gradient norm"


class Span(NamedTuple):
    """A stretch of one stream; virtual stage and microbatch are -1 where they mean nothing."""

    kind: SpanKind
    start_ps: int
    end_ps: int
    virtual_stage: int = -1
    microbatch: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStreams:
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


class _Pass(NamedTuple):
    """One action with what it was to do and when it ran."""

    instruction: Instruction
    action: Action
    start_ps: int
    end_ps: int


class _Collective(NamedTuple):
    """A collective that may start at *ready_ps*, and the messages it gives way to."""

    kind: SpanKind
    virtual_stage: int
    ready_ps: int
    work_ps: int
    messages: Intervals


def rank_streams(work: StepWork, times: StepTimes, pp_rank: int) -> RankStreams:
    """Return what a rank of a folded run did, exact to the picosecond.

    The engine records when each pass ran.  Messages follow from it, since a port has one user
    and sends in order; collectives too, since a group runs one at a time and in order.
    """
    rank = times.ranks[pp_rank]
    passes = _ran(work, rank, pp_rank)
    messages = tuple(_messages(passes))
    collectives = (
        *_unit_collectives(rank),
        *_run_in_order(_collectives(work, passes, messages, pp_rank)),
        *_final_collectives(work, rank, pp_rank),
    )
    return RankStreams(
        compute=_present([*_passes(passes), *_closing(work, rank, pp_rank)]),
        messages=_present(messages),
        data_parallel=_present(collectives),
    )


def _ran(work: StepWork, rank: RankTimes, pp_rank: int) -> list[_Pass]:
    """Return the passes of a rank in order, each with its instruction."""
    program, num_stages = compile_rank(work, pp_rank), work.num_virtual_stages
    ran = zip(work.actions[pp_rank], rank.starts_ps, rank.ends_ps, strict=True)
    return [
        _Pass(
            program[action.virtual_stage + num_stages * (action.phase is Phase.BACKWARD)],
            action,
            start,
            end,
        )
        for action, start, end in ran
    ]


def _present(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.end_ps > span.start_ps)


def _passes(passes: list[_Pass]) -> Iterator[Span]:
    for _, action, start_ps, end_ps in passes:
        is_forward = action.phase is Phase.FORWARD
        kind = SpanKind.FORWARD if is_forward else SpanKind.BACKWARD
        yield Span(kind, start_ps, end_ps, action.virtual_stage, action.microbatch)


def _closing(work: StepWork, rank: RankTimes, pp_rank: int) -> tuple[Span, Span]:
    rank_work, sums_ps, update_ps = work.ranks[pp_rank], rank.sums_start_ps, rank.update_start_ps
    return (
        Span(SpanKind.TENSOR_SUM, sums_ps, sums_ps + rank_work.sums_ps),
        Span(SpanKind.OPTIMIZER, update_ps, update_ps + rank_work.optimizer_ps),
    )


def _messages(passes: list[_Pass]) -> Iterator[Span]:
    free_ps = 0
    for instruction, action, _, end_ps in passes:
        if instruction.target_step:
            is_forward = action.phase is Phase.FORWARD
            kind = SpanKind.ACTIVATION_MESSAGE if is_forward else SpanKind.GRADIENT_MESSAGE
            start_ps = max(end_ps, free_ps)
            free_ps = start_ps + instruction.message.occupy_ps
            yield Span(kind, start_ps, free_ps, action.virtual_stage, action.microbatch)


def _collectives(
    work: StepWork, passes: list[_Pass], messages: tuple[Span, ...], pp_rank: int
) -> Iterator[_Collective]:
    """Yield the gathers and reductions that passes run beside, then what nothing hides.

    A gather gives way to the messages sent by then, a reduction to all of the step's.
    """
    port = [(sent.start_ps, sent.end_ps) for sent in messages] if work.shared_port else []
    last, num_sent = work.num_microbatches - 1, 0
    for instruction, action, _, _ in passes:
        for segment in instruction.gathers if action.microbatch == 0 else ():
            kind, sent = SpanKind.PARAMETER_GATHER, port[:num_sent]
            yield _Collective(kind, action.virtual_stage, 0, segment.collective_ps, sent)
        num_sent += instruction.target_step != 0
    kind = SpanKind.GRADIENT_REDUCTION
    for instruction, action, start_ps, _ in passes:
        ready_ps = start_ps
        reduces = instruction.reduces_always or action.microbatch == last
        for segment in instruction.reductions if reduces else ():
            ready_ps += segment.compute_ps
            yield _Collective(kind, action.virtual_stage, ready_ps, segment.collective_ps, port)
    ready_ps = passes[-1].end_ps
    if work.blocking_messages and passes[-1].instruction.target_step:
        ready_ps = messages[-1].end_ps
    if work.sums_first:
        ready_ps += work.ranks[pp_rank].sums_ps
    yield _Collective(kind, -1, ready_ps, work.ranks[pp_rank].reduce_ps, port)


def _unit_collectives(rank: RankTimes) -> Iterator[Span]:
    """Yield the collectives of sharded units, which the engine records."""
    kinds = {
        UnitPart.GATHER: SpanKind.PARAMETER_GATHER,
        UnitPart.REDUCTION: SpanKind.GRADIENT_REDUCTION,
    }
    for each in rank.collectives:
        yield Span(kinds[each.part], each.start_ps, each.end_ps)


def _run_in_order(collectives: Iterable[_Collective]) -> Iterator[Span]:
    free_ps = 0
    for each in collectives:
        if each.work_ps:
            start_ps = max(free_ps, each.ready_ps)
            free_ps = busy_end_ps(start_ps, each.work_ps, each.messages)
            yield Span(each.kind, start_ps, free_ps, each.virtual_stage)


def _final_collectives(work: StepWork, rank: RankTimes, pp_rank: int) -> Iterator[Span]:
    """Yield what surrounds the update: tied table, gradient norm, gather that nothing hides."""
    rank_work = work.ranks[pp_rank]
    if work.pp > 1 and pp_rank in (0, work.pp - 1):
        start_ps = rank.reduce_end_ps - rank_work.shared_embedding_ps
        yield Span(SpanKind.SHARED_EMBEDDING, start_ps, rank.reduce_end_ps)
    yield Span(SpanKind.GRADIENT_NORM, rank.update_start_ps - work.norm_ps, rank.update_start_ps)
    updated_ps = rank.update_start_ps + rank_work.optimizer_ps
    yield Span(SpanKind.PARAMETER_GATHER, updated_ps, updated_ps + rank_work.gather_ps)
