"""What passes hold of Megatron-FSDP's buckets, block by block."""

from collections.abc import Mapping

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import BlockBytes, PresentBytes, StateBytes
from meshwright.simulator.model import HEAD, BlockKind
from meshwright.simulator.replication.flat_units import flat_walk

Blocks = Mapping[BlockKind, BlockBytes[int]]


def flat_pass_bytes(
    shape: BlockShape, stage: Stage, blocks: Blocks, state: StateBytes, num_ranks: int
) -> tuple[int, int]:
    """Return what forward and backward need beside all that a pass keeps.

    As `pass_workspace_bytes`, with the buckets that live at each block.

    Args:
        shape: Of the blocks.
        stage: The whole model.
        blocks: Sizes of a block of each kind.
        state: Bytes of an element.
        num_ranks: That share a bucket.
    """
    walk = flat_walk(shape, stage, num_ranks)
    kinds = [kind for kind, count in stage.passes for _ in range(count)]
    nothing = (0,) * len(kinds)
    present = PresentBytes.of(blocks, stage) or PresentBytes(nothing, nothing)
    moments = zip(kinds, walk.forward, walk.backward, walk.gradients, *present, strict=True)
    forward = backward = kept_behind = waiting = 0
    cached = sum(blocks[kind].cached for kind in kinds)
    for kind, before, after, gradients, there, back in reversed([*moments]):
        block = blocks[kind]
        own = block.forward + there + cached - block.cached - kept_behind
        forward = max(forward, own + before * state.gathered_parameter)
        made = state.gradient * gradients
        level = block.backward + made
        if kind == HEAD:
            # The loss is done when the first bucket is made, beside the gradient of the logits.
            logits = shape.num_logits * shape.element_bytes
            level = max(block.backward, block.arrival + logits + made)
        level += back + waiting - kept_behind + after * state.gathered_parameter
        backward = max(backward, level)
        cached -= block.cached
        kept_behind += block.saved
        waiting += block.waiting
    return forward, backward
