"""What blocks of one shape keep and need, taken once, and what that makes of a stage's passes."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.liveness import (
    cached_layer_bytes,
    embedding_backward_steps,
    head_workspace_bytes,
    highest,
    layer_workspace_bytes,
    saved_embedding_bytes,
    saved_head_bytes,
    saved_layer_bytes,
    waiting_table_bytes,
)


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
    """Bytes of the blocks of one shape, or columns of them over several.

    Args:
        saved_layer: Kept by one layer until its backward.
        saved_embedding: Kept by the embedding.
        saved_head: Kept by the head.
        cached_layer: Left of a layer until the forward pass is over.
        waiting_table: The head's gradient of a tied table.
        layer_forward: What a layer's forward needs beside what is kept.
        layer_backward: The same of its backward.
        head_forward: The same of the head's forward.
        head_backward: The same of the head's backward.
        embedding_backward: The same of the embedding's backward.
    """

    saved_layer: Size
    saved_embedding: Size
    saved_head: Size
    cached_layer: Size
    waiting_table: Size
    layer_forward: Size
    layer_backward: Size
    head_forward: Size
    head_backward: Size
    embedding_backward: Size


def block_bytes(shape: BlockShape) -> BlockBytes[int]:
    """Return the bytes of blocks of *shape*."""
    return BlockBytes(
        saved_layer_bytes(shape),
        saved_embedding_bytes(shape),
        saved_head_bytes(shape),
        cached_layer_bytes(shape),
        waiting_table_bytes(shape),
        *layer_workspace_bytes(shape),
        *head_workspace_bytes(shape),
        highest(embedding_backward_steps(shape)),
    )


def pass_workspace_bytes(
    blocks: BlockBytes[Size], stage: Stage, most: Callable[[Size, Size], Size]
) -> tuple[Size, Size]:
    """Return what one pass through a virtual stage needs beside all that it keeps.

    Args:
        blocks: Sizes of its blocks.
        stage: What it holds.
        most: Returns the larger of two sizes: `max`, or `numpy.maximum` for columns.

    Returns:
        Bytes of the forward and of the backward pass, each beyond the sum of the tensors that
        wait for backward; 0 where those are the most.
    """
    nothing = blocks.saved_layer * 0
    # While layers run the head keeps nothing: in forward not yet, in backward no more.
    head = blocks.saved_head if stage.has_head else nothing
    waiting = blocks.waiting_table if stage.has_embedding and stage.has_head else nothing
    forward = backward = nothing
    if stage.num_layers:
        # The last layer's own casts are in its steps.
        forward = blocks.layer_forward - head + blocks.cached_layer * (stage.num_layers - 1)
        backward = blocks.layer_backward - head + waiting
    if stage.has_head:
        forward = most(forward, blocks.head_forward + blocks.cached_layer * stage.num_layers)
        backward = most(backward, blocks.head_backward)
    if stage.has_embedding:
        # The embedding comes last: all that layers and head kept is gone by then.
        freed = blocks.saved_layer * stage.num_layers + head
        backward = most(backward, blocks.embedding_backward + waiting - freed)
    return most(nothing, forward), most(nothing, backward)
