"""A rank's action list made ready to run: what each action waits for, takes and sends."""

from typing import NamedTuple

from simulator.engine.work import ChunkWork, Message, Segment, StepWork
from simulator.schedules import Action, Phase

NOTHING = Message()


class Instruction(NamedTuple):
    """One action of a rank.

    ``inbox`` is the slot of the message it waits for (-1: none); ``target_step`` is the
    distance on the pipeline axis to the receiver of its own message (0: none), ``target_slot``
    the slot there.
    """

    inbox: int
    microbatch: int
    compute_ps: int
    gathers: tuple[Segment, ...]
    reductions: tuple[Segment, ...]
    target_step: int
    target_slot: int
    message: Message


def compile_rank(work: StepWork, pp_rank: int) -> list[Instruction]:
    """Return the instructions of one pipeline rank."""
    last = work.num_microbatches - 1
    instructions = []
    for action in work.actions[pp_rank]:
        chunk = work.ranks[pp_rank].chunks[action.chunk]
        if action.phase is Phase.FORWARD:
            gathers = chunk.gathers if action.microbatch == 0 else ()
            instructions.append(_forward(work, pp_rank, action, chunk, gathers))
        else:
            reductions = chunk.reductions if action.microbatch == last else ()
            instructions.append(_backward(work, pp_rank, action, chunk, reductions))
    return instructions


def slot(work: StepWork, phase: Phase, chunk: int) -> int:
    """Return the mailbox slot of messages for *phase* of *chunk*."""
    return chunk + work.num_virtual_stages * (phase is Phase.BACKWARD)


def _forward(
    work: StepWork, pp_rank: int, action: Action, chunk: ChunkWork, gathers: tuple[Segment, ...]
) -> Instruction:
    is_first = pp_rank == 0 and action.chunk == 0
    wraps = pp_rank == work.pp - 1
    is_last = wraps and action.chunk == work.num_virtual_stages - 1
    return Instruction(
        inbox=-1 if is_first else slot(work, Phase.FORWARD, action.chunk),
        microbatch=action.microbatch,
        compute_ps=chunk.forward_ps,
        gathers=gathers,
        reductions=(),
        target_step=0 if is_last else (1 - work.pp if wraps else 1),
        target_slot=slot(work, Phase.FORWARD, action.chunk + wraps),
        message=NOTHING if is_last else chunk.forward_message,
    )


def _backward(
    work: StepWork, pp_rank: int, action: Action, chunk: ChunkWork, reductions: tuple[Segment, ...]
) -> Instruction:
    is_last = pp_rank == work.pp - 1 and action.chunk == work.num_virtual_stages - 1
    wraps = pp_rank == 0
    is_first = wraps and action.chunk == 0
    return Instruction(
        inbox=-1 if is_last else slot(work, Phase.BACKWARD, action.chunk),
        microbatch=action.microbatch,
        compute_ps=chunk.backward_ps,
        gathers=(),
        reductions=reductions,
        target_step=0 if is_first else (work.pp - 1 if wraps else -1),
        target_slot=slot(work, Phase.BACKWARD, action.chunk - wraps),
        message=NOTHING if is_first else chunk.backward_message,
    )
