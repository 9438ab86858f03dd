"""What is trained: a model's sizes and weights, built in or read from a file."""

from meshwright.simulator.model.catalogue import list_models, load_model, load_transformer
from meshwright.simulator.model.chain import ChainModel, LinearLayer
from meshwright.simulator.model.described import ParameterTensor
from meshwright.simulator.model.images import Bottleneck, BottleneckRun, ImageModel
from meshwright.simulator.model.kinds import (
    EMBEDDING,
    HEAD,
    LAYERS,
    TRANSFORMER_LAYER,
    WINDOWED_LAYER,
    BlockKind,
    BlockRun,
    cut_runs,
    join_runs,
)
from meshwright.simulator.model.parameters import (
    count_parameters,
    layer_kinds,
    local_shape,
    padded_vocab_size,
    parameter_tensors,
    parameters_by_kind,
    rank_parameters,
    rank_tensors,
)
from meshwright.simulator.model.registry import AnyModel, parse_any_model
from meshwright.simulator.model.spec import ModelSpec, parse_model

__all__ = [
    "EMBEDDING",
    "HEAD",
    "LAYERS",
    "TRANSFORMER_LAYER",
    "WINDOWED_LAYER",
    "AnyModel",
    "BlockKind",
    "BlockRun",
    "Bottleneck",
    "BottleneckRun",
    "ChainModel",
    "ImageModel",
    "LinearLayer",
    "ModelSpec",
    "ParameterTensor",
    "count_parameters",
    "cut_runs",
    "join_runs",
    "layer_kinds",
    "list_models",
    "load_model",
    "load_transformer",
    "local_shape",
    "padded_vocab_size",
    "parameter_tensors",
    "parameters_by_kind",
    "parse_any_model",
    "parse_model",
    "rank_parameters",
    "rank_tensors",
]
