"""What a rank holds while two microbatches run beside each other, layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from meshwright.simulator.layout import Stage
from meshwright.simulator.memory.block_bytes import BlockBytes
from meshwright.simulator.model import EMBEDDING, HEAD, BlockKind

Blocks = Mapping[BlockKind, BlockBytes[int]]


def pair_bytes(blocks: Blocks, forward: Stage, backward: Stage) -> int:
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
    added = freed = most = 0
    for made, gone in _turns(forward, backward):
        kept = sum(blocks[kind].saved for kind in made)
        needed = [blocks[kind].forward for kind in made] + [blocks[kind].backward for kind in gone]
        most = max(most, added + kept - freed + max(needed, default=0))
        added += kept
        freed += sum(blocks[kind].saved for kind in gone)
    return most


def _turns(
    forward: Stage, backward: Stage
) -> Iterator[tuple[Sequence[BlockKind], Sequence[BlockKind]]]:
    """Yield the blocks that run beside each other: of the forward pass, and of the backward."""
    if forward.has_embedding:
        yield (EMBEDDING,), ()
    if backward.has_head:
        yield (), (HEAD,)
    stages = forward, backward
    ahead, back = ([kind for kind, n in each.layers for _ in range(n)] for each in stages)
    for made, gone in zip_longest(ahead, reversed(back)):
        yield tuple(filter(None, (made,))), tuple(filter(None, (gone,)))
    if forward.has_head:
        yield (HEAD,), ()
    if backward.has_embedding:
        yield (), (EMBEDDING,)
