"""Parameter tensors of a model: shapes, tensor-parallel splits and counts."""

from collections import Counter, defaultdict
from math import prod

from meshwright.simulator.errors import PlanError
from meshwright.simulator.model.described import ParameterTensor
from meshwright.simulator.model.kinds import (
    APART,
    EMBEDDING,
    ENDS,
    EXPERT_LAYER,
    EXPERT_LAYERS,
    HEAD,
    LAYERS,
    PREDICTIONS,
    BlockKind,
    BlockRun,
)
from meshwright.simulator.model.registry import AnyModel
from meshwright.simulator.model.spec import ModelSpec
from meshwright.simulator.model.tensors import (
    LAYER_TENSORS,
    ROUTED,
    embedding_tensors,
    head_tensors,
)

FP32_BYTES = 4
INT64_BYTES = 8


def parameter_tensors(
    model: AnyModel, *, vocab_size: int | None = None
) -> tuple[ParameterTensor, ...]:
    """Return the unsplit tensors of the embedding, of ONE layer of each kind, and of the head.

    The final norm belongs to the head, unless the model has MTP layers. An
    untied output matrix does, too; a tied one is listed once, in the embedding.
    Weights are (outputs, inputs), as PyTorch stores them, so column-parallel
    layers split dim 0 and row-parallel ones dim 1 (Shoeybi et al. 2019, arXiv
    1909.08053, section 3).

    Args:
        model: The model.
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
        *embedding_tensors(model, vocab_size),
        *(
            tensor._replace(block=kind)
            for kind in layer_kinds(model)
            for tensor in LAYER_TENSORS[kind](model)
        ),
        *head_tensors(model, vocab_size),
    )


def count_parameters(model: AnyModel) -> int:
    """Return the number of parameters with the unpadded vocabulary.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> count_parameters(load_model("gpt2"))
    124439808
    """
    return count_trained_parameters(model) + _count_routing_biases(model)


def count_trained_parameters(model: AnyModel) -> int:
    """Return the number of parameters with gradients: all but biases of routing.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> model = load_model("deepseek-v3")
    >>> count_parameters(model) - count_trained_parameters(model)  # 58 layers of 256 experts
    14848
    """
    counts = parameters_by_kind(model)
    ends = sum(counts.get(kind, 0) for kind in (EMBEDDING, *APART, HEAD))
    return ends + sum(count * counts[kind] for kind, count in model.layer_runs)


def count_active_parameters(model: AnyModel) -> int:
    """Return the active parameters of a token: of routed experts only its top-k.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> count_active_parameters(load_model("mixtral-8x7b"))
    12879925248
    """
    if model.experts is None:
        return count_parameters(model)
    idle = model.experts.num_experts - model.experts.experts_per_token
    tensors = filter(is_expert, LAYER_TENSORS[EXPERT_LAYER](model))
    of_one = sum(prod(each.shape[1:]) for each in tensors)
    return count_parameters(model) - _num_expert_layers(model) * idle * of_one


def layer_flops(model: ModelSpec, kind: BlockKind, seq_len: int) -> int:
    """Return the forward FLOPs of a token in a layer of *kind*.

    GEMMs with weights, of experts the top-k, and attention over *seq_len* keys, or as many as a
    window has, without a factor for causal masks; 2 FLOPs a multiply-add.
    """
    seen = model.seen_tokens(kind, seq_len)
    attention = model.num_heads * (model.query_head_dim + model.value_head_dim) * seen
    tensors = LAYER_TENSORS[kind](model)
    matrices = (each for each in tensors if len(each.shape) > 1 and not is_bias(each))
    chosen = model.experts.experts_per_token if model.experts else 1
    weights = (
        chosen * prod(each.shape[1:]) if is_expert(each) else prod(each.shape) for each in matrices
    )
    return 2 * (sum(weights) + attention)


def mtp_flops(model: ModelSpec, seq_len: int) -> int:
    """Return the forward FLOPs of a token in all MTP layers, their logits included.

    Each has a projection from ``2 h`` to ``h``, a layer of the last one's kind and the head's GEMM.
    """
    product = 2 * model.hidden_size * (2 * model.hidden_size + model.vocab_size)
    layer = layer_flops(model, model.layer_runs[-1].kind, seq_len)
    return model.prediction_layers * (product + layer)


def _num_expert_layers(model: ModelSpec) -> int:
    predicting = BlockRun(model.layer_runs[-1].kind, model.prediction_layers)
    runs = (*model.layer_runs, predicting)
    return sum(count for kind, count in runs if kind in EXPERT_LAYERS)


def _count_routing_biases(model: AnyModel) -> int:
    """Return the number of routing biases, which have no gradient and are no step's tensors."""
    if model.experts is None:
        return 0
    return model.experts.routing_bias * _num_expert_layers(model) * model.experts.num_experts


def parameters_by_kind(
    model: AnyModel,
    *,
    tp: int = 1,
    vocab_size: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    ends_tp: int | None = None,
) -> dict[BlockKind, int]:
    """Return the parameters of a block of each kind on one tp rank.

    Args:
        model: The model.
        tp: Tensor-parallel degree.
        vocab_size: As for `parameter_tensors`; pass `padded_vocab_size` where
            the stack pads.
        ep: As for `local_shape`.
        etp: As for `local_shape`.
        ends_tp: Ranks that split embedding and head; by default *tp*.

    Raises:
        PlanError: If heads or MLP width cannot be split over tp ranks.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> gpt3 = load_model("gpt3-175b")
    >>> parameters_by_kind(gpt3)["layer"], parameters_by_kind(gpt3, tp=8)["layer"]
    (1812099072, 226576896)
    """
    counts = dict.fromkeys([EMBEDDING, *layer_kinds(model), *mtp_kinds(model), HEAD], 0)
    for tensor in parameter_tensors(model, vocab_size=vocab_size):
        ranks = tp if ends_tp is None or tensor.block not in ENDS else ends_tp
        counts[tensor.block] += prod(local_shape(model, tensor, tp=ranks, ep=ep, etp=etp))
    return counts


def expert_parameters(model: AnyModel, tp: int, ep: int, etp: int | None) -> dict[BlockKind, int]:
    """Return the parameters of routed experts on one rank, of a layer of each kind.

    Empty without expert parallelism: then experts are replicated like all other parameters.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> expert_parameters(load_model("mixtral-8x7b"), 2, 8, 1)
    {'expert layer': 176160768}
    """
    counts: Counter[BlockKind] = Counter()
    if ep == 1:
        return counts
    for tensor in filter(is_expert, parameter_tensors(model)):
        counts[tensor.block] += prod(local_shape(model, tensor, tp=tp, ep=ep, etp=etp))
    return dict(counts)


def linear_weights(model: AnyModel, tp: int, ep: int, etp: int | None) -> Counter[BlockKind]:
    """Return the parameters of linear layers, experts included, on one rank by kind of block.

    These run in 8 bits in fp8 training; routers and gates do not, and are not counted.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> linear_weights(load_model("gpt3-175b"), 8, 1, None)["layer"]
    226492416
    """
    counts: Counter[BlockKind] = Counter()
    for tensor in parameter_tensors(model):
        if is_linear(tensor):
            counts[tensor.block] += prod(local_shape(model, tensor, tp=tp, ep=ep, etp=etp))
    return counts


def is_linear(tensor: ParameterTensor) -> bool:
    """Return True if a tensor is the weight of a linear layer within a layer, or of its experts."""
    is_router = tensor.name in {"router.weight", "shared_gate.weight"}  # in 16 bits or more
    is_inside = tensor.block in {*LAYERS, PREDICTIONS}
    return is_inside and len(tensor.shape) > 1 and not (is_router or is_bias(tensor))


def linear_shapes(
    model: AnyModel, multiple: int, tp: int, ep: int, etp: int | None
) -> dict[BlockKind, frozenset[tuple[int, ...]]]:
    """Return the distinct shapes of linear layers' weights on one rank, by kind of block.

    The head has the output matrix, whose rows are padded to a *multiple* on each rank; of experts
    it is the shape of one.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> sorted(linear_shapes(load_model("gpt2"), 128, 2, 1, None)["head"])
    [(25216, 768)]
    """
    shapes_of: defaultdict[BlockKind, set[tuple[int, ...]]] = defaultdict(set)
    matrix = "word_embedding" if model.tied_embeddings else "output_embedding"
    is_listed = not isinstance(model, ModelSpec)
    for tensor in rank_tensors(model, tp, multiple):
        makes_logits = tensor.name == f"{matrix}.weight"
        is_matrix = is_listed and len(tensor.shape) == 2
        if makes_logits or is_matrix or is_linear(tensor):
            kind = HEAD if makes_logits else tensor.block
            shapes_of[kind].add(local_shape(model, tensor, tp=tp, ep=ep, etp=etp)[-2:])
    return {kind: frozenset(shapes) for kind, shapes in shapes_of.items()}


def has_mtp_layers(model: AnyModel) -> bool:
    """Return True if the model has MTP layers (multi-token prediction).

    The final norm is then on the stage of the last layer, wherever the head is
    (`has_final_layernorm_in_this_stage` of megatron/core/transformer/transformer_block.py, core
    0.16).
    """
    return isinstance(model, ModelSpec) and model.prediction_layers > 0


def mtp_kinds(model: AnyModel) -> tuple[BlockKind, ...]:
    """Return the kinds of blocks between the layers of *model* and its head, in model order."""
    return APART if has_mtp_layers(model) else ()


def shares_embedding(model: AnyModel) -> bool:
    """Return True if another block than the embedding reads its weight.

    A tied head multiplies by it, MTP layers look tokens up. In a pipeline both stages then have a
    copy, and all-reduce its gradients.
    """
    return model.tied_embeddings or has_mtp_layers(model)


def is_expert(tensor: ParameterTensor) -> bool:
    """Return True if a tensor holds a weight, or a bias, of each of a layer's routed experts."""
    return tensor.name.startswith(ROUTED)


def is_bias(tensor: ParameterTensor) -> bool:
    """Return True if a tensor is a bias."""
    return tensor.name.endswith(".bias")


def local_shape(
    model: AnyModel, tensor: ParameterTensor, *, tp: int, ep: int = 1, etp: int | None = None
) -> tuple[int, ...]:
    """Return the shape of a tensor's shard on one rank.

    With fewer key-value heads than ranks each rank keeps one whole head, so
    keys and values are stored ``tp / num_kv_heads`` times, as in Megatron-LM.
    Of a vocabulary that is not padded the last ranks may have fewer rows, as in
    DTensor; this is the part of the first.

    Args:
        model: Whose tensor.
        tensor: Unsplit.
        tp: Ranks that split it.
        ep: Ranks among which routed experts are divided.
        etp: Ranks that split their widths; by default *tp*.

    Raises:
        PlanError: If the split dim is not divisible by *tp*.
    """
    if tp < 1:
        raise PlanError(f"tp={tp} must be >= 1")
    if is_expert(tensor):
        whole, tp = tensor.shape, tp if etp is None else etp
        tensor = tensor._replace(shape=(whole[0] // ep, *whole[1:]))
    if tensor.tp_dim is None or tp == 1:
        return tensor.shape
    if not isinstance(model, ModelSpec):
        _check_divisible(tensor.name, tensor.shape[tensor.tp_dim], tp)
    elif tensor.name.startswith("qkv."):
        return (_local_qkv_size(model, tp), *tensor.shape[1:])
    elif tensor.name.startswith("attention_output."):
        _check_divisible("num_heads", model.num_heads, tp)
    elif tensor.name.startswith("mlp_"):
        _check_divisible("ffn_hidden_size", model.ffn_hidden_size, tp)
    elif tensor.block in {*LAYERS, PREDICTIONS}:
        _check_divisible(tensor.name, tensor.shape[tensor.tp_dim], tp)
    shape = list(tensor.shape)
    shape[tensor.tp_dim] = -(-shape[tensor.tp_dim] // tp)
    return tuple(shape)


def rank_tensors(model: AnyModel, tp: int, multiple: int) -> tuple[ParameterTensor, ...]:
    """Return the tensors, unsplit, with the vocabulary padded as `padded_vocab_size` does."""
    if not isinstance(model, ModelSpec):
        return model.tensors
    return parameter_tensors(model, vocab_size=padded_vocab_size(model, tp, multiple))


def rank_parameters(
    model: AnyModel,
    tp: int,
    multiple: int,
    ep: int = 1,
    etp: int | None = None,
    *,
    ends_tp: int | None = None,
) -> dict[BlockKind, int]:
    """Return the parameters one rank holds of a block of each kind, vocabulary padded."""
    if not isinstance(model, ModelSpec):
        return parameters_by_kind(model, tp=tp)
    rows = padded_vocab_size(model, tp if ends_tp is None else ends_tp, multiple)
    return parameters_by_kind(model, tp=tp, vocab_size=rows, ep=ep, etp=etp, ends_tp=ends_tp)


def buffer_bytes(model: AnyModel) -> tuple[int, ...]:
    """Return the bytes of the buffers of a PyTorch module of *model*, by data type.

    Rotary embeddings of transformers have ``inv_freq`` and ``original_inv_freq`` in fp32.
    Batch norms have running means and variances in fp32, and ``num_batches_tracked``.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> [buffer_bytes(load_model(name)) for name in ("gpt2", "llama2-7b", "resnet50")]
    [(), (512,), (212480, 424)]
    """
    if isinstance(model, ModelSpec):
        return (2 * (model.rotary_dim // 2) * FP32_BYTES,) if model.positions == "rotary" else ()
    counts = Counter([EMBEDDING, HEAD])
    for kind, count in model.layer_runs:
        counts[kind] += count
    norms = [each for each in model.tensors if each.name.endswith("norm.weight")]
    channels = sum(counts[each.block] * prod(each.shape) for each in norms)
    numbers = sum(counts[each.block] for each in norms)
    return (2 * channels * FP32_BYTES, numbers * INT64_BYTES) if norms else ()


def padded_vocab_size(model: ModelSpec, tp: int, multiple: int) -> int:
    """Return the rows of the padded embedding, each rank's a *multiple*; 1 pads nothing.

    Megatron-LM's is 128 (its default of make-vocab-size-divisible-by): the logit GEMM tiles well.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> gpt2 = load_model("gpt2")
    >>> padded_vocab_size(gpt2, 8, 128), padded_vocab_size(gpt2, 8, 1)
    (51200, 50257)
    """
    whole = 1 if multiple == 1 else multiple * tp
    return -(-model.vocab_size // whole) * whole


def layer_kinds(model: AnyModel) -> list[BlockKind]:
    """Return the distinct kinds of layers of *model*, in order of first occurrence."""
    return list(dict.fromkeys(kind for kind, _ in model.layer_runs))


def _local_qkv_size(model: ModelSpec, tp: int) -> int:
    """Return the query, key and value outputs of one rank."""
    _check_divisible("num_heads", model.num_heads, tp)
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise PlanError(
            f"num_kv_heads={model.num_kv_heads} is neither divisible by tp={tp} nor divides it"
        )
    local_kv_heads = max(1, model.num_kv_heads // tp)  # further ranks replicate heads
    return (model.num_heads // tp + 2 * local_kv_heads) * model.head_dim


def _check_divisible(field: str, size: int, tp: int) -> None:
    if size % tp:
        raise PlanError(f"{field}={size} is not divisible by tp={tp}")
