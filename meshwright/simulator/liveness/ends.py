"""What lives for a moment in a pass through an end of the model, step by step, as in a layer."""

from meshwright.hwprofiles import Precision
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.liveness.activations import (
    kept_logits_bytes,
    logits_tensor,
    saved_head_bytes,
)
from meshwright.simulator.liveness.products import Product, Step, column_steps, highest
from meshwright.simulator.liveness.tensor_bytes import TensorBytes


def head_forward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the head's forward; the kept copy of the logits, in 16 bit or fp32, stays.

    An unfused loss casts the logits to fp32, where they are not in fp32 already.
    """
    sizes = TensorBytes.of(shape)
    # The norm's input and its output: both wait for backward.
    norm = 2 * shape.num_local_scored_tokens * shape.model.hidden_size * shape.residual_bytes
    cast = _cast_operands(shape)
    logits = shape.num_scored_tokens * shape.local_vocab_size * shape.element_bytes
    kept = logits_tensor(shape).size_bytes
    copy = 0 if shape.stack.fused_loss or _has_fp32_logits(shape) else kept
    return (
        Step("final norm", norm, 0),
        Step("logits", sizes.gathered + cast + logits, sizes.gathered + (norm // 2 if cast else 0)),
        Step("loss", copy + kept, copy + logits - kept_logits_bytes(shape)),
    )


def _cast_operands(shape: BlockShape) -> int:
    """Return the 16-bit copies of the norm's output and the matrix, where autocast makes them."""
    if not shape.casts_weights:
        return 0
    rows = shape.num_local_scored_tokens + shape.local_vocab_size
    return rows * shape.model.hidden_size * shape.element_bytes


def head_backward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the head's backward; the gradient of the logits takes the place of the kept copy.

    In fp32, where the loss writes it there, that is all there is of it.
    """
    logits = shape.num_scored_tokens * shape.local_vocab_size * shape.element_bytes
    kept = logits_tensor(shape).size_bytes
    is_final = shape.stack.loss_in_place and _has_fp32_logits(shape)
    half_bytes = 0 if shape.stack.fused_loss or is_final else logits
    loss_bytes = 0 if shape.stack.loss_in_place or shape.stack.fused_loss else kept
    # PyTorch's loss holds the losses' gradient and its own; split over ranks, the exponentials too.
    loss_bytes *= 2 if shape.tp == 1 else 3
    return (
        Step("loss", loss_bytes, loss_bytes),
        # Where logits were cast to fp32 their gradient is cast back, and the wide one goes.
        Step("16-bit gradient", half_bytes, kept if half_bytes else 0),
        *logits_backward_steps(shape, logits),
    )


def logits_backward_steps(
    shape: BlockShape, gradient_bytes: int, *, stays: bool = False
) -> tuple[Step, ...]:
    """Return the backward of the output matrix and of the norm before it.

    Args:
        shape: Sizes of the head.
        gradient_bytes: What goes with the gradient of the logits.
        stays: Whether the matrix's gradient stays.
    """
    model = shape.model
    values = shape.num_local_scored_tokens * model.hidden_size
    entered = values * shape.residual_bytes
    return (
        *column_steps(
            shape,
            Product("logits", gradient_bytes, model.hidden_size, (shape.local_vocab_size,)),
            values * shape.element_bytes,
            operands=TensorBytes.of(shape).regathered,
            stays=stays,
        ),
        Step("final norm", entered, entered + shape.message_bytes),
    )


def embedding_backward_steps(shape: BlockShape) -> tuple[Step, ...]:
    """Return the embedding's backward: the gradient of a whole table, before it is added."""
    table = shape.local_vocab_size * shape.model.hidden_size * shape.residual_bytes
    # DTensor's look-up gives every tensor rank a gradient of all rows, of which it keeps its own.
    if shape.stack.whole_table_gradient:
        table *= shape.tp
    mask = shape.num_local_tokens * shape.model.hidden_size if shape.model.dropout else 0
    dropped = shape.message_bytes if shape.model.dropout else 0
    whole = TensorBytes.of(shape).gathered
    return (
        Step("gradient", shape.message_bytes, 0),
        Step("embedding dropout", dropped, mask + dropped),
        Step("gathered gradient", whole, 0),
        Step("table gradient", table, table + whole, gradient=table),
    )


def waiting_table_bytes(shape: BlockShape) -> int:
    """Return a tied table's gradient from the head, which waits for that from the embedding.

    Autograd adds both up, in place, before it adds them to the gradient that is kept.
    """
    if not shape.model.tied_embeddings or shape.stack.fused_gradient_accumulation:
        return 0
    return shape.local_vocab_size * shape.model.hidden_size * shape.residual_bytes


def _has_fp32_logits(shape: BlockShape) -> bool:
    return shape.element_bytes == Precision.FP32.num_bytes


def head_workspace_bytes(shape: BlockShape) -> tuple[int, int]:
    """Return what the head's forward and backward need beside what is kept.

    Unfused, PyTorch's loss holds 12 bytes a logit at most, Megatron-LM's 10; fused ones 4.
    """
    forward = highest(head_forward_steps(shape)) - saved_head_bytes(shape)
    return forward, highest(head_backward_steps(shape))
