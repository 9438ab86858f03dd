"""Memory of Megatron-FSDP's buckets in each block of a pass, and shards of 8-bit weights."""

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
from meshwright.simulator.memory import BlockMemory, ReloadedBytes, StateBytes
from meshwright.simulator.model import HEAD, BlockKind, BlockRun, is_expert, is_linear, rank_tensors
from meshwright.simulator.replication.data_parallel import Replication, blocks_of
from meshwright.simulator.replication.flat_units import flat_walk

SCALE_TILE = 128, 4  # scales in MXFP8 of so many rows, and of so many along one
Blocks = Mapping[BlockKind, BlockMemory[int]]


def flat_pass_bytes(
    shape: BlockShape, stage: Stage, blocks: Blocks, state: StateBytes, sharing: tuple[int, int]
) -> tuple[int, int]:
    """Return the bytes of forward and backward beyond all saved activations.

    As `pass_workspace_bytes`, with the buckets that are live at each block.

    Args:
        shape: Shape of the blocks.
        stage: The whole model.
        blocks: Sizes of a block of each kind.
        state: Bytes of an element.
        sharing: Ranks of a bucket's shard group, and all ranks that reduce its gradients.
    """
    walk = flat_walk(shape, stage, *sharing)
    pool = walk.kept_gradients * state.gradient
    kinds = [kind for kind, count in stage.passes for _ in range(count)]
    nothing = (0,) * len(kinds)
    present = ReloadedBytes.of(blocks, stage) or ReloadedBytes(nothing, nothing)
    per_block = zip(kinds, walk.forward, walk.backward, walk.gradients, *present, strict=True)
    forward = backward = saved_behind = tied_gradient = 0
    cached_casts = sum(blocks[kind].cached for kind in kinds)
    for (
        kind,
        gathered_forward,
        gathered_backward,
        gradients,
        present_forward,
        present_backward,
    ) in reversed([*per_block]):
        block = blocks[kind]
        workspace = block.forward + present_forward + cached_casts - block.cached - saved_behind
        # Reversed, so that activations of the blocks behind are known: forward has not saved them.
        forward = max(forward, workspace + gathered_forward + pool)
        gradient_bytes = state.gradient * gradients
        level = block.backward + gradient_bytes
        if kind == HEAD:
            # The loss is done when the first bucket is made, beside the gradient of the logits.
            logits = shape.num_logits * shape.element_bytes
            level = max(block.backward, block.arrival + logits + gradient_bytes)
        level += present_backward + tied_gradient - saved_behind + gathered_backward
        backward = max(backward, level)
        cached_casts -= block.cached
        saved_behind += block.saved
        tied_gradient += block.waiting
    return forward, backward


def narrow_shard_bytes(
    shape: BlockShape, blocks: Iterable[BlockRun], shards: int, expert_shards: int
) -> int:
    """Return the bytes of shards of 8-bit weights beyond other shards, with unsharded copies.

    In place of `weight_copy_bytes`. A weight has one byte, in MXFP8 two, of which each has scales
    on every rank: all ranks compute them (Megatron-FSDP of core 0.16.1 shards the data alone).

    Args:
        shape: Shape of the blocks.
        blocks: All blocks of the model.
        shards: Ranks of a shard group.
        expert_shards: Ranks of a shard group of routed experts.
    """
    runs, recipe = [*blocks], shape.recipe
    if recipe is None or not recipe.holds_parameters:
        return 0
    scaled, copies = recipe.scaled_elements, 2 if recipe.scaled_elements else 1
    num_weights, of_head, of_experts = num_linear_weights(shape), 0, 0
    for tensor in rank_tensors(shape.trained, shape.tp, shape.stack.vocabulary_multiple):
        if is_expert(tensor) and is_linear(tensor):
            count = dict(runs).get(tensor.block, 0)
            of_experts += count * prod(shape.local_shape(tensor))
    of_head = num_weights.pop(HEAD, 0)
    num_dense = sum(count * num_weights[kind] for kind, count in runs) - of_experts
    shard_bytes = (copies - shape.element_bytes) * (
        -(-num_dense // shards) - (-of_experts // expert_shards)
    )
    shard_bytes += recipe.weight_copy_bytes * of_head
    scales = copies * (num_dense + of_experts + of_head) // scaled if scaled else 0
    return shard_bytes + scales - weight_copy_bytes(shape, runs)


def updated_cast_bytes(shape: BlockShape, stages: Sequence[Stage], replication: Replication) -> int:
    """Return the traffic of casting weights to 8 bits after an update, of flat units a shard's."""
    whole = step_cast_bytes(shape, blocks_of(stages))
    if not replication.has_flat_units or shape.recipe is None or not shape.recipe.holds_parameters:
        return whole
    return -(-whole // replication.shards.parameters)


def scale_bytes(shape: BlockShape, stages: Sequence[Stage]) -> tuple[int, int]:
    """Return the bytes of the all-reduced maxima of 8-bit weights: of most, of experts.

    One fp32 number for a tensor, in MXFP8 one in bf16 for each scale of both copies, padded to
    tiles (`cast_master_weights_to_fp8` and `MXFP8Quantizer` of Transformer Engine 2.11,
    pytorch/tensor/utils.py and mxfp8_tensor.py).
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
            # One copy along rows, one along columns, each padded to whole tiles.
            num_tiles = sum(
                -(-outer // tile_rows) * -(-inner // (tile_width * recipe.scaled_elements))
                for outer, inner in ((rows, width), (width, rows))
            )
            each = Precision.BF16.num_bytes * tile_rows * tile_width * num_tiles
        found[is_expert(tensor)] += counts[tensor.block] * prod(experts) * each
    return found[0], found[1]
