"""What PyTorch's pipeline stages keep of what they hand on, and buffers of messages."""

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import Size


def kept_logits_bytes(shape: BlockShape) -> int:
    """Return the logits as the last stage's output, where that lives until backward."""
    return shape.num_logits * shape.element_bytes if shape.keeps_outputs else 0


def kept_output_bytes(shape: BlockShape, messages: tuple[Size, Size]) -> Size:
    """Return what a stage keeps beyond its blocks.

    Where outputs live until backward, the output it hands on is one tensor more; the input of its
    first layer, as large as the gradient that goes back, is a message's buffer, which counts as
    such (`message_buffer_bytes`).
    """
    output, gradient = messages
    return output - gradient if shape.keeps_outputs else 0


def message_buffer_bytes(shape: BlockShape, messages: tuple[Size, Size]) -> Size:
    """Return the buffers of a microbatch's messages that live throughout the step.

    PyTorch's PipelineStage makes one for each microbatch: for activations but on the first
    stage, for gradients but on the last.
    """
    return sum(messages) if shape.keeps_outputs else 0
