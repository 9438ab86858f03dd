"""A rank's passes made ready to run: what each waits for, takes and sends."""

from dataclasses import replace
from typing import NamedTuple

from meshwright.simulator.engine.work import Message, Segment, StepWork, Unit

NOTHING = Message()


class Instruction(NamedTuple):
    """What a rank does for one phase of one of its virtual stages.

    Args:
        inbox: Slot of the message that it waits for (-1: none).
        compute_ps: Time of the pass.
        gathers: Segments of microbatch 0, where it waits for parameters.
        reductions: Segments of microbatches that reduce, where it hands on gradients.
        units: Units of every microbatch, where parameters are sharded.
        again_units: The same after a forward pass, from which those that stay are gathered.
        kept_units: The same where all are gathered from a backward pass.
        reduces_always: Gradients are reduced in every microbatch, not in the last one alone.
        target_step: Distance on the pipeline axis to the receiver of its message (0: none).
        target_slot: Slot there.
        message: The message.
    """

    inbox: int
    compute_ps: int
    gathers: tuple[Segment, ...]
    reductions: tuple[Segment, ...]
    units: tuple[Unit, ...]
    again_units: tuple[Unit, ...]
    kept_units: tuple[Unit, ...]
    reduces_always: bool
    target_step: int
    target_slot: int
    message: Message


def _gathered(unit: Unit) -> Unit:
    """Return *unit* without its gather."""
    return replace(unit, gather_ps=0)


def compile_rank(work: StepWork, pp_rank: int) -> list[Instruction]:
    """Return the instructions of one pipeline rank: forward of each chunk, then backward."""
    chunks = range(work.num_virtual_stages)
    return [
        *(_forward(work, pp_rank, chunk) for chunk in chunks),
        *(_backward(work, pp_rank, chunk) for chunk in chunks),
    ]


def _forward(work: StepWork, pp_rank: int, chunk: int) -> Instruction:
    is_first = pp_rank == 0 and chunk == 0
    wraps = pp_rank == work.pp - 1
    is_last = wraps and chunk == work.num_virtual_stages - 1
    held = work.ranks[pp_rank].chunks[chunk]
    # Stages go round the ranks: after the last rank's chunk comes the first rank's next one, so a
    # message there jumps back p - 1 ranks and up one slot.
    return Instruction(
        inbox=-1 if is_first else chunk,
        compute_ps=held.forward_ps,
        gathers=held.gathers,
        reductions=(),
        units=held.forward_units,
        again_units=tuple(_gathered(unit) if unit.stays else unit for unit in held.forward_units),
        kept_units=tuple(map(_gathered, held.forward_units)),
        reduces_always=False,
        target_step=0 if is_last else (1 - work.pp if wraps else 1),
        target_slot=chunk + wraps,
        message=NOTHING if is_last else held.forward_message,
    )


def _backward(work: StepWork, pp_rank: int, chunk: int) -> Instruction:
    slots = work.num_virtual_stages
    is_last = pp_rank == work.pp - 1 and chunk == slots - 1
    wraps = pp_rank == 0
    is_first = wraps and chunk == 0
    held = work.ranks[pp_rank].chunks[chunk]
    return Instruction(
        # Slots of gradients lie behind those of activations: the two cross in 1F1B.
        inbox=-1 if is_last else slots + chunk,
        compute_ps=held.backward_ps,
        gathers=(),
        reductions=held.reductions,
        units=held.backward_units,
        again_units=tuple(_gathered(unit) if unit.stays else unit for unit in held.backward_units),
        kept_units=tuple(map(_gathered, held.backward_units)),
        reduces_always=held.reduces_each_pass,
        target_step=0 if is_first else (work.pp - 1 if wraps else -1),
        target_slot=slots + chunk - wraps,
        message=NOTHING if is_first else held.backward_message,
    )
