"""What is trained: a model's sizes and weights, built in or read from a file."""

from meshwright.simulator.model.catalogue import list_models, load_model
from meshwright.simulator.model.kinds import (
    EMBEDDING,
    HEAD,
    TRANSFORMER_LAYER,
    BlockKind,
    BlockRun,
    cut_runs,
    join_runs,
)
from meshwright.simulator.model.parameters import (
    VOCABULARY_ALIGNMENT,
    ParameterTensor,
    count_parameters,
    layer_kinds,
    local_shape,
    padded_vocab_size,
    parameter_tensors,
    parameters_by_kind,
)
from meshwright.simulator.model.spec import ModelSpec, parse_model

__all__ = [
    "EMBEDDING",
    "HEAD",
    "TRANSFORMER_LAYER",
    "VOCABULARY_ALIGNMENT",
    "BlockKind",
    "BlockRun",
    "ModelSpec",
    "ParameterTensor",
    "count_parameters",
    "cut_runs",
    "join_runs",
    "layer_kinds",
    "list_models",
    "load_model",
    "local_shape",
    "padded_vocab_size",
    "parameter_tensors",
    "parameters_by_kind",
    "parse_model",
]
