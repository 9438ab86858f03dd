"""What lives while a bucket of gradients is in the format in which it is reduced."""

from collections.abc import Callable, Iterator

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.liveness import (
    embedding_backward_steps,
    fullest_arrival,
    head_backward_steps,
    saved_head_bytes,
    saved_layer_bytes,
    waiting_table_bytes,
    whole_backward_steps,
)
from meshwright.simulator.replication.buckets import StagePart
from meshwright.simulator.replication.data_parallel import Stage


def bucket_cast_bytes(
    shape: BlockShape,
    stage: Stage,
    parts: tuple[StagePart, ...],
    cast_bytes: Callable[[int], int],
) -> int:
    """Return the most that a backward pass needs beside what is kept, whenever a bucket is cast.

    A bucket is cast once its last gradient has come, when the loss is long done, and its copy
    goes when it has been reduced and cast back (PyTorch, torch/distributed/algorithms/
    ddp_comm_hooks/default_hooks.py, `_compress_hook`).  It is counted alone, where it is made:
    copies that a slow network keeps waiting come on top.

    Args:
        shape: Sizes of the blocks.
        stage: Whose pass.
        parts: Its blocks by the buckets that they complete, in model order.
        cast_bytes: Bytes of the copy of so many gradients.
    """
    levels = zip(parts, _levels(shape, stage, parts), strict=True)
    return max(level + max(map(cast_bytes, part.buckets)) for part, level in levels)


def _levels(shape: BlockShape, stage: Stage, parts: tuple[StagePart, ...]) -> Iterator[int]:
    """Yield what lives, beside what was kept, in the first block of each part, its last to run."""
    head = saved_head_bytes(shape) if stage.has_head else 0
    is_whole = stage.has_embedding and stage.has_head
    waiting = waiting_table_bytes(shape) if is_whole else 0
    saved = saved_layer_bytes(shape)
    above = stage.num_layers
    for part in parts:
        if part.stage.has_embedding:
            freed = stage.num_layers * saved + head
            yield fullest_arrival(embedding_backward_steps(shape)) - freed
        elif part.stage.num_layers:
            freed = (above - 1) * saved + head
            yield fullest_arrival(whole_backward_steps(shape)) + waiting - freed
        else:
            yield fullest_arrival(head_backward_steps(shape))
        above -= part.stage.num_layers
