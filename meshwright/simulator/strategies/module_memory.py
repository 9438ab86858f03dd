"""What a replica of a module keeps, and holds for a moment, in a pass through all of it.

Gradients of a replica are those of copies of the weights: they stay until all of them are there
(PyTorch, torch/nn/parallel/_functions.py: `Broadcast` is one node of the graph, its backward one
reduction).
"""

from collections.abc import Iterator

from meshwright.simulator.blocks import BlockShape, num_linear_weights
from meshwright.simulator.layout import whole_model
from meshwright.simulator.liveness import (
    Step,
    embedding_backward_steps,
    head_forward_steps,
    highest,
    layer_workspace_bytes,
    logits_backward_steps,
    logits_tensor,
    saved_head_bytes,
    whole_backward_steps,
)
from meshwright.simulator.memory import block_bytes
from meshwright.simulator.model import EMBEDDING, TRANSFORMER_LAYER


def saved_bytes(shape: BlockShape) -> int:
    """Return what backward needs of a replica's blocks, head included; the loss is elsewhere."""
    blocks, whole = block_bytes(shape), whole_model(shape.model)
    saved = sum(count * blocks[kind].saved for kind, count in whole.blocks)
    return saved - logits_tensor(shape).size_bytes


def forward_workspace_bytes(shape: BlockShape) -> int:
    """Return what forward needs beside what it keeps: in the last layer, or for the logits."""
    head = saved_head_bytes(shape) - logits_tensor(shape).size_bytes
    until_logits = head_forward_steps(shape)[:2]
    return max(layer_workspace_bytes(shape)[0], highest(until_logits)) - head


def backward_workspace_bytes(shape: BlockShape, slope_bytes: int) -> int:
    """Return the most that backward holds beside what forward kept, all gradients included.

    Args:
        shape: Sizes of the blocks.
        slope_bytes: The gradient of the logits, as it came.
    """
    return highest(_backward_steps(shape, slope_bytes))


def _backward_steps(shape: BlockShape, slope_bytes: int) -> Iterator[Step]:
    """Yield the steps of the whole backward pass; gradients of weights stay."""
    element, model = shape.residual_bytes, shape.model
    table = shape.local_vocab_size * model.hidden_size
    yield Step("gradient of the logits", slope_bytes, 0)
    yield from logits_backward_steps(shape, slope_bytes, stays=True)
    _, *layer = whole_backward_steps(shape, keeps_weight_gradients=True)
    others = shape.parameters[TRANSFORMER_LAYER] - num_linear_weights(shape)
    for _ in range(model.num_layers):
        yield from layer
        yield Step("biases and norms", others * element, 0)
    yield Step("positions", (shape.parameters[EMBEDDING] - table) * element, 0)
    _, *embedding = embedding_backward_steps(shape)
    yield from embedding
