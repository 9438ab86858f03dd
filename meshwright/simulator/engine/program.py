"""Instructions of a pipeline rank: work, inbox and message of each phase and virtual stage."""

from typing import NamedTuple

from meshwright.simulator.engine.work import Message, PassWork, StepWork, UnitWork
from meshwright.simulator.schedules import Phase

NOTHING = Message()


class Instruction(NamedTuple):
    """Instruction of a rank for one phase of one virtual stage.

    Args:
        phase: The phase.
        virtual_stage: The virtual stage.
        work: Work of its passes.
        inbox: Slot of the message that it waits for (-1: none).
        units_after_forward: FSDP units after a forward pass, without gathers of those not
            resharded.
        units_after_backward: FSDP units after a backward pass, likewise.
        target_step: Distance on the pipeline axis to the receiver of its message (0: none).
        target_slot: Slot of the receiver.
        message: The message.
    """

    phase: Phase
    virtual_stage: int
    work: PassWork
    inbox: int
    units_after_forward: tuple[UnitWork, ...]
    units_after_backward: tuple[UnitWork, ...]
    target_step: int
    target_slot: int
    message: Message


def _without_gather(unit: UnitWork) -> UnitWork:
    """Return *unit* without its gather."""
    return unit._replace(gather_ps=0)


def _after_forward(units: tuple[UnitWork, ...]) -> tuple[UnitWork, ...]:
    """Return *units* without gathers of those that forward does not reshard."""
    return tuple([_without_gather(unit) if unit.stays else unit for unit in units])


def _after_backward(work: StepWork, units: tuple[UnitWork, ...]) -> tuple[UnitWork, ...]:
    """Return *units* without gathers of those that backward does not reshard."""
    return tuple(
        [
            _without_gather(unit) if work.keeps_units or unit.gathered_once else unit
            for unit in units
        ]
    )


def compile_ranks(work: StepWork) -> list[list[Instruction]]:
    """Return the instructions of each pipeline rank; equal ranks between the ends share them."""
    instructions_of: dict[tuple[int, bool, bool], list[Instruction]] = {}
    programs = []
    for pp_rank, rank in enumerate(work.ranks):
        # The first and last rank differ in senders and receivers.
        key = id(rank), pp_rank == 0, pp_rank == work.pp - 1
        if key not in instructions_of:
            instructions_of[key] = compile_rank(work, pp_rank)
        programs.append(instructions_of[key])
    return programs


def compile_rank(work: StepWork, pp_rank: int) -> list[Instruction]:
    """Return the instructions of a pipeline rank, phase by phase of each virtual stage."""
    stages = work.ranks[pp_rank].virtual_stages
    return [
        _instruction(work, pp_rank, phase, virtual_stage)
        for phase in stages[0]
        for virtual_stage in range(len(stages))
    ]


def _instruction(work: StepWork, pp_rank: int, phase: Phase, virtual_stage: int) -> Instruction:
    passes = work.ranks[pp_rank].virtual_stages[virtual_stage][phase]
    # Virtual stages are interleaved: after the last rank's comes the first rank's next one, so a
    # message there goes back p - 1 ranks and up one slot.
    stages, place = range(work.pp * work.num_virtual_stages), virtual_stage * work.pp + pp_rank
    source, target = place - phase.direction, place + phase.direction
    sends = target != place and target in stages
    # Slots of gradients lie behind those of activations: the two cross in 1F1B.
    slot = work.num_virtual_stages if phase.direction < 0 else 0
    return Instruction(
        phase=phase,
        virtual_stage=virtual_stage,
        work=passes,
        inbox=slot + virtual_stage if source != place and source in stages else -1,
        units_after_forward=_after_forward(passes.units),
        units_after_backward=_after_backward(work, passes.units),
        target_step=target % work.pp - pp_rank if sends else 0,
        target_slot=slot + target // work.pp,
        message=passes.message if sends else NOTHING,
    )
