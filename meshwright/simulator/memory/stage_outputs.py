"""What PyTorch's pipeline stages keep of what they hand on, and buffers of messages."""

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import NUMBER_BYTES, Size, several


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


def batch_bytes(num_tokens: Size, cp: Size) -> Size:
    """Return the ids and targets of a microbatch that a rank of PyTorch's pipelines holds.

    A schedule cuts the batch of a whole step, which every stage has (`Trainer.train_step` of
    torchtitan 0.2.2 moves it to the device), and its own tokens beside where others have the rest.

    Args:
        num_tokens: Those of the rank in a microbatch.
        cp: Context-parallel ranks.
    """
    return 2 * NUMBER_BYTES * num_tokens * (1 + cp * several(cp))
