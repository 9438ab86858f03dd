"""What PyTorch's pipeline stages keep of what they hand on, and buffers of messages."""

from meshwright.simulator.blocks import BlockShape


def kept_logits_bytes(shape: BlockShape) -> int:
    """Return the logits as the last stage's output, where that lives until backward."""
    num_logits = shape.num_scored_tokens * shape.local_vocab_size
    return num_logits * shape.element_bytes if shape.keeps_outputs else 0


def kept_output_bytes(shape: BlockShape, *, has_embedding: bool, has_head: bool) -> int:
    """Return what a stage's own ends keep beyond its layers, where outputs live until backward.

    The output it hands on is one tensor more; the input of its first layer is a message's buffer,
    which counts as such (see `message_buffer_bytes`).
    """
    if not shape.keeps_outputs:
        return 0
    # A stage between the ends receives one tensor as large as the one it hands on.
    return (has_embedding - has_head) * shape.message_bytes


def message_buffer_bytes(shape: BlockShape, *, has_embedding: bool, has_head: bool) -> int:
    """Return the buffers of a microbatch's messages that live throughout the step.

    PyTorch's PipelineStage makes one for each microbatch: for activations but on the first
    stage, for gradients but on the last.
    """
    # An activation comes from the stage before, a gradient from the one after, where there is one.
    ends = (not has_embedding) + (not has_head)
    return ends * shape.message_bytes if shape.keeps_outputs else 0
