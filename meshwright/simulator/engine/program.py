"""A rank's passes made ready to run: what each waits for, takes and sends."""

from typing import NamedTuple

from meshwright.simulator.engine.work import Message, PassWork, StepWork, UnitWork
from meshwright.simulator.schedules import Phase

NOTHING = Message()


class Instruction(NamedTuple):
    """What a rank does for one phase of one of its virtual stages.

    Args:
        phase: The phase.
        virtual_stage: The virtual stage.
        work: Its passes.
        inbox: Slot of the message that it waits for (-1: none).
        again_units: Their units after a forward pass, from which those that stay are gathered.
        kept_units: The same after a backward pass, without those that have stayed since.
        target_step: Distance on the pipeline axis to the receiver of its message (0: none).
        target_slot: Slot there.
        message: The message.
    """

    phase: Phase
    virtual_stage: int
    work: PassWork
    inbox: int
    again_units: tuple[UnitWork, ...]
    kept_units: tuple[UnitWork, ...]
    target_step: int
    target_slot: int
    message: Message


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
    """Return the instructions of a pipeline rank, phase by phase of each virtual stage."""
    stages = work.ranks[pp_rank].virtual_stages
    return [
        _instruction(work, pp_rank, phase, virtual_stage)
        for phase in stages[0]
        for virtual_stage in range(len(stages))
    ]


def _instruction(work: StepWork, pp_rank: int, phase: Phase, virtual_stage: int) -> Instruction:
    passes = work.ranks[pp_rank].virtual_stages[virtual_stage][phase]
    # Stages go round the ranks: after the last rank's virtual stage comes the first rank's next
    # one, so a message there jumps back p - 1 ranks and up one slot.
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
        again_units=_again(passes.units),
        kept_units=_kept(work, passes.units),
        target_step=target % work.pp - pp_rank if sends else 0,
        target_slot=slot + target // work.pp,
        message=passes.message if sends else NOTHING,
    )
