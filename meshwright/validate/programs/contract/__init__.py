"""Interface of the reference programs, and the weights and batches they begin with."""

from meshwright.validate.programs.contract.request import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    LEARNING_RATE,
    WEIGHT_DECAY,
    ProgramRequest,
    RankProgram,
    Routing,
    refuse_offload,
)
from meshwright.validate.programs.contract.weights import initial_weight, token_batch

__all__ = [
    "BETAS",
    "CLIP_NORM",
    "EPSILON",
    "LEARNING_RATE",
    "WEIGHT_DECAY",
    "ProgramRequest",
    "RankProgram",
    "Routing",
    "initial_weight",
    "refuse_offload",
    "token_batch",
]
