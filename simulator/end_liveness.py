"""What lives for a moment in a pass through an end of the model, step by step, as in a layer."""

from hwprofiles import Precision
from simulator.activations import kept_logits_bytes, logits_tensor, saved_head_bytes
from simulator.block_shape import BlockShape
from simulator.liveness import ColumnLayer, Step, Widths, column_step, highest


def head_forward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the head's forward; the kept copy of the logits, in 16 bit or fp32, stays.

    An unfused loss casts the logits to fp32, where they are not in fp32 already.
    """
    wide = Widths.of(shape)
    norm = 2 * shape.num_local_scored_tokens * shape.model.hidden_size * shape.element_bytes
    logits = shape.num_scored_tokens * shape.local_vocab_size * shape.element_bytes
    kept = logits_tensor(shape).size_bytes
    copy = 0 if shape.stack.fused_loss or _has_fp32_logits(shape) else kept
    return (
        Step("final norm", norm, 0),
        Step("logits", wide.gathered + logits, wide.gathered),
        Step("loss", copy + kept, copy + logits - kept_logits_bytes(shape)),
    )


def head_backward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the head's backward; the gradient of the logits takes the place of the kept copy.

    In fp32, where the loss writes it there, that is all there is of it.
    """
    logits = shape.num_scored_tokens * shape.local_vocab_size * shape.element_bytes
    kept = logits_tensor(shape).size_bytes
    is_final = shape.stack.loss_in_place and _has_fp32_logits(shape)
    narrow = 0 if shape.stack.fused_loss or is_final else logits
    norm = shape.num_local_scored_tokens * shape.model.hidden_size * shape.element_bytes
    eager = 0 if shape.stack.loss_in_place or shape.stack.fused_loss else kept
    # PyTorch's loss holds the losses' gradient and its own; split over ranks, the exponentials too.
    eager *= 2 if shape.tp == 1 else 3
    return (
        Step("loss", eager, eager),
        Step("16-bit gradient", narrow, kept if narrow else 0),
        column_step(
            shape,
            ColumnLayer("logits", logits, shape.local_vocab_size, 1),
            norm,
            operands=Widths.of(shape).regathered,
        ),
        Step("final norm", norm, norm + shape.message_bytes),
    )


def embedding_backward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the embedding's backward: the gradient of a whole table, before it is added."""
    table = shape.local_vocab_size * shape.model.hidden_size * shape.element_bytes
    if shape.stack.whole_table_gradient:
        table *= shape.tp
    mask = shape.num_local_tokens * shape.model.hidden_size if shape.model.dropout else 0
    dropped = shape.message_bytes if shape.model.dropout else 0
    whole = Widths.of(shape).gathered
    return (
        Step("gradient", shape.message_bytes, 0),
        Step("embedding dropout", dropped, mask + dropped),
        Step("gathered gradient", whole, 0),
        Step("table gradient", table, table + whole),
    )


def _has_fp32_logits(shape: BlockShape) -> bool:
    return shape.element_bytes == Precision.FP32.num_bytes


def head_workspace_bytes(shape: BlockShape) -> tuple[int, int]:
    """Return what the head's forward and backward need beside what is kept.

    Unfused, PyTorch's loss holds 12 bytes a logit at most, Megatron-LM's 10; fused ones 4.
    """
    forward = highest(head_forward_steps(shape)) - saved_head_bytes(shape)
    return forward, highest(head_backward_steps(shape))
