"""Which tensors a block keeps for its backward, and what it needs only for a moment.

The unfused list adds up to Korthikanti et al. 2022 (arXiv 2205.05198), equations 1 to 4:
``s b h (34 + 5 a s / h)`` bytes a layer, tensor parallel ``s b h (10 + 24 / t + 5 a s / (h t))``,
with sequence parallelism ``s b h / t (34 + 5 a s / h)``; norm statistics come on top.
"""

from typing import NamedTuple

from meshwright.hwprofiles import Attention, Recompute
from meshwright.simulator.blocks import BlockShape, layer_products

STATISTIC_BYTES = 4  # norm statistics and log-sum-exp are fp32


class SavedTensor(NamedTuple):
    """A tensor that lives from a block's forward to its backward."""

    name: str
    size_bytes: int


def saved_tensors(shape: BlockShape) -> tuple[SavedTensor, ...]:
    """Return what one layer keeps for one microbatch, after recomputation is taken into account."""
    match shape.recompute:
        case Recompute.FULL:
            return (SavedTensor("layer input", shape.message_bytes),)
        case Recompute.SELECTIVE:
            core = {tensor.name for tensor in attention_core_tensors(shape)}
            return tuple(item for item in layer_tensors(shape) if item.name not in core)
        case Recompute.SELECTIVE_OP:
            return _operator_tensors(shape)
        case Recompute.NONE:
            return layer_tensors(shape)


def layer_tensors(shape: BlockShape) -> tuple[SavedTensor, ...]:
    """Return every tensor that one layer's backward reads."""
    return (*_outside_tensors(shape), *_inside_tensors(shape), *attention_core_tensors(shape))


def _outside_tensors(shape: BlockShape) -> tuple[SavedTensor, ...]:
    model = shape.model
    tokens = shape.num_local_tokens
    residual = shape.message_bytes
    keeps_all = shape.sequence_parallel and shape.stack.keeps_gathered_inputs
    linear_input = tokens * model.hidden_size * shape.linear_input_bytes
    gathered = shape.tp * linear_input if keeps_all else linear_input
    # Autocast casts the input of each separate product anew.
    qkv_copies = 3 if shape.casts_weights else 1
    mlp_copies = 2 if shape.casts_weights and model.gated_mlp else 1
    mask = tokens * model.hidden_size * model.dropout  # a byte an element
    # Layer norm keeps a mean and a deviation of each token, RMS norm the latter alone.
    statistics = tokens * STATISTIC_BYTES * (2 if model.norm == "layernorm" else 1)
    return (
        SavedTensor("attention norm input", residual),
        SavedTensor("attention norm statistics", statistics),
        SavedTensor("qkv input", gathered * qkv_copies),
        SavedTensor("attention dropout mask", mask),
        SavedTensor("mlp norm input", residual),
        SavedTensor("mlp norm statistics", statistics),
        SavedTensor("mlp input", gathered * mlp_copies),
        SavedTensor("mlp dropout mask", mask),
    )


def _inside_tensors(shape: BlockShape) -> tuple[SavedTensor, ...]:
    element = shape.num_tokens * shape.element_bytes
    linear_input = shape.num_tokens * shape.linear_input_bytes
    width = shape.local_width
    projected, rotated = _core_inputs(shape)
    return (
        SavedTensor("queries, keys and values", element * projected),
        SavedTensor("rotated queries and keys", element * rotated),
        SavedTensor("attention output", linear_input * width),
        SavedTensor("mlp activation input", element * shape.mlp_in_width),
        SavedTensor("mlp activation output", linear_input * shape.local_ffn_width),
        *cast_weights(shape),
    )


def _core_inputs(shape: BlockShape) -> tuple[int, int]:
    """Return the widths that the core's inputs keep: of the products' outputs, of turned ones.

    Of a fused product all stays as long as the values do; else the turned ones take the place.
    What is repeated for more heads keeps its copies (see `attention_core_tensors`), so that only
    the queries stay, unless the core runs again.
    """
    width, kv_width = shape.local_width, shape.local_kv_width
    turned = (width + kv_width) if shape.model.positions == "rotary" else 0
    if shape.repeats_key_values and shape.recompute is not Recompute.SELECTIVE:
        return (0, width) if turned else (width, 0)
    return width + 2 * kv_width - (0 if shape.stack.fused_qkv else turned), turned


def cast_weights(shape: BlockShape) -> tuple[SavedTensor, ...]:
    """Return the 16-bit copies of weights that autocast makes in a pass, product by product."""
    if not shape.casts_weights:
        return ()
    width = shape.model.hidden_size * shape.element_bytes
    return (
        SavedTensor("qkv weights", width * (shape.local_width + 2 * shape.local_kv_width)),
        SavedTensor("attention output weights", width * shape.local_width),
        SavedTensor("mlp in weights", width * shape.mlp_in_width),
        SavedTensor("mlp out weights", width * shape.local_ffn_width),
    )


def cached_layer_bytes(shape: BlockShape) -> int:
    """Return what lives of a layer until the forward pass is over, though backward has no use.

    Autocast casts a weight once: it holds what it has cast until its outermost context ends,
    which is after the loss (PyTorch, aten/src/ATen/autocast_mode.cpp, `cached_cast`).  Where the
    layer is recomputed nothing else holds it; the casts of its second forward go to backward.
    """
    if shape.recompute is not Recompute.FULL or not shape.caches_casts:
        return 0
    return sum(tensor.size_bytes for tensor in cast_weights(shape))


def attention_core_tensors(shape: BlockShape) -> tuple[SavedTensor, ...]:
    """Return what the attention core keeps: the part that selective recomputation drops."""
    heads = shape.num_local_heads * shape.microbatch_size
    if shape.attention is Attention.FLASH:
        # Backward makes the scores again from queries, keys and this; the output that it also reads
        # is the input of the next product and counts as that.
        statistics = SavedTensor("log-sum-exp", heads * shape.seq_len * STATISTIC_BYTES)
        if not shape.keeps_fp8_inputs:
            return (statistics,)
        # Its backward reads its own output, of which the linear layer keeps only an fp8 copy.
        output = shape.num_tokens * shape.local_width * shape.element_bytes
        return (statistics, SavedTensor("attention output in bf16", output))
    # With 2 + 1 + 2 bytes a score for what follows: the 5 a s of Korthikanti et al.
    scores = heads * shape.seq_len**2
    tensors = [SavedTensor("attention probabilities", scores * shape.element_bytes)]
    if shape.repeats_key_values:
        width = shape.num_tokens * shape.local_width * shape.element_bytes
        tensors.append(SavedTensor("repeated keys and values", 2 * width))
    if shape.model.dropout:
        tensors.append(SavedTensor("attention probability mask", scores))
        tensors.append(SavedTensor("dropped probabilities", scores * shape.element_bytes))
    return tuple(tensors)


def _operator_tensors(shape: BlockShape) -> tuple[SavedTensor, ...]:
    """Return a layer's input and the outputs of the operators that `operator_policy` keeps.

    Also those that backward does not read: a kept product's before it is added, or rotated.
    """
    element = shape.num_tokens * shape.element_bytes
    heads = shape.num_local_heads * shape.microbatch_size
    products = (
        SavedTensor(each.name, element * each.outputs)
        for each in layer_products(shape.model, tp=shape.tp, is_fp8=shape.fp8 is not None)
        if each.is_kept
    )
    return (
        SavedTensor("layer input", shape.message_bytes),
        *products,
        SavedTensor("core output", element * shape.local_width),
        SavedTensor("log-sum-exp", heads * shape.seq_len * STATISTIC_BYTES),
        *_scattered_tensors(shape),
    )


def _scattered_tensors(shape: BlockShape) -> tuple[SavedTensor, ...]:
    """Return a rank's own tokens of the two sums of a layer, where they are scattered."""
    if not shape.sequence_parallel:
        return ()
    names = ("reduced attention output", "reduced mlp out")
    return tuple(SavedTensor(name, shape.message_bytes) for name in names)


def unread_tensors(shape: BlockShape) -> tuple[SavedTensor, ...]:
    """Return what operators keep and recomputation never reads: it ends before, if it ends early.

    PyTorch frees them with the layer's last kept tensor.
    """
    if shape.recompute is not Recompute.SELECTIVE_OP or shape.model.dropout:
        return ()
    late = {"mlp out", "reduced mlp out"}
    return tuple(tensor for tensor in _operator_tensors(shape) if tensor.name in late)


def saved_layer_bytes(shape: BlockShape) -> int:
    """Return the bytes one layer keeps for one microbatch."""
    return sum(tensor.size_bytes for tensor in saved_tensors(shape))


def saved_embedding_bytes(shape: BlockShape) -> int:
    """Return what the embedding keeps: ids of tokens and types, a dropout mask, a norm's input."""
    model = shape.model
    element = shape.num_local_tokens * model.hidden_size
    ids = shape.num_tokens * 8 * (2 if model.token_types else 1)  # int64
    return ids + element * (model.dropout + shape.element_bytes * model.embedding_norm)


def saved_head_bytes(shape: BlockShape) -> int:
    """Return what the head keeps: norm input and output, and the probabilities or logits.

    BERT's head also keeps the input and the output of its dense layer, autocast the output
    matrix in 16 bit.
    """
    width = shape.num_local_scored_tokens * shape.model.hidden_size
    values = (3 if shape.model.mlm_head else 1) * shape.element_bytes + shape.residual_bytes
    if shape.sequence_parallel and shape.stack.keeps_gathered_inputs:
        # The matrix multiplies all tokens: of tp parts of its input one counts already.
        values += (shape.tp - 1) * shape.element_bytes
    matrix = shape.local_vocab_size * shape.model.hidden_size * shape.element_bytes
    cast = matrix if shape.casts_weights else 0
    return values * width + cast + kept_logits_bytes(shape) + logits_tensor(shape).size_bytes


def kept_logits_bytes(shape: BlockShape) -> int:
    """Return the logits as the last stage's output, where that lives until backward."""
    num_logits = shape.num_scored_tokens * shape.local_vocab_size
    return num_logits * shape.element_bytes if shape.keeps_outputs else 0


def logits_tensor(shape: BlockShape) -> SavedTensor:
    """Return what the loss keeps of the logits: fp32 probabilities, or 16-bit logits if fused."""
    # Unfused, its gradient is that of fp32 probabilities; a fused kernel makes them again.
    per_logit = shape.element_bytes if shape.stack.fused_loss else STATISTIC_BYTES
    size_bytes = shape.num_scored_tokens * shape.local_vocab_size * per_logit
    return SavedTensor("logits", size_bytes)
