"""Memory of overlapped forward and backward passes of two microbatches, layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from meshwright.simulator.graph import BlockMemory, Size, larger
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EMBEDDING, FINAL_NORM, HEAD, PREDICTIONS, BlockKind


def overlapped_pass_bytes(
    blocks: Mapping[BlockKind, BlockMemory[Any]], forward: Stage, backward: Stage
) -> Size:
    """Return the most that two overlapped passes add to the tensors kept before them.

    The forward pass saves a layer's activations while the backward pass, from the other end, frees
    another's: both share one stream, so that at a time the larger of their workspaces is live. The
    head's loss comes after the last layer of the forward pass, its gradient before those of the
    backward pass (`TransformerModelChunkSchedulePlan.run`,
    megatron/core/models/common/model_chunk_schedule_plan.py of core 0.16).

    Args:
        blocks: Sizes of a block of each kind.
        forward: Virtual stage of the forward pass.
        backward: Virtual stage of the backward pass, whose activations are all saved by then.
    """
    # Of the sizes' type: a number, or a column over shapes.
    nothing: Size = blocks[forward.blocks[0].kind].saved * 0
    most = live = nothing
    for forward_kinds, backward_kinds in _overlapped_blocks(forward, backward):
        workspace = nothing
        for kind in forward_kinds:
            live = live + blocks[kind].saved
            workspace = larger(workspace, blocks[kind].forward)
        # Freed only now: a layer's activations live until its backward is over.
        for kind in backward_kinds:
            workspace = larger(workspace, blocks[kind].backward)
        most = larger(most, live + workspace)
        for kind in backward_kinds:
            live = live - blocks[kind].saved
    return most


def _overlapped_blocks(
    forward: Stage, backward: Stage
) -> Iterator[tuple[Sequence[BlockKind], Sequence[BlockKind]]]:
    """Yield the blocks that overlap: of the forward pass, and of the backward pass."""
    if forward.has_embedding:
        yield (EMBEDDING,), ()
    # Ends of the model run alone: nothing is scheduled over them.
    if backward.has_head:
        yield (), (HEAD,)
    if backward.has_predictions:
        yield (), (PREDICTIONS,)
    if backward.has_norm:
        yield (), (FINAL_NORM,)
    stages = forward, backward
    forward_layers, backward_layers = (
        [kind for kind, n in each.layers for _ in range(n)] for each in stages
    )
    # The longer pass goes on alone when the other has run all its layers.
    for forward_kind, backward_kind in zip_longest(forward_layers, reversed(backward_layers)):
        yield tuple(filter(None, (forward_kind,))), tuple(filter(None, (backward_kind,)))
    if forward.has_norm:
        yield (FINAL_NORM,), ()
    if forward.has_predictions:
        yield (PREDICTIONS,), ()
    if forward.has_head:
        yield (HEAD,), ()
    if backward.has_embedding:
        yield (), (EMBEDDING,)
