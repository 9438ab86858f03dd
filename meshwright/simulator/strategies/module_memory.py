"""Memory of a torch.nn.DataParallel replica in a pass: saved activations and workspaces.

A replica's gradients are those of weight copies: they stay until all of them are computed (PyTorch,
torch/nn/parallel/_functions.py: `Broadcast` is one node of the graph, its backward one reduction).
"""

from meshwright.simulator.blocks import OUTPUT, BlockShape, BlockTable, BorderGradients
from meshwright.simulator.model import EMBEDDING

STAYS = BorderGradients(keeps_gradients=True)


def saved_bytes(table: BlockTable, shape: BlockShape) -> int:
    """Return the activations saved by a replica's blocks, head included, without the loss."""
    ends = table.memory(shape, EMBEDDING).saved + table.memory(shape, OUTPUT).saved
    layers = shape.trained.layer_runs
    return ends + sum(count * table.memory(shape, kind).saved for kind, count in layers)


def forward_workspace_bytes(table: BlockTable, shape: BlockShape) -> int:
    """Return the forward workspace beyond saved activations: in the last layer, or of logits."""
    output = table.memory(shape, OUTPUT)
    most, saved_behind = output.forward, output.saved
    for kind, count in reversed(shape.trained.layer_runs):
        layer = table.memory(shape, kind)
        # Layers behind have not saved their activations yet.
        most = max(most, layer.forward - saved_behind)
        saved_behind += count * layer.saved
    return most


def backward_workspace_bytes(table: BlockTable, shape: BlockShape, slope_bytes: int) -> int:
    """Return the backward workspace beyond saved activations, all gradients included.

    Args:
        table: Memory of blocks.
        shape: Sizes of the blocks.
        slope_bytes: Gradient of the logits as it arrives.
    """
    output = table.memory(shape, OUTPUT, STAYS._replace(output_gradient_bytes=slope_bytes))
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
