"""What a replica of a module keeps, and holds for a moment, in a pass through all of it.

Gradients of a replica are those of copies of the weights: they stay until all of them are there
(PyTorch, torch/nn/parallel/_functions.py: `Broadcast` is one node of the graph, its backward one
reduction).
"""

from meshwright.simulator.blocks import OUTPUT, BlockShape, BlockTable, Ending
from meshwright.simulator.model import EMBEDDING

STAYS = Ending(keeps_gradients=True)


def saved_bytes(table: BlockTable, shape: BlockShape) -> int:
    """Return what backward needs of a replica's blocks, head included; the loss is elsewhere."""
    ends = table.memory(shape, EMBEDDING).saved + table.memory(shape, OUTPUT).saved
    layers = shape.trained.layer_runs
    return ends + sum(count * table.memory(shape, kind).saved for kind, count in layers)


def forward_workspace_bytes(table: BlockTable, shape: BlockShape) -> int:
    """Return what forward needs beside what it keeps: in the last layer, or for the logits."""
    output = table.memory(shape, OUTPUT)
    most, kept_behind = output.forward, output.saved
    for kind, count in reversed(shape.trained.layer_runs):
        layer = table.memory(shape, kind)
        most = max(most, layer.forward - kept_behind)
        kept_behind += count * layer.saved
    return most


def backward_workspace_bytes(table: BlockTable, shape: BlockShape, slope_bytes: int) -> int:
    """Return the most that backward holds beside what forward kept, all gradients included.

    Args:
        table: What blocks hold.
        shape: Sizes of the blocks.
        slope_bytes: The gradient of the logits, as it came.
    """
    output = table.memory(shape, OUTPUT, STAYS._replace(arriving_bytes=slope_bytes))
    embedding = table.memory(shape, EMBEDDING, STAYS)
    level = output.left - output.saved
    most = output.backward
    for kind, count in reversed(shape.trained.layer_runs):
        layer = table.memory(shape, kind, STAYS)
        for _ in range(count):
            # A block's own gradient that arrives is what the one behind it has left.
            level -= layer.sent
            most = max(most, level + layer.backward)
            level += layer.left - layer.saved
    return max(most, level - embedding.sent + embedding.backward)
