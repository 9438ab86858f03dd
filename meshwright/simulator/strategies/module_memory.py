"""What a replica of a module keeps, and holds for a moment, in a pass through all of it.

Gradients of a replica are those of copies of the weights: they stay until all of them are there
(PyTorch, torch/nn/parallel/_functions.py: `Broadcast` is one node of the graph, its backward one
reduction).
"""

from meshwright.simulator.blocks import BlockShape, BlockTable, Ending, num_linear_weights

STAYS = Ending(keeps_gradients=True)


def saved_bytes(table: BlockTable, shape: BlockShape) -> int:
    """Return what backward needs of a replica's blocks, head included; the loss is elsewhere."""
    embedding, layer, output = (
        table.memory(shape, kind).saved for kind in ("embedding", "layer", "output")
    )
    return embedding + shape.model.num_layers * layer + output


def forward_workspace_bytes(table: BlockTable, shape: BlockShape) -> int:
    """Return what forward needs beside what it keeps: in the last layer, or for the logits."""
    layer, output = table.memory(shape, "layer"), table.memory(shape, "output")
    return max(layer.forward - output.saved, output.forward)


def backward_workspace_bytes(table: BlockTable, shape: BlockShape, slope_bytes: int) -> int:
    """Return the most that backward holds beside what forward kept, all gradients included.

    Args:
        table: What blocks hold.
        shape: Sizes of the blocks.
        slope_bytes: The gradient of the logits, as it came.
    """
    output = table.memory(shape, "output", STAYS._replace(arriving_bytes=slope_bytes))
    layer, embedding = (table.memory(shape, kind, STAYS) for kind in ("layer", "embedding"))
    # Biases and norms, whose gradients stay, too, do not count in a block.
    vectors = (shape.parameters.layer - num_linear_weights(shape)) * shape.residual_bytes
    level = output.left - output.saved
    most = output.backward
    for _ in range(shape.model.num_layers):
        # A block's own gradient that arrives is what the one behind it has left.
        level -= shape.message_bytes
        most = max(most, level + layer.backward)
        level += layer.left - layer.saved + vectors
    return max(most, level - shape.message_bytes + embedding.backward)
