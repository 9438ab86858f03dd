"""What lives for a moment in a pass through a block, step by step.

Each step allocates, then runs, then frees; the highest level over the steps is what a block
needs beside the tensors that wait for backward.  The steps follow the order in which PyTorch's
autograd runs and frees: a node's saved tensors go when its backward has run, the gradient that
arrives when the node that received it has.
"""

from collections.abc import Iterable
from typing import NamedTuple

from hwprofiles import Attention, Recompute
from simulator.activations import (
    attention_core_tensors,
    layer_tensors,
    logits_tensor,
    saved_head_bytes,
    saved_layer_bytes,
)
from simulator.block_shape import BlockShape
from simulator.fp8_operands import (
    column_backward_bytes,
    column_forward_bytes,
    row_backward_bytes,
    row_forward_bytes,
)


class Step(NamedTuple):
    """Bytes that a step allocates before it runs, and frees after."""

    name: str
    allocates: int
    frees: int


def highest(steps: Iterable[Step], live: int = 0) -> int:
    """Return the most bytes that live at one time; *live* before the first step.

    >>> highest([Step("product", 6, 4), Step("sum", 3, 5)], live=1)
    7
    """
    most = live
    for step in steps:
        most = max(most, live + step.allocates)
        live += step.allocates - step.frees
    return most


class Widths(NamedTuple):
    """Bytes of the tensors of a layer's passes on one rank.

    ``local`` is an activation outside tensor-parallel regions, ``whole`` one with all tokens,
    ``gathered`` a copy with all tokens where the rank keeps its own only.
    """

    local: int
    whole: int
    gathered: int
    core: int
    key_value: int
    mlp_in: int
    mlp_out: int
    scores: int
    score_mask: int

    @classmethod
    def of(cls, shape: BlockShape) -> "Widths":
        """Return the widths of *shape*."""
        element = shape.num_tokens * shape.element_bytes
        whole = element * shape.model.hidden_size
        num_scores = 0
        if shape.attention is Attention.UNFUSED:
            num_scores = shape.num_local_heads * shape.microbatch_size * shape.seq_len**2
        return cls(
            local=shape.message_bytes,
            whole=whole,
            gathered=whole if shape.sequence_parallel else 0,
            core=element * shape.local_width,
            key_value=element * shape.local_kv_width,
            mlp_in=element * shape.mlp_in_width,
            mlp_out=element * shape.local_ffn_width,
            scores=num_scores * shape.element_bytes,
            score_mask=num_scores if shape.model.dropout else 0,
        )

    @property
    def qkv(self) -> int:
        """Queries, keys and values."""
        return self.core + 2 * self.key_value


def forward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the last layer's forward: its kept tensors are allocated in it, and stay."""
    wide = Widths.of(shape)
    mlp, attention = _outside_core(shape)
    core = sum(tensor.size_bytes for tensor in attention_core_tensors(shape))
    recomputed = core if shape.recompute is Recompute.SELECTIVE else 0
    kept = shape.num_tokens * shape.local_width * shape.linear_input_bytes
    # Flash attention whose output is kept apart has it already; unfused, it is copied once.
    outputs = 1 + (shape.attention is Attention.UNFUSED) - _keeps_output_apart(shape)
    output = outputs * wide.core + row_forward_bytes(shape, shape.local_width)
    summed = wide.whole + _part(shape)
    cast = row_forward_bytes(shape, shape.local_ffn_width)
    cast += wide.mlp_out - wide.mlp_out // shape.element_bytes * shape.linear_input_bytes
    return (
        Step("before the core", attention - kept, 0),
        Step("scores", wide.scores, 0),
        Step("core", core, wide.scores),
        Step("core output", output, output - kept + recomputed),
        Step("attention output", summed, summed),
        Step("mlp", mlp, 0),
        Step("mlp out", wide.whole + wide.local + cast, cast),
    )


def _keeps_output_apart(shape: BlockShape) -> bool:
    """Return whether flash attention keeps its output beside the linear layer's copy of it."""
    return shape.attention is Attention.FLASH and shape.keeps_fp8_inputs


def _outside_core(shape: BlockShape) -> tuple[int, int]:
    """Return the bytes kept of the MLP and of the attention but for its core."""
    core = {tensor.name for tensor in attention_core_tensors(shape)}
    outside = [tensor for tensor in layer_tensors(shape) if tensor.name not in core]
    mlp = sum(tensor.size_bytes for tensor in outside if tensor.name.startswith("mlp"))
    return mlp, sum(tensor.size_bytes for tensor in outside) - mlp


def unkept_forward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return a layer's forward that keeps nothing but its input, which is not counted.

    A block's normalised input lives until the block returns.
    """
    wide = Widths.of(shape)
    norm = wide.local
    unfused = shape.attention is Attention.UNFUSED
    mask = wide.score_mask
    dropped = wide.scores if shape.model.dropout else 0
    qkv = column_forward_bytes(shape, shape.local_width + 2 * shape.local_kv_width)
    output = wide.whole + _part(shape)
    of_core = row_forward_bytes(shape, shape.local_width)
    mlp_in = column_forward_bytes(shape, shape.mlp_in_width)
    of_mlp = row_forward_bytes(shape, shape.local_ffn_width)
    return (
        Step("attention norm", norm, 0),
        Step("qkv", qkv + wide.qkv, qkv),
        Step("softmax", 2 * wide.scores, wide.scores),
        Step("attention dropout", dropped + mask, wide.scores * bool(dropped) + mask),
        Step("core", wide.core * (1 + unfused), wide.core * unfused + wide.scores + wide.qkv),
        Step("attention output", output + of_core, of_core + wide.core + norm),
        Step("attention residual", wide.local, output),
        Step("mlp norm", norm, 0),
        Step("mlp in", mlp_in + wide.mlp_in, mlp_in),
        Step("mlp activation", wide.mlp_out, wide.mlp_in),
        Step("mlp out", output + of_mlp, of_mlp + norm + wide.mlp_out),
        Step("mlp residual", wide.local, output + wide.local),
    )


def _part(shape: BlockShape) -> int:
    """Return a rank's own tokens of a sum, where the sum is scattered."""
    return shape.message_bytes if shape.sequence_parallel else 0


def _weight_gradient(shape: BlockShape, outputs: int, inputs: int) -> int:
    """Return a weight's gradient before it is added to the buffer; none where that is fused."""
    return 0 if shape.stack.fused_gradient_accumulation else outputs * inputs * shape.element_bytes


def backward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return a layer's backward; kept tensors count as negative once they are freed."""
    kept = {tensor.name: tensor.size_bytes for tensor in layer_tensors(shape)}
    wide = Widths.of(shape)
    return (*_mlp_backward(shape, wide, kept), *_attention_backward(shape, wide, kept))


def _mlp_backward(shape: BlockShape, wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    dropped = wide.local if shape.model.dropout else 0
    again = row_backward_bytes(shape, shape.local_ffn_width)
    again += _weight_gradient(shape, shape.model.hidden_size, shape.local_ffn_width)
    return (
        Step("gradient", wide.local, 0),
        Step("mlp dropout", dropped, kept["mlp dropout mask"]),
        Step("mlp out", again + wide.mlp_out, again + dropped + kept["mlp activation output"]),
        Step("mlp activation", wide.mlp_in, wide.mlp_out + kept["mlp activation input"]),
        _column_step(
            shape,
            "mlp in",
            shape.mlp_in_width,
            operands=column_backward_bytes(shape, shape.mlp_in_width),
            freed=wide.mlp_in + kept["mlp input"],
        ),
        Step("mlp norm", wide.local, 2 * wide.local + kept["mlp norm statistics"]),
        Step("mlp residual", 0, wide.local),
    )


def _attention_backward(shape: BlockShape, wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    dropped = wide.local if shape.model.dropout else 0
    again = row_backward_bytes(shape, shape.local_width)
    again += _weight_gradient(shape, shape.model.hidden_size, shape.local_width)
    unfused = shape.attention is Attention.UNFUSED
    is_done = unfused or _keeps_output_apart(shape)
    outputs = shape.local_width + 2 * shape.local_kv_width
    return (
        Step("attention dropout", dropped, kept["attention dropout mask"]),
        Step(
            "attention output",
            again + wide.core,
            again + dropped + kept["attention output"] * is_done,
        ),
        *(_unfused_core(shape, wide) if unfused else _flash_core(shape, wide, kept)),
        *_packed(wide, kept),
        _column_step(
            shape,
            "qkv",
            outputs,
            operands=column_backward_bytes(shape, outputs),
            freed=wide.qkv + kept["qkv input"],
        ),
        Step("attention norm", wide.local, 2 * wide.local),
    )


def _column_step(shape: BlockShape, name: str, outputs: int, *, operands: int, freed: int) -> Step:
    """Return the backward of a column-parallel product: its operands, and its input's gradient."""
    weight = _weight_gradient(shape, outputs, shape.model.hidden_size)
    allocated = operands + Widths.of(shape).whole + _part(shape) + weight
    return Step(name, allocated, allocated - shape.message_bytes + freed)


def _unfused_core(shape: BlockShape, wide: Widths) -> tuple[Step, ...]:
    """Return the core's backward: value product, dropout, softmax, score product."""
    dropped = wide.scores if shape.model.dropout else 0
    again = _recomputed_core(shape, wide.score_mask + dropped + wide.scores, wide.scores)
    return (
        *again,
        Step("values", wide.scores + wide.key_value, wide.core + dropped),
        Step("probability dropout", dropped, dropped + wide.score_mask),
        Step("softmax", wide.scores, 2 * wide.scores),
        Step("scores", wide.core + wide.key_value, wide.scores),
    )


def _flash_core(shape: BlockShape, wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    statistics = kept["log-sum-exp"]
    output = kept["attention output"]
    if _keeps_output_apart(shape):  # recomputed with the core where that is
        is_kept = shape.recompute is not Recompute.SELECTIVE
        output = kept["attention output in bf16"] * is_kept
    rotated = kept["rotated queries and keys"]
    turned = wide.core + wide.key_value if shape.model.positions == "rotary" else 0
    again = _recomputed_core(shape, wide.core + statistics, 0)
    recomputed = wide.core if again else 0
    return (
        *again,
        Step(
            "attention core",
            wide.qkv,
            wide.core + statistics + rotated + output + recomputed,
        ),
        Step("rotary", turned, turned),
    )


def _recomputed_core(shape: BlockShape, size_bytes: int, transient: int) -> tuple[Step, ...]:
    """Return the core's forward in backward, where only that is recomputed."""
    if shape.recompute is not Recompute.SELECTIVE:
        return ()
    return (Step("core again", size_bytes + transient, transient),)


def _packed(wide: Widths, kept: dict[str, int]) -> tuple[Step, ...]:
    """Return the gradients of queries, keys and values becoming that of a fused product."""
    return (Step("pack qkv", wide.qkv, wide.qkv + kept["queries, keys and values"]),)


def head_forward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the head's forward; the kept copy of the logits, in 16 bit or fp32, stays."""
    wide = Widths.of(shape)
    norm = 2 * shape.num_local_scored_tokens * shape.model.hidden_size * shape.element_bytes
    logits = shape.num_scored_tokens * shape.local_vocab_size * shape.element_bytes
    kept = logits_tensor(shape).size_bytes
    copy = 0 if shape.stack.fused_loss else kept
    return (
        Step("final norm", norm, 0),
        Step("logits", wide.gathered + logits, wide.gathered),
        Step("loss", copy + kept, copy + logits),
    )


def head_backward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the head's backward; the gradient of the logits takes the place of the kept copy."""
    logits = shape.num_scored_tokens * shape.local_vocab_size * shape.element_bytes
    kept = logits_tensor(shape).size_bytes
    narrow = 0 if shape.stack.fused_loss else logits
    norm = shape.num_local_scored_tokens * shape.model.hidden_size * shape.element_bytes
    eager = 0 if shape.stack.loss_in_place or shape.stack.fused_loss else kept
    return (
        Step("loss", 2 * eager, 2 * eager),
        Step("16-bit gradient", narrow, kept if narrow else 0),
        _column_step(
            shape,
            "logits",
            shape.local_vocab_size,
            operands=Widths.of(shape).gathered,
            freed=logits + norm,
        ),
        Step("final norm", norm, norm + shape.message_bytes),
    )


def embedding_backward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the embedding's backward: the gradient of a whole table, before it is added."""
    table = shape.local_vocab_size * shape.model.hidden_size * shape.element_bytes
    mask = shape.num_local_tokens * shape.model.hidden_size if shape.model.dropout else 0
    dropped = shape.message_bytes if shape.model.dropout else 0
    whole = Widths.of(shape).gathered
    return (
        Step("gradient", shape.message_bytes, 0),
        Step("embedding dropout", dropped, mask + dropped),
        Step("gathered gradient", whole, 0),
        Step("table gradient", table, table + whole),
    )


def layer_workspace_bytes(shape: BlockShape) -> tuple[int, int]:
    """Return what the last layer's forward, and the first backward, need beside what is kept."""
    kept = saved_layer_bytes(shape)
    if shape.recompute is not Recompute.FULL:
        return highest(forward_steps(shape)) - kept, highest(backward_steps(shape))
    gradient, *rest = backward_steps(shape)
    again = forward_steps(shape)
    recomputation = (
        gradient,
        again[0]._replace(allocates=again[0].allocates - kept),
        *again[1:-1],
        again[-1]._replace(frees=again[-1].allocates),
    )
    return highest(unkept_forward_steps(shape)), highest((*recomputation, *rest))


def head_workspace_bytes(shape: BlockShape) -> tuple[int, int]:
    """Return what the head's forward and backward need beside what is kept.

    Unfused, PyTorch's loss holds 12 bytes a logit at most, Megatron-LM's 10; fused ones 4.
    """
    forward = highest(head_forward_steps(shape)) - saved_head_bytes(shape)
    return forward, highest(head_backward_steps(shape))


def pass_workspace_bytes(
    shape: BlockShape, num_layers: int, *, has_embedding: bool, has_head: bool
) -> tuple[int, int]:
    """Return what one pass through a virtual stage needs beside all that it keeps.

    Args:
        shape: Sizes of its blocks.
        num_layers: Layers of the virtual stage.
        has_embedding: Whether it holds the embedding.
        has_head: Whether it holds the head.

    Returns:
        Bytes of the forward and of the backward pass, each beyond the sum of the tensors that
        wait for backward; 0 where those are the most.
    """
    head = saved_head_bytes(shape) if has_head else 0
    forward = backward = 0
    if num_layers:
        forward, backward = (size - head for size in layer_workspace_bytes(shape))
    if has_head:
        of_head = head_workspace_bytes(shape)
        forward, backward = max(forward, of_head[0]), max(backward, of_head[1])
    if has_embedding:
        layers = num_layers * saved_layer_bytes(shape)
        backward = max(backward, highest(embedding_backward_steps(shape)) - layers - head)
    return max(0, forward), max(0, backward)
