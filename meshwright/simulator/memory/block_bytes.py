"""What blocks of one shape keep and need, kind by kind, and what that makes of a stage's passes."""

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.liveness import (
    SavedTensor,
    Step,
    cached_layer_bytes,
    embedding_backward_steps,
    fullest_arrival,
    head_backward_steps,
    head_workspace_bytes,
    highest,
    layer_tensors,
    layer_workspace_bytes,
    logits_tensor,
    saved_embedding_bytes,
    saved_head_bytes,
    saved_layer_bytes,
    saved_tensors,
    waiting_table_bytes,
    whole_backward_steps,
)
from meshwright.simulator.model import EMBEDDING, HEAD, TRANSFORMER_LAYER, BlockKind


class Addable(Protocol):
    """A number of bytes, or a column of them."""

    def __add__(self, other: Self, /) -> Self:
        """Return the sum."""
        ...

    def __sub__(self, other: Self, /) -> Self:
        """Return the difference."""
        ...

    def __mul__(self, other: int, /) -> Self:
        """Return so many of them."""
        ...


Size = TypeVar("Size", bound=Addable)


class BlockBytes(NamedTuple, Generic[Size]):
    """Bytes of a block, or columns of them over several shapes.

    Args:
        saved: Kept until its backward.
        cached: Left of it until the forward pass is over.
        waiting: What its backward makes and the embedding's backward takes, if both are on one
            stage.
        forward: What its forward needs beside what is kept.
        backward: The same of its backward.
    """

    saved: Size
    cached: Size
    waiting: Size
    forward: Size
    backward: Size


def _embedding_bytes(shape: BlockShape) -> BlockBytes[int]:
    # Its forward comes when nothing else is kept: it is never the fullest.
    backward = highest(embedding_backward_steps(shape))
    return BlockBytes(saved_embedding_bytes(shape), 0, 0, forward=0, backward=backward)


def _layer_bytes(shape: BlockShape) -> BlockBytes[int]:
    cached = cached_layer_bytes(shape)
    return BlockBytes(saved_layer_bytes(shape), cached, 0, *layer_workspace_bytes(shape))


def _head_bytes(shape: BlockShape) -> BlockBytes[int]:
    waiting = waiting_table_bytes(shape)
    return BlockBytes(saved_head_bytes(shape), 0, waiting, *head_workspace_bytes(shape))


class BlockMemory(NamedTuple):
    """What is known of the memory of a kind of block.

    Args:
        block_bytes: What a block keeps and needs.
        backward_steps: What lives for a moment in its backward, step by step.
        saved_tensors: What of note it keeps until then.
        read_tensors: What of note its backward reads, also what is recomputed.
    """

    block_bytes: Callable[[BlockShape], BlockBytes[int]]
    backward_steps: Callable[[BlockShape], tuple[Step, ...]]
    saved_tensors: Callable[[BlockShape], tuple[SavedTensor, ...]]
    read_tensors: Callable[[BlockShape], tuple[SavedTensor, ...]]


def _no_tensors(_shape: BlockShape) -> tuple[SavedTensor, ...]:
    return ()


def _logits(shape: BlockShape) -> tuple[SavedTensor, ...]:
    return (logits_tensor(shape),)


BLOCK_MEMORY: dict[BlockKind, BlockMemory] = {
    EMBEDDING: BlockMemory(_embedding_bytes, embedding_backward_steps, _no_tensors, _no_tensors),
    TRANSFORMER_LAYER: BlockMemory(
        _layer_bytes, whole_backward_steps, saved_tensors, layer_tensors
    ),
    HEAD: BlockMemory(_head_bytes, head_backward_steps, _logits, _logits),
}


def block_bytes(shape: BlockShape) -> dict[BlockKind, BlockBytes[int]]:
    """Return the bytes of a block of each kind of the model."""
    return {kind: BLOCK_MEMORY[kind].block_bytes(shape) for kind in shape.parameters}


def arrival_bytes(shape: BlockShape, kind: BlockKind) -> int:
    """Return the most that the backward of a block needs when a gradient of its weights is there.

    That is beside what is kept, as `BlockBytes.backward`.
    """
    return fullest_arrival(BLOCK_MEMORY[kind].backward_steps(shape))


def pass_workspace_bytes(
    blocks: Mapping[BlockKind, BlockBytes[Size]], stage: Stage, most: Callable[[Size, Size], Size]
) -> tuple[Size, Size]:
    """Return what one pass through a virtual stage needs beside all that it keeps.

    That is the most, over its blocks, of what one needs less what those behind it keep: in forward
    they do not keep it yet, in backward no more.

    Args:
        blocks: Sizes of a block of each kind.
        stage: What it holds.
        most: Returns the larger of two sizes: `max`, or `numpy.maximum` for columns.

    Returns:
        Bytes of the forward and of the backward pass, each beyond the sum of the tensors that
        wait for backward; 0 where those are the most.
    """
    nothing = blocks[stage.blocks[0].kind].saved * 0
    forward = backward = kept_behind = waiting = cached = nothing
    for kind, count in stage.blocks:
        cached = cached + blocks[kind].cached * count
    for kind, count in reversed(stage.blocks):
        block = blocks[kind]
        # Of equal blocks the last one's pass is the fullest; its own casts are in what it needs.
        forward = most(forward, block.forward + cached - block.cached - kept_behind)
        backward = most(backward, block.backward + waiting - kept_behind)
        cached = cached - block.cached * count
        kept_behind = kept_behind + block.saved * count
        if stage.has_embedding:
            waiting = waiting + block.waiting * count
    return forward, backward
