"""Bytes that the operands of linear products hold while they run, beside what is kept.

Around an fp8 product an operand has two 8-bit copies, one of them transposed (see `fp8_casts`).
In other formats only what sequence parallelism gathers counts.
"""

from meshwright.simulator.blocks import BlockShape


def copies_bytes(shape: BlockShape, width: int) -> int:
    """Return both fp8 copies of an operand of *width* features and all tokens; none without fp8."""
    return 2 * shape.num_tokens * width if shape.fp8 else 0


def weight_copies_bytes(shape: BlockShape, outputs: int, inputs: int) -> int:
    """Return both fp8 copies of a weight where they are made anew; none where they are kept."""
    return 2 * outputs * inputs if shape.fp8 and not shape.fp8.weight_copy_bytes else 0


def whole_operand_bytes(shape: BlockShape) -> int:
    """Return what an operand as wide as the model takes: gathered, and cast.

    Where it is gathered in fp8, that is one of the two copies.
    """
    width = shape.model.hidden_size
    if shape.fp8 and shape.fp8.tp_gathers_fp8:
        return copies_bytes(shape, width)
    gathered = shape.num_tokens * width * shape.element_bytes * shape.sequence_parallel
    return gathered + copies_bytes(shape, width)


def row_backward_bytes(shape: BlockShape, inputs: int) -> int:
    """Return what a row-parallel product of *inputs* features takes for both its gradients."""
    width = shape.model.hidden_size
    again = 0 if shape.keeps_fp8_inputs else copies_bytes(shape, inputs)
    return whole_operand_bytes(shape) + again + weight_copies_bytes(shape, width, inputs)


def column_backward_bytes(shape: BlockShape, outputs: int) -> int:
    """Return what a column-parallel product of *outputs* features takes for both its gradients.

    A kept fp8 input is as the product wants it, but for what is gathered again.
    """
    width = shape.model.hidden_size
    is_ready = shape.keeps_fp8_inputs and not shape.sequence_parallel
    again = 0 if is_ready else whole_operand_bytes(shape)
    if shape.stack.keeps_gathered_inputs:
        again = copies_bytes(shape, width)
    weights = weight_copies_bytes(shape, outputs, width)
    return again + copies_bytes(shape, outputs) + weights


def row_forward_bytes(shape: BlockShape, inputs: int) -> int:
    """Return what a row-parallel product takes beside its input of *inputs* features."""
    weights = weight_copies_bytes(shape, shape.model.hidden_size, inputs)
    return copies_bytes(shape, inputs) + weights


def column_forward_bytes(shape: BlockShape, outputs: int) -> int:
    """Return what a column-parallel product takes beside its input and its *outputs*."""
    weights = weight_copies_bytes(shape, outputs, shape.model.hidden_size)
    return whole_operand_bytes(shape) + weights
