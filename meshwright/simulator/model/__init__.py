"""What is trained: a model's sizes and weights, built in or read from a file."""

from meshwright.simulator.model.catalogue import list_models, load_model
from meshwright.simulator.model.parameters import (
    VOCABULARY_ALIGNMENT,
    Block,
    ParameterTensor,
    block_parameters,
    count_parameters,
    local_shape,
    padded_vocab_size,
    parameter_tensors,
)
from meshwright.simulator.model.spec import ModelSpec, parse_model

__all__ = [
    "VOCABULARY_ALIGNMENT",
    "Block",
    "ModelSpec",
    "ParameterTensor",
    "block_parameters",
    "count_parameters",
    "list_models",
    "load_model",
    "local_shape",
    "padded_vocab_size",
    "parameter_tensors",
    "parse_model",
]
