"""A rank's passes made ready to run: what each waits for, takes and sends."""

from typing import NamedTuple

from meshwright.simulator.engine.copies import CopyPoint
from meshwright.simulator.engine.work import Message, PassSegment, StepWork, UnitWork
from meshwright.simulator.schedules import Phase

NOTHING = Message()


class Instruction(NamedTuple):
    """What a rank does for one phase of one of its virtual stages.

    Args:
        phase: The phase.
        virtual_stage: The virtual stage.
        inbox: Slot of the message that it waits for (-1: none).
        compute_ps: Time of the pass.
        gathers: Segments of microbatch 0, where it waits for parameters.
        reductions: Segments of microbatches that reduce, where it hands on gradients.
        units: Units of every microbatch, where parameters are sharded.
        again_units: The same after a forward pass, from which those that stay are gathered.
        kept_units: The same after a backward pass, without those that have stayed since.
        reduces_always: Gradients are reduced in every microbatch, not in the last one alone.
        target_step: Distance on the pipeline axis to the receiver of its message (0: none).
        target_slot: Slot there.
        message: The message.
        copies: Where it copies activations to the host, or has them back.
    """

    phase: Phase
    virtual_stage: int
    inbox: int
    compute_ps: int
    gathers: tuple[PassSegment, ...]
    reductions: tuple[PassSegment, ...]
    units: tuple[UnitWork, ...]
    again_units: tuple[UnitWork, ...]
    kept_units: tuple[UnitWork, ...]
    reduces_always: bool
    target_step: int
    target_slot: int
    message: Message
    copies: tuple[CopyPoint, ...]


def _gathered(unit: UnitWork) -> UnitWork:
    """Return *unit* without its gather."""
    return unit._replace(gather_ps=0)


def _again(units: tuple[UnitWork, ...]) -> tuple[UnitWork, ...]:
    """Return *units* without the gathers of those that stay from a forward pass to its backward."""
    return tuple([_gathered(unit) if unit.stays else unit for unit in units])


def _kept(work: StepWork, units: tuple[UnitWork, ...]) -> tuple[UnitWork, ...]:
    """Return *units* without the gathers of those that stay from a backward pass to the next."""
    return tuple([_gathered(unit) if work.keeps_units or unit.is_once else unit for unit in units])


def compile_ranks(work: StepWork) -> list[list[Instruction]]:
    """Return the instructions of each pipeline rank; those between the ends share their records."""
    known: dict[tuple[int, bool, bool], list[Instruction]] = {}
    programs = []
    for pp_rank, rank in enumerate(work.ranks):
        # At the ends it differs what a rank waits for, and where it sends to.
        key = id(rank), pp_rank == 0, pp_rank == work.pp - 1
        if key not in known:
            known[key] = compile_rank(work, pp_rank)
        programs.append(known[key])
    return programs


def compile_rank(work: StepWork, pp_rank: int) -> list[Instruction]:
    """Return the instructions of a pipeline rank: forward of each virtual stage, then backward."""
    virtual_stages = range(work.num_virtual_stages)
    return [
        *(_forward(work, pp_rank, virtual_stage) for virtual_stage in virtual_stages),
        *(_backward(work, pp_rank, virtual_stage) for virtual_stage in virtual_stages),
    ]


def _forward(work: StepWork, pp_rank: int, virtual_stage: int) -> Instruction:
    is_first = pp_rank == 0 and virtual_stage == 0
    wraps = pp_rank == work.pp - 1
    is_last = wraps and virtual_stage == work.num_virtual_stages - 1
    stage_work = work.ranks[pp_rank].virtual_stages[virtual_stage]
    # Stages go round the ranks: after the last rank's virtual stage comes the first rank's next
    # one, so a message there jumps back p - 1 ranks and up one slot.
    return Instruction(
        phase=Phase.FORWARD,
        virtual_stage=virtual_stage,
        inbox=-1 if is_first else virtual_stage,
        compute_ps=stage_work.forward_ps,
        gathers=stage_work.gathers,
        reductions=(),
        units=stage_work.forward_units,
        again_units=_again(stage_work.forward_units),
        kept_units=_kept(work, stage_work.forward_units),
        reduces_always=False,
        target_step=0 if is_last else (1 - work.pp if wraps else 1),
        target_slot=virtual_stage + wraps,
        message=NOTHING if is_last else stage_work.forward_message,
        copies=stage_work.forward_copies,
    )


def _backward(work: StepWork, pp_rank: int, virtual_stage: int) -> Instruction:
    slots = work.num_virtual_stages
    is_last = pp_rank == work.pp - 1 and virtual_stage == slots - 1
    wraps = pp_rank == 0
    is_first = wraps and virtual_stage == 0
    stage_work = work.ranks[pp_rank].virtual_stages[virtual_stage]
    return Instruction(
        phase=Phase.BACKWARD,
        virtual_stage=virtual_stage,
        # Slots of gradients lie behind those of activations: the two cross in 1F1B.
        inbox=-1 if is_last else slots + virtual_stage,
        compute_ps=stage_work.backward_ps,
        gathers=(),
        reductions=stage_work.reductions,
        units=stage_work.backward_units,
        again_units=_again(stage_work.backward_units),
        kept_units=_kept(work, stage_work.backward_units),
        reduces_always=stage_work.reduces_each_pass,
        target_step=0 if is_first else (work.pp - 1 if wraps else -1),
        target_slot=slots + virtual_stage - wraps,
        message=NOTHING if is_first else stage_work.backward_message,
        copies=stage_work.backward_copies,
    )
