"""Parameters of a Megatron stage, as parts of the model's weights."""

import re
import string
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.simulator import ModelSpec
from meshwright.simulator.model import ParameterTensor, is_expert, parameter_tensors
from meshwright.validate.programs.contract import initial_weight
from meshwright.validate.programs.experts import ExpertGroup
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup

_PLACES = (
    (r"(predictions\.)?embedding\.weight", "word_embedding.weight"),
    (r"embedding\.positions", "position_embedding.weight"),
    (r"embedding\.norm\.", "embedding_norm."),
    (r"attention\.qkv\.", "qkv."),
    (r"attention\.(query|key)_norm\.", r"\1_norm."),
    (r"attention\.core\.sinks", "sinks"),
    (r"attention\.output\.", "attention_output."),
    (r"attention\.(?=query|kv)", ""),
    (r"mlp\.expand\.", "mlp_in."),
    (r"mlp\.contract\.", "mlp_out."),
    (r"mlp\.router\.", "router."),
    (r"mlp\.grouped_(in|out)\.(weight|bias)\d+", r"experts_\1.\2"),
    (r"mlp\.shared\.shared_gate\.", "shared_gate."),
    (r"mlp\.shared\.(experts\.)?expand\.", "shared_in."),
    (r"mlp\.shared\.(experts\.)?contract\.", "shared_out."),
    (r"(head\.)?norm\.", "final_norm."),
    (r"head\.output\.weight", "output_embedding.weight"),
)
ALL_EXPERTS = ExpertGroup()
_LAYER = re.compile(r"(layers|predictions)\.(?:layers\.)?(\d+)\.(?:layer\.)?(.*)")


class WeightPart(NamedTuple):
    """A parameter of a stage, the whole weight it belongs to, and that weight's full name.

    A weight of all experts has one of each, of which ``expert`` says which this is.
    """

    parameter: nn.Parameter
    whole: ParameterTensor
    name: str
    expert: int | None = None


def weight_parts(
    stage: nn.Module, model: ModelSpec, vocab_size: int, experts: ExpertGroup = ALL_EXPERTS
) -> Iterator[WeightPart]:
    """Yield every parameter of *stage* with the weight it is a part of.

    Args:
        stage: Virtual stage.
        model: Of which it is a part.
        vocab_size: Rows of the embedding.
        experts: Ranks that share experts with this one.
    """
    whole_weights = {each.name: each for each in parameter_tensors(model, vocab_size=vocab_size)}
    for path, parameter in stage.named_parameters():
        layer = _LAYER.fullmatch(path)
        prefix, inner = (f"{layer[1]}.{layer[2]}.", layer[3]) if layer else ("", path)
        name = _weight_name(inner)
        if name == "output_embedding.weight" and model.tied_embeddings:
            name = "word_embedding.weight"
        expert = None
        if is_expert(whole_weights[name]):
            number = int(path[len(path.rstrip(string.digits)) :])
            expert = experts.own(whole_weights[name].shape[0])[number]
        yield WeightPart(parameter, whole_weights[name], prefix + name, expert)


def _weight_name(path: str) -> str:
    for pattern, name in _PLACES:
        if re.match(pattern, path):
            return re.sub(pattern, name, path, count=1)
    return path


def fill_weights(
    stage: nn.Module,
    model: ModelSpec,
    tp: TensorParallelGroup,
    vocab_size: int,
    experts: ExpertGroup = ALL_EXPERTS,
) -> None:
    """Give every parameter its part of the model's initial weights."""
    for part in weight_parts(stage, model, vocab_size, experts):
        with part.parameter.device:
            whole = initial_weight(part.name, part.whole.shape)
        tensor, place = part.whole, (tp.rank, tp.size)
        if part.expert is not None:
            split = None if tensor.tp_dim is None else tensor.tp_dim - 1
            tensor = tensor._replace(shape=tensor.shape[1:], tp_dim=split)
            whole, place = whole[part.expert], (experts.etp_rank, experts.num_etp)
        part.parameter.data.copy_(_own_part(whole, tensor, model, place))


def _own_part(
    whole: Tensor, tensor: ParameterTensor, model: ModelSpec, place: tuple[int, int]
) -> Tensor:
    """Return one rank's part of a weight; *place* is its rank, of how many."""
    rank, size = place
    if tensor.tp_dim is None:
        return whole
    if tensor.name.startswith(("mlp_in.", "shared_in.", "experts_in.")) and model.gated_mlp:
        # Gate and value are split each, so that a rank has the same columns of both.
        halves = (half.chunk(size)[rank] for half in whole.chunk(2))
        return torch.cat(list(halves))
    return whole.chunk(size, dim=tensor.tp_dim)[rank]
