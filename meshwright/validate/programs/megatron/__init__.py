"""Reference program of Megatron-LM and Megatron-Core."""

from meshwright.validate.programs.megatron.loss import vocabulary_loss
from meshwright.validate.programs.megatron.parts import MegatronParts
from meshwright.validate.programs.megatron.program import (
    DTYPES,
    MegatronProgram,
    check_megatron,
    default_dtype,
)
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup
from meshwright.validate.programs.megatron.weights import fill_weights

__all__ = [
    "DTYPES",
    "MegatronParts",
    "MegatronProgram",
    "TensorParallelGroup",
    "check_megatron",
    "default_dtype",
    "fill_weights",
    "vocabulary_loss",
]
