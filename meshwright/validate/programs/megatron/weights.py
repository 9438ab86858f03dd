"""Which weight of the model each parameter of a Megatron stage is a part of."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.simulator import ModelSpec
from meshwright.simulator.model import ParameterTensor, parameter_tensors
from meshwright.validate.programs.contract import initial_weight
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup

_PLACES = (
    (r"embedding\.weight", "word_embedding.weight"),
    (r"embedding\.positions", "position_embedding.weight"),
    (r"embedding\.norm\.", "embedding_norm."),
    (r"attention\.qkv\.", "qkv."),
    (r"attention\.output\.", "attention_output."),
    (r"mlp\.expand\.", "mlp_in."),
    (r"mlp\.contract\.", "mlp_out."),
    (r"head\.norm\.", "final_norm."),
    (r"head\.output\.weight", "output_embedding.weight"),
)
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")


class WeightPart(NamedTuple):
    """A parameter of a stage, the whole weight it belongs to, and that weight's full name."""

    parameter: nn.Parameter
    whole: ParameterTensor
    name: str


def weight_parts(stage: nn.Module, model: ModelSpec, vocab_size: int) -> Iterator[WeightPart]:
    """Yield every parameter of *stage* with the weight it is a part of."""
    known = {each.name: each for each in parameter_tensors(model, vocab_size=vocab_size)}
    for path, parameter in stage.named_parameters():
        layer = _LAYER.fullmatch(path)
        prefix, inner = (f"layers.{layer[1]}.", layer[2]) if layer else ("", path)
        name = _weight_name(inner)
        if name == "output_embedding.weight" and model.tied_embeddings:
            name = "word_embedding.weight"
        yield WeightPart(parameter, known[name], prefix + name)


def _weight_name(path: str) -> str:
    for pattern, name in _PLACES:
        if re.match(pattern, path):
            return re.sub(pattern, name, path, count=1)
    return path


def fill_weights(
    stage: nn.Module, model: ModelSpec, tp: TensorParallelGroup, vocab_size: int
) -> None:
    """Give every parameter its part of the model's initial weights."""
    for part in weight_parts(stage, model, vocab_size):
        with part.parameter.device:
            whole = initial_weight(part.name, part.whole.shape)
        part.parameter.data.copy_(_own_part(whole, part.whole, model, tp))


def _own_part(
    whole: Tensor, tensor: ParameterTensor, model: ModelSpec, tp: TensorParallelGroup
) -> Tensor:
    if tensor.tp_dim is None:
        return whole
    if tensor.name.startswith("mlp_in.") and model.gated_mlp:
        halves = (half.chunk(tp.size)[tp.rank] for half in whole.chunk(2))
        return torch.cat(list(halves))
    return whole.chunk(tp.size, dim=tensor.tp_dim)[tp.rank]
