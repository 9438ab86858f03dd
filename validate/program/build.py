"""Which program stands for which stack."""

from collections.abc import Callable

from hwprofiles.names import suggestion
from simulator import PlanError
from validate.program.contract import ProgramRequest, RankProgram
from validate.program.megatron import MegatronProgram
from validate.program.pytorch_programs import build_ddp, build_fully_sharded

PROGRAMS: dict[str, Callable[[ProgramRequest], RankProgram]] = {
    "ddp": build_ddp,
    "fsdp": build_fully_sharded,
    "megatron-core": MegatronProgram,
    "megatron-lm-2021": MegatronProgram,
    "megatron-lm-2022": MegatronProgram,
    "torchtitan": build_fully_sharded,
}


def build_program(request: ProgramRequest) -> RankProgram:
    """Return one rank's program of a plan.

    Raises:
        PlanError: If no program stands for the stack, or it cannot express the plan.
    """
    name = request.stack.name
    if name not in PROGRAMS:
        raise PlanError(f"stack {name} has no PyTorch program; {suggestion(name, PROGRAMS)}")
    return PROGRAMS[name](request)
