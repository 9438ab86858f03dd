"""The weight tensors of a model: their shapes, how tensor parallelism splits them, their count."""

from math import prod

from meshwright.simulator.errors import PlanError
from meshwright.simulator.model.described import ParameterTensor
from meshwright.simulator.model.kinds import EMBEDDING, HEAD, LAYERS, TRANSFORMER_LAYER, BlockKind
from meshwright.simulator.model.registry import AnyModel
from meshwright.simulator.model.spec import ModelSpec

NEXT_SENTENCE_CLASSES = 2


def parameter_tensors(
    model: AnyModel, *, vocab_size: int | None = None
) -> tuple[ParameterTensor, ...]:
    """Return the tensors of the embedding, of ONE layer of each kind, and of the head, unsplit.

    The final norm belongs to the head. An untied output matrix does, too; a
    tied one is listed once, in the embedding. Weights are (outputs, inputs),
    as PyTorch stores them, so column-parallel layers split dim 0 and
    row-parallel ones dim 1 (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    Args:
        model: Whose tensors.
        vocab_size: Rows of the embedding, such as a padded vocabulary;
            by default the model's own.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> [t.name for t in parameter_tensors(load_model("gpt2")) if t.block == "head"]
    ['final_norm.weight', 'final_norm.bias']
    """
    if not isinstance(model, ModelSpec):
        return model.tensors
    vocab_size = model.vocab_size if vocab_size is None else vocab_size
    return (
        *_embedding_tensors(model, vocab_size),
        *(
            tensor._replace(block=kind)
            for kind in layer_kinds(model)
            for tensor in _transformer_tensors(model)
        ),
        *_head_tensors(model, vocab_size),
    )


def count_parameters(model: AnyModel) -> int:
    """Return the number of parameters with the unpadded vocabulary.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> count_parameters(load_model("gpt2"))
    124439808
    """
    counts = parameters_by_kind(model)
    ends = counts[EMBEDDING] + counts[HEAD]
    return ends + sum(count * counts[kind] for kind, count in model.layer_runs)


def parameters_by_kind(
    model: AnyModel, *, tp: int = 1, vocab_size: int | None = None
) -> dict[BlockKind, int]:
    """Return the parameters one tp rank holds of a block of each kind.

    Args:
        model: Whose parameters.
        tp: Tensor-parallel degree.
        vocab_size: As for `parameter_tensors`; pass `padded_vocab_size` where
            the stack pads.

    Raises:
        PlanError: If heads or MLP width cannot be split over tp ranks.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> gpt3 = load_model("gpt3-175b")
    >>> parameters_by_kind(gpt3)["layer"], parameters_by_kind(gpt3, tp=8)["layer"]
    (1812099072, 226576896)
    """
    counts = dict.fromkeys([EMBEDDING, *layer_kinds(model), HEAD], 0)
    for tensor in parameter_tensors(model, vocab_size=vocab_size):
        counts[tensor.block] += prod(local_shape(model, tensor, tp=tp))
    return counts


def local_shape(model: AnyModel, tensor: ParameterTensor, *, tp: int) -> tuple[int, ...]:
    """Return the shape of one tp rank's part of a tensor.

    With fewer key-value heads than ranks each rank keeps one whole head, so
    keys and values are stored ``tp / num_kv_heads`` times, as in Megatron-LM.
    Of a vocabulary that is not padded the last ranks may have fewer rows, as in
    DTensor; this is the part of the first.

    Raises:
        PlanError: If the split dim is not divisible by *tp*.
    """
    if tp < 1:
        raise PlanError(f"tp={tp} must be >= 1")
    if tensor.tp_dim is None or tp == 1:
        return tensor.shape
    if not isinstance(model, ModelSpec):
        _check_divisible(tensor.name, tensor.shape[tensor.tp_dim], tp)
    elif tensor.name.startswith("qkv."):
        return (_local_qkv_size(model, tp), *tensor.shape[1:])
    elif tensor.name.startswith("attention_output."):
        _check_divisible("num_heads", model.num_heads, tp)
    elif tensor.block in LAYERS:
        _check_divisible("ffn_hidden_size", model.ffn_hidden_size, tp)
    shape = list(tensor.shape)
    shape[tensor.tp_dim] = -(-shape[tensor.tp_dim] // tp)
    return tuple(shape)


def rank_tensors(model: AnyModel, tp: int, multiple: int) -> tuple[ParameterTensor, ...]:
    """Return the tensors, unsplit, with the vocabulary padded as `padded_vocab_size` does."""
    if not isinstance(model, ModelSpec):
        return model.tensors
    return parameter_tensors(model, vocab_size=padded_vocab_size(model, tp, multiple))


def rank_parameters(model: AnyModel, tp: int, multiple: int) -> dict[BlockKind, int]:
    """Return the parameters one tp rank holds of a block of each kind, vocabulary padded."""
    if not isinstance(model, ModelSpec):
        return parameters_by_kind(model, tp=tp)
    vocab_size = padded_vocab_size(model, tp, multiple)
    return parameters_by_kind(model, tp=tp, vocab_size=vocab_size)


def padded_vocab_size(model: ModelSpec, tp: int, multiple: int) -> int:
    """Return the rows of the table where each rank's share is a *multiple*; 1 pads nothing.

    Megatron-LM's is 128 (its default of make-vocab-size-divisible-by): the logit GEMM tiles well.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> gpt2 = load_model("gpt2")
    >>> padded_vocab_size(gpt2, 8, 128), padded_vocab_size(gpt2, 8, 1)
    (51200, 50257)
    """
    whole = 1 if multiple == 1 else multiple * tp
    return -(-model.vocab_size // whole) * whole


def layer_kinds(model: AnyModel) -> list[BlockKind]:
    """Return each kind of layer of *model* once, in the order in which they come first."""
    return list(dict.fromkeys(kind for kind, _ in model.layer_runs))


def _embedding_tensors(model: ModelSpec, vocab_size: int) -> list[ParameterTensor]:
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


def _attention_tensors(model: ModelSpec) -> list[ParameterTensor]:
    width, query_size = model.hidden_size, model.query_hidden_size
    qkv_size = query_size + 2 * model.kv_hidden_size
    tensors = []
    if model.norm_places != "after":
        tensors += _norm_tensors(model, "attention_norm", TRANSFORMER_LAYER)
    tensors.append(ParameterTensor("qkv.weight", (qkv_size, width), TRANSFORMER_LAYER, 0))
    if model.attention_bias:
        tensors.append(ParameterTensor("qkv.bias", (qkv_size,), TRANSFORMER_LAYER, 0))
    if model.qk_norm != "none":
        tensors += _qk_norm_tensors(model)
    shape = (width, query_size)
    tensors.append(ParameterTensor("attention_output.weight", shape, TRANSFORMER_LAYER, 1))
    if model.output_bias:
        tensors.append(ParameterTensor("attention_output.bias", (width,), TRANSFORMER_LAYER, None))
    if model.norm_places != "before":
        tensors += _norm_tensors(model, "attention_output_norm", TRANSFORMER_LAYER)
    return tensors


def _qk_norm_tensors(model: ModelSpec) -> list[ParameterTensor]:
    """Return the weights of the norms of queries and keys: of a head, or of all of them."""
    widths = (model.head_dim,) * 2
    if model.qk_norm == "width":
        widths = model.query_hidden_size, model.kv_hidden_size
    names = "query_norm", "key_norm"
    return [
        tensor
        for name, width in zip(names, widths, strict=True)
        for tensor in _norm_tensors(model, name, TRANSFORMER_LAYER, width)
    ]


def _mlp_tensors(model: ModelSpec) -> list[ParameterTensor]:
    width, ffn_size = model.hidden_size, model.ffn_hidden_size
    in_size = 2 * ffn_size if model.gated_mlp else ffn_size
    tensors = []
    if model.norm_places != "after" and model.parallel_mlp != "one norm":
        tensors += _norm_tensors(model, "mlp_norm", TRANSFORMER_LAYER)
    tensors.append(ParameterTensor("mlp_in.weight", (in_size, width), TRANSFORMER_LAYER, 0))
    if model.mlp_bias:
        tensors.append(ParameterTensor("mlp_in.bias", (in_size,), TRANSFORMER_LAYER, 0))
    tensors.append(ParameterTensor("mlp_out.weight", (width, ffn_size), TRANSFORMER_LAYER, 1))
    if model.mlp_bias:
        tensors.append(ParameterTensor("mlp_out.bias", (width,), TRANSFORMER_LAYER, None))
    if model.norm_places != "before":
        tensors += _norm_tensors(model, "mlp_out_norm", TRANSFORMER_LAYER)
    return tensors


def _head_tensors(model: ModelSpec, vocab_size: int) -> list[ParameterTensor]:
    if model.mlm_head:
        tensors = _mlm_tensors(model, vocab_size)
    else:
        tensors = _norm_tensors(model, "final_norm", HEAD)
    if not model.tied_embeddings:
        shape = (vocab_size, model.hidden_size)
        tensors.append(ParameterTensor("output_embedding.weight", shape, HEAD, 0))
    return tensors


def _mlm_tensors(model: ModelSpec, vocab_size: int) -> list[ParameterTensor]:
    """Return what BERT's head has beside an output matrix; only the bias of the logits splits."""
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


def _local_qkv_size(model: ModelSpec, tp: int) -> int:
    """Return how many query, key and value outputs one rank computes."""
    _check_divisible("num_heads", model.num_heads, tp)
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise PlanError(
            f"num_kv_heads={model.num_kv_heads} is neither divisible by tp={tp} nor divides it"
        )
    local_kv_heads = max(1, model.num_kv_heads // tp)
    return (model.num_heads // tp + 2 * local_kv_heads) * model.head_dim


def _check_divisible(field: str, size: int, tp: int) -> None:
    if size % tp:
        raise PlanError(f"{field}={size} is not divisible by tp={tp}")
