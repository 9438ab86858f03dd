"""What a rank holds while two microbatches run beside each other, layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from meshwright.simulator.graph import BlockMemory, Size, larger
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EMBEDDING, FINAL_NORM, HEAD, PREDICTIONS, BlockKind


def pair_bytes(
    blocks: Mapping[BlockKind, BlockMemory[Any]], forward: Stage, backward: Stage
) -> Size:
    """Return the most that two passes beside each other add to what was kept before them.

    What a layer of the forward pass keeps comes while the backward pass goes through as many layers
    from the other end, and frees what they kept: the two of a turn share one stream, so that the
    larger of what both need beside is there at a time.  The head's loss comes after the last layer
    of the forward pass, its gradient before those of the backward pass (`TransformerModelChunk-
    SchedulePlan.run`, megatron/core/models/common/model_chunk_schedule_plan.py of core 0.16).

    Args:
        blocks: Sizes of a block of each kind.
        forward: Virtual stage of the forward pass.
        backward: That of the backward pass, all of whose kept tensors were there before.
    """
    nothing: Size = blocks[forward.blocks[0].kind].saved * 0
    most = live = nothing
    for made, gone in _turns(forward, backward):
        needed = nothing
        for kind in made:
            live = live + blocks[kind].saved
            needed = larger(needed, blocks[kind].forward)
        for kind in gone:
            needed = larger(needed, blocks[kind].backward)
        most = larger(most, live + needed)
        for kind in gone:
            live = live - blocks[kind].saved
    return most


def _turns(
    forward: Stage, backward: Stage
) -> Iterator[tuple[Sequence[BlockKind], Sequence[BlockKind]]]:
    """Yield the blocks that run beside each other: of the forward pass, and of the backward."""
    if forward.has_embedding:
        yield (EMBEDDING,), ()
    if backward.has_head:
        yield (), (HEAD,)
    if backward.has_predictions:
        yield (), (PREDICTIONS,)
    if backward.has_norm:
        yield (), (FINAL_NORM,)
    stages = forward, backward
    ahead, back = ([kind for kind, n in each.layers for _ in range(n)] for each in stages)
    for made, gone in zip_longest(ahead, reversed(back)):
        yield tuple(filter(None, (made,))), tuple(filter(None, (gone,)))
    if forward.has_norm:
        yield (FINAL_NORM,), ()
    if forward.has_predictions:
        yield (PREDICTIONS,), ()
    if forward.has_head:
        yield (HEAD,), ()
    if backward.has_embedding:
        yield (), (EMBEDDING,)
