"""What is trained: a model's sizes and weights, built in or read from a file."""

from meshwright.simulator.model.catalogue import list_models, load_model
from meshwright.simulator.model.chain import ChainModel, LinearLayer
from meshwright.simulator.model.described import ParameterTensor
from meshwright.simulator.model.images import Bottleneck, BottleneckRun, ImageModel
from meshwright.simulator.model.kinds import (
    EMBEDDING,
    ENDS,
    EXPERT_LAYER,
    EXPERT_LAYERS,
    HEAD,
    LAYERS,
    TRANSFORMER_LAYER,
    WINDOWED_EXPERT_LAYER,
    WINDOWED_LAYER,
    BlockKind,
    BlockRun,
    cut_runs,
    join_runs,
)
from meshwright.simulator.model.parameters import (
    buffer_bytes,
    count_active_parameters,
    count_parameters,
    expert_parameters,
    is_expert,
    layer_flops,
    layer_kinds,
    linear_weights,
    local_shape,
    padded_vocab_size,
    parameter_tensors,
    parameters_by_kind,
    rank_parameters,
    rank_tensors,
)
from meshwright.simulator.model.parts import Experts, LatentAttention
from meshwright.simulator.model.registry import AnyModel, parse_any_model
from meshwright.simulator.model.spec import ModelSpec, parse_model

__all__ = [
    "EMBEDDING",
    "ENDS",
    "EXPERT_LAYER",
    "EXPERT_LAYERS",
    "HEAD",
    "LAYERS",
    "TRANSFORMER_LAYER",
    "WINDOWED_EXPERT_LAYER",
    "WINDOWED_LAYER",
    "AnyModel",
    "BlockKind",
    "BlockRun",
    "Bottleneck",
    "BottleneckRun",
    "ChainModel",
    "Experts",
    "ImageModel",
    "LatentAttention",
    "LinearLayer",
    "ModelSpec",
    "ParameterTensor",
    "buffer_bytes",
    "count_active_parameters",
    "count_parameters",
    "cut_runs",
    "expert_parameters",
    "is_expert",
    "join_runs",
    "layer_flops",
    "layer_kinds",
    "linear_weights",
    "list_models",
    "load_model",
    "local_shape",
    "padded_vocab_size",
    "parameter_tensors",
    "parameters_by_kind",
    "parse_any_model",
    "parse_model",
    "rank_parameters",
    "rank_tensors",
]
