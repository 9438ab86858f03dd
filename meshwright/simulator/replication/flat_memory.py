"""What passes hold of Megatron-FSDP's buckets, block by block, and shards of weights in 8 bits."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from meshwright.hwprofiles import Precision
from meshwright.simulator.blocks import (
    BlockShape,
    num_linear_weights,
    step_cast_bytes,
    weight_copy_bytes,
)
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import BlockMemory, PresentBytes, StateBytes
from meshwright.simulator.model import HEAD, BlockKind, BlockRun, is_expert, is_linear, rank_tensors
from meshwright.simulator.replication.data_parallel import Replication, blocks_of
from meshwright.simulator.replication.flat_units import flat_walk

SCALE_TILE = 128, 4  # scales in MXFP8 of so many rows, and of so many along one
Blocks = Mapping[BlockKind, BlockMemory[int]]


def flat_pass_bytes(
    shape: BlockShape, stage: Stage, blocks: Blocks, state: StateBytes, sharing: tuple[int, int]
) -> tuple[int, int]:
    """Return what forward and backward need beside all that a pass keeps.

    As `pass_workspace_bytes`, with the buckets that live at each block.

    Args:
        shape: Of the blocks.
        stage: The whole model.
        blocks: Sizes of a block of each kind.
        state: Bytes of an element.
        sharing: Ranks that share a bucket, and all that reduce its gradients.
    """
    walk = flat_walk(shape, stage, *sharing)
    pool = walk.kept_gradients * state.gradient
    kinds = [kind for kind, count in stage.passes for _ in range(count)]
    nothing = (0,) * len(kinds)
    present = PresentBytes.of(blocks, stage) or PresentBytes(nothing, nothing)
    moments = zip(kinds, walk.forward, walk.backward, walk.gradients, *present, strict=True)
    forward = backward = kept_behind = waiting = 0
    cached = sum(blocks[kind].cached for kind in kinds)
    for kind, before, after, gradients, there, back in reversed([*moments]):
        block = blocks[kind]
        own = block.forward + there + cached - block.cached - kept_behind
        forward = max(forward, own + before + pool)
        made = state.gradient * gradients
        level = block.backward + made
        if kind == HEAD:
            # The loss is done when the first bucket is made, beside the gradient of the logits.
            logits = shape.num_logits * shape.element_bytes
            level = max(block.backward, block.arrival + logits + made)
        level += back + waiting - kept_behind + after
        backward = max(backward, level)
        cached -= block.cached
        kept_behind += block.saved
        waiting += block.waiting
    return forward, backward


def narrow_shard_bytes(
    shape: BlockShape, blocks: Iterable[BlockRun], shards: int, expert_shards: int
) -> int:
    """Return what shards of weights in 8 bits take beyond others, and copies that are not split.

    That is in the place of `weight_copy_bytes`.  A weight has one byte, in MXFP8 two, of which each
    has scales on every rank: they are found by all (Megatron-FSDP of core 0.16.1 splits the data
    alone).

    Args:
        shape: Of the blocks.
        blocks: All of the model.
        shards: Ranks that share weights.
        expert_shards: Ranks that share routed experts.
    """
    runs, recipe = [*blocks], shape.recipe
    if recipe is None or not recipe.holds_parameters:
        return 0
    scaled, copies = recipe.scaled_elements, 2 if recipe.scaled_elements else 1
    every, of_head, of_experts = num_linear_weights(shape), 0, 0
    for tensor in rank_tensors(shape.trained, shape.tp, shape.stack.vocabulary_multiple):
        if is_expert(tensor) and is_linear(tensor):
            count = dict(runs).get(tensor.block, 0)
            of_experts += count * prod(shape.local_shape(tensor))
    of_head = every.pop(HEAD, 0)
    most = sum(count * every[kind] for kind, count in runs) - of_experts
    held = (copies - shape.element_bytes) * (-(-most // shards) - (-of_experts // expert_shards))
    held += recipe.weight_copy_bytes * of_head
    scales = copies * (most + of_experts + of_head) // scaled if scaled else 0
    return held + scales - weight_copy_bytes(shape, runs)


def updated_cast_bytes(shape: BlockShape, stages: Sequence[Stage], replication: Replication) -> int:
    """Return the traffic of casting weights to 8 bits after an update: of flat units a shard's."""
    whole = step_cast_bytes(shape, blocks_of(stages))
    if not replication.has_flat_units or shape.recipe is None or not shape.recipe.holds_parameters:
        return whole
    return -(-whole // replication.shards.parameters)


def scale_bytes(shape: BlockShape, stages: Sequence[Stage]) -> tuple[int, int]:
    """Return the bytes of largest values by which ranks find scales together: of most, of experts.

    Of a tensor one number in fp32, in MXFP8 one in bf16 for each scale of both copies, which fill
    tiles (`cast_master_weights_to_fp8` and `MXFP8Quantizer` of Transformer Engine 2.11, pytorch/
    tensor/utils.py and mxfp8_tensor.py).
    """
    recipe, found = shape.recipe, [0, 0]
    if recipe is None or not recipe.holds_parameters:
        return 0, 0
    counts: Counter[BlockKind] = Counter()
    for kind, count in blocks_of(stages):
        counts[kind] += count
    for tensor in rank_tensors(shape.trained, shape.tp, shape.stack.vocabulary_multiple):
        if not is_linear(tensor):
            continue
        *experts, rows, width = shape.local_shape(tensor)
        each = Precision.FP32.num_bytes
        if recipe.scaled_elements:
            tile_rows, tile_width = SCALE_TILE
            num_tiles = sum(
                -(-outer // tile_rows) * -(-inner // (tile_width * recipe.scaled_elements))
                for outer, inner in ((rows, width), (width, rows))
            )
            each = Precision.BF16.num_bytes * tile_rows * tile_width * num_tiles
        found[is_expert(tensor)] += counts[tensor.block] * prod(experts) * each
    return found[0], found[1]
