"""Parameter tensors of a transformer: of embedding, head and one layer of each kind."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TypeAlias, TypeVar

from meshwright.simulator.model.described import ParameterTensor
from meshwright.simulator.model.kinds import (
    EMBEDDING,
    EXPERT_LAYER,
    FINAL_NORM,
    HEAD,
    PREDICTIONS,
    TRANSFORMER_LAYER,
    WINDOWED_EXPERT_LAYER,
    WINDOWED_LAYER,
    BlockKind,
)
from meshwright.simulator.model.parts import LatentAttention
from meshwright.simulator.model.spec import ModelSpec

NEXT_SENTENCE_CLASSES = 2
ROUTED = "experts_"  # prefix of tensors that stack the weights of all experts

# Modules of attention, and those of them that Megatron-Core constructs first.
_LATENT = {"query", *(f"{each}_{part}" for each in ("query", "kv") for part in ("down", "up"))}
_LATENT |= {"query_latent_norm", "kv_latent_norm"}
_ATTENTION = {"attention_norm", "qkv", "query_norm", "key_norm", *_LATENT}
_FIRST = ("sinks", "attention_output")

Weight = TypeVar("Weight")

# Shapes by the names of tensors, each with the dim that is split over tp.
Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], int | None]]


def embedding_tensors(model: ModelSpec, vocab_size: int) -> list[ParameterTensor]:
    """Return the tensors of the embedding, whose weight has *vocab_size* rows."""
    width = model.hidden_size
    tensors = [ParameterTensor("word_embedding.weight", (vocab_size, width), EMBEDDING, 0)]
    if model.positions == "learned":
        shape = (model.max_positions, width)
        tensors.append(ParameterTensor("position_embedding.weight", shape, EMBEDDING, None))
    if model.token_types:
        shape = (model.token_types, width)
        tensors.append(ParameterTensor("token_type_embedding.weight", shape, EMBEDDING, None))
    if model.embedding_norm:
        tensors += _norm_tensors(model, "embedding_norm", EMBEDDING)
    return tensors


def _transformer_tensors(model: ModelSpec) -> list[ParameterTensor]:
    return [*_attention_tensors(model), *_mlp_tensors(model)]


def _expert_tensors(model: ModelSpec) -> list[ParameterTensor]:
    return [*_attention_tensors(model), *_routed_tensors(model)]


LAYER_TENSORS: dict[BlockKind, Callable[[ModelSpec], list[ParameterTensor]]] = {
    TRANSFORMER_LAYER: _transformer_tensors,
    WINDOWED_LAYER: _transformer_tensors,
    EXPERT_LAYER: _expert_tensors,
    WINDOWED_EXPERT_LAYER: _expert_tensors,
}


def _attention_tensors(model: ModelSpec) -> list[ParameterTensor]:
    if model.latent is not None:
        return _latent_tensors(model, model.latent)
    width, query_size = model.hidden_size, model.query_hidden_size
    qkv_size = query_size + 2 * model.kv_hidden_size
    tensors = []
    if model.norm_places != "after":
        tensors += _norm_tensors(model, "attention_norm", TRANSFORMER_LAYER)
    tensors.append(ParameterTensor("qkv.weight", (qkv_size, width), TRANSFORMER_LAYER, 0))
    if model.attention_bias:
        tensors.append(ParameterTensor("qkv.bias", (qkv_size,), TRANSFORMER_LAYER, 0))
    if model.qk_norm in {"head", "width"}:
        tensors += _qk_norm_tensors(model)
    if model.attention_sinks:
        # One number for each head, split with the heads.
        tensors.append(ParameterTensor("sinks", (model.num_heads,), TRANSFORMER_LAYER, 0))
    shape = (width, query_size)
    tensors.append(ParameterTensor("attention_output.weight", shape, TRANSFORMER_LAYER, 1))
    if model.output_bias:
        # Row-parallel: the bias is added to the sum over ranks.
        tensors.append(ParameterTensor("attention_output.bias", (width,), TRANSFORMER_LAYER, None))
    if model.norm_places != "before":
        tensors += _norm_tensors(model, "attention_output_norm", TRANSFORMER_LAYER)
    return tensors


def _qk_norm_tensors(model: ModelSpec) -> list[ParameterTensor]:
    """Return the weights of query and key norms: over one head, or over all heads."""
    widths = (model.head_dim,) * 2
    if model.qk_norm == "width":
        widths = model.query_hidden_size, model.kv_hidden_size
    names = "query_norm", "key_norm"
    return [
        tensor
        for name, width in zip(names, widths, strict=True)
        for tensor in _norm_tensors(model, name, TRANSFORMER_LAYER, width)
    ]


def _latent_tensors(model: ModelSpec, latent: LatentAttention) -> list[ParameterTensor]:
    """Return the weights of latent attention; its down projections are replicated over tp."""
    width, heads = model.hidden_size, model.num_heads
    query_size = heads * latent.query_head_dim
    both_size = latent.kv_rank + latent.rotary_head_dim
    up_size = heads * (latent.plain_head_dim + latent.value_head_dim)
    shapes: Shapes = {}
    if latent.query_rank:
        shapes |= {
            "query_down.weight": ((latent.query_rank, width), None),
            "query_latent_norm.weight": ((latent.query_rank,), None),
            "query_up.weight": ((query_size, latent.query_rank), 0),
        }
    else:
        shapes["query.weight"] = ((query_size, width), 0)
    shapes |= {
        "kv_down.weight": ((both_size, width), None),
        "kv_latent_norm.weight": ((latent.kv_rank,), None),
        "kv_up.weight": ((up_size, latent.kv_rank), 0),
        "attention_output.weight": ((width, heads * latent.value_head_dim), 1),
    }
    return [*_norm_tensors(model, "attention_norm", TRANSFORMER_LAYER), *_of_layer(shapes)]


def _of_layer(
    shapes: Shapes,
) -> list[ParameterTensor]:
    """Return the tensors of a layer from shapes and split dims by name."""
    return [
        ParameterTensor(name, shape, TRANSFORMER_LAYER, dim)
        for name, (shape, dim) in shapes.items()
    ]


def in_engine_order(weights: Iterable[Weight], module_of: Callable[[Weight], str]) -> list[Weight]:
    """Return *weights* of layers, or their modules, in the order of Megatron-Core's parameters.

    Its `Attention` constructs core attention and ``linear_proj`` before `SelfAttention` does
    ``linear_qkv`` (attention.py and multi_latent_attention.py of megatron/core/transformer,
    core 0.16).  The
    norm before that is in the same module of Transformer Engine, but of latent attention apart.

    Args:
        weights: In the order in which layers run them.
        module_of: Returns the name of a weight's module.

    >>> in_engine_order(["attention_norm", "qkv", "sinks", "attention_output", "mlp_norm"], str)
    ['sinks', 'attention_output', 'attention_norm', 'qkv', 'mlp_norm']
    """
    ordered: list[Weight] = []
    known = _ATTENTION.union(_FIRST)
    for is_attention, run in groupby(weights, key=lambda each: module_of(each) in known):
        modules = list(run)
        if is_attention:
            latent = any(module_of(each) in _LATENT for each in modules)
            places = (*(("attention_norm",) if latent else ()), *_FIRST)
            modules.sort(key=lambda each: (*places, module_of(each)).index(module_of(each)))
        ordered += modules
    return ordered


def _mlp_tensors(model: ModelSpec) -> list[ParameterTensor]:
    width, ffn_size = model.hidden_size, model.ffn_hidden_size
    in_size = 2 * ffn_size if model.gated_mlp else ffn_size
    tensors = []
    if model.norm_places != "after" and model.parallel_mlp != "one norm":
        tensors += _norm_tensors(model, "mlp_norm", TRANSFORMER_LAYER)
    # Gate and value are one fused weight, as in Megatron-LM (SwiGLU).
    tensors.append(ParameterTensor("mlp_in.weight", (in_size, width), TRANSFORMER_LAYER, 0))
    if model.mlp_bias:
        tensors.append(ParameterTensor("mlp_in.bias", (in_size,), TRANSFORMER_LAYER, 0))
    tensors.append(ParameterTensor("mlp_out.weight", (width, ffn_size), TRANSFORMER_LAYER, 1))
    if model.mlp_bias:
        tensors.append(ParameterTensor("mlp_out.bias", (width,), TRANSFORMER_LAYER, None))
    if model.norm_places != "before":
        tensors += _norm_tensors(model, "mlp_out_norm", TRANSFORMER_LAYER)
    return tensors


def _routed_tensors(model: ModelSpec) -> list[ParameterTensor]:
    """Return the weights of a layer's router, experts and shared experts; tp splits widths."""
    experts, width = model.experts, model.hidden_size
    assert experts is not None
    num, inner, shared = experts.num_experts, experts.hidden_size, experts.shared_hidden_size
    parts = experts.num_parts
    shapes: Shapes = {
        "router.weight": ((num, width), None),  # each rank routes its own tokens
        "router.bias": ((num,), None),
        f"{ROUTED}in.weight": ((num, parts * inner, width), 1),
        f"{ROUTED}in.bias": ((num, parts * inner), 1),
        f"{ROUTED}out.weight": ((num, width, inner), 2),
        f"{ROUTED}out.bias": ((num, width), None),
    }
    if not experts.bias:
        shapes = {name: facts for name, facts in shapes.items() if not name.endswith("bias")}
    if experts.shared_gate:  # Megatron-Core's module holds it ahead of the products
        shapes["shared_gate.weight"] = ((1, width), None)
    if shared:
        shapes |= {
            "shared_in.weight": ((parts * shared, width), 0),
            "shared_out.weight": ((width, shared), 1),
        }
    return [*_norm_tensors(model, "mlp_norm", TRANSFORMER_LAYER), *_of_layer(shapes)]


def head_tensors(model: ModelSpec, vocab_size: int) -> list[ParameterTensor]:
    """Return the tensors of the head, with *vocab_size* rows of its own output matrix."""
    if model.mlm_head:
        tensors = _mlm_tensors(model, vocab_size)
    else:
        tensors = _norm_tensors(
            model, "final_norm", FINAL_NORM if model.prediction_layers else HEAD
        )
    tensors += prediction_tensors(model) * model.prediction_layers
    if not model.tied_embeddings:
        shape = (vocab_size, model.hidden_size)
        tensors.append(ParameterTensor("output_embedding.weight", shape, HEAD, 0))
    return tensors


def prediction_tensors(model: ModelSpec) -> list[ParameterTensor]:
    """Return the tensors of one MTP layer (multi-token prediction).

    It projects the last layer's output and the next token's embedding, both normalised, and has a
    layer of the last one's kind (DeepSeek-V3, arXiv 2412.19437, 2.2); embedding and output matrix
    are shared.  The names of its norms and its projection are those of Megatron-Core
    (MultiTokenPredictionLayer of core 0.16).
    """
    width, kind = model.hidden_size, model.layer_runs[-1].kind
    layer = (each._replace(block=PREDICTIONS) for each in LAYER_TENSORS[kind](model))
    return [
        *_norm_tensors(model, "enorm", PREDICTIONS),
        *_norm_tensors(model, "hnorm", PREDICTIONS),
        ParameterTensor("eh_proj.weight", (width, 2 * width), PREDICTIONS, 0),
        *layer,
        *_norm_tensors(model, "prediction_norm", PREDICTIONS),
    ]


def _mlm_tensors(model: ModelSpec, vocab_size: int) -> list[ParameterTensor]:
    """Return the tensors of BERT's head but the output matrix; tp splits only the logits' bias."""
    width = model.hidden_size
    shapes = {
        "pooler.weight": (width, width),
        "pooler.bias": (width,),
        "next_sentence.weight": (NEXT_SENTENCE_CLASSES, width),
        "next_sentence.bias": (NEXT_SENTENCE_CLASSES,),
        "mlm_dense.weight": (width, width),
        "mlm_dense.bias": (width,),
    }
    return [
        *(ParameterTensor(name, shape, HEAD, None) for name, shape in shapes.items()),
        *_norm_tensors(model, "mlm_norm", HEAD),
        ParameterTensor("output.bias", (vocab_size,), HEAD, 0),
    ]


def _norm_tensors(
    model: ModelSpec, name: str, block: BlockKind, width: int = 0
) -> list[ParameterTensor]:
    parts = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    shape = (width or model.hidden_size,)
    return [ParameterTensor(f"{name}.{part}", shape, block, None) for part in parts]
