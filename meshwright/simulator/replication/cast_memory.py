"""What lives while a bucket of gradients is in the format in which it is reduced."""

from collections.abc import Callable, Iterator

from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import kept_logits_bytes, waiting_table_bytes
from meshwright.simulator.replication.buckets import StagePart


def bucket_cast_bytes(
    table: BlockTable,
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
        table: What blocks hold.
        shape: Sizes of the blocks.
        stage: Whose pass.
        parts: Its blocks by the buckets that they complete, in model order.
        cast_bytes: Bytes of the copy of so many gradients.
    """
    levels = zip(parts, _levels(table, shape, stage, parts), strict=True)
    return max(level + max(map(cast_bytes, part.buckets)) for part, level in levels)


def _levels(
    table: BlockTable, shape: BlockShape, stage: Stage, parts: tuple[StagePart, ...]
) -> Iterator[int]:
    """Yield what lives, beside what was kept, in the first block of each part, its last to run."""
    embedding, layer, of_head = (
        table.memory(shape, kind) for kind in ("embedding", "layer", "head")
    )
    head = of_head.saved + kept_logits_bytes(shape) if stage.has_head else 0
    is_whole = stage.has_embedding and stage.has_head
    waiting = waiting_table_bytes(shape) if is_whole else 0
    saved = layer.saved
    above = stage.num_layers
    for part in parts:
        if part.stage.has_embedding:
            freed = stage.num_layers * saved + head
            yield embedding.arrival - freed
        elif part.stage.num_layers:
            # When the part's first layer runs, all layers behind it have freed theirs.
            freed = (above - 1) * saved + head
            yield layer.arrival + waiting - freed
        else:
            yield of_head.arrival
        above -= part.stage.num_layers
