"""What lives while a bucket of gradients is in the format in which it is reduced."""

from collections.abc import Callable, Iterator, Mapping

from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import FULLNESS, BlockMemory, LateGradients, PassPeak
from meshwright.simulator.model import EMBEDDING, BlockKind
from meshwright.simulator.replication.parts import StagePart


def bucket_cast_peak(
    blocks: Mapping[BlockKind, BlockMemory[int]],
    stage: Stage,
    parts: tuple[StagePart, ...],
    cast_bytes: Callable[[int], int],
    late: LateGradients | None = None,
) -> PassPeak[int]:
    """Return the fullest moment of a backward pass, beside what is kept, in which a bucket is cast.

    A bucket is cast once its last gradient has come, when the loss is long done, and its copy
    goes when it has been reduced and cast back (PyTorch, torch/distributed/algorithms/
    ddp_comm_hooks/default_hooks.py, `_compress_hook`).  It is counted alone, where it is made:
    copies that a slow network keeps waiting come on top.

    Args:
        blocks: Sizes of a block of each kind.
        stage: Whose pass.
        parts: Its blocks by the buckets that they complete, in model order.
        cast_bytes: Bytes of the copy of so many gradients.
        late: Where the pass makes the gradients, in the place of *blocks*.
    """
    sizes = blocks if late is None else late.blocks
    absent = 0 if late is None else late.total_bytes(stage)
    peak = PassPeak(0, absent)
    for part, level in zip(reversed(parts), _levels(sizes, stage, parts), strict=True):
        behind = part.stage.part(1, part.stage.num_blocks)
        made = 0 if late is None else late.total_bytes(behind)
        here = PassPeak(level + max(map(cast_bytes, part.all_buckets)), absent - made)
        peak = max(peak, here, key=FULLNESS)
        absent -= 0 if late is None else late.total_bytes(part.stage)
    return peak


def _levels(
    blocks: Mapping[BlockKind, BlockMemory[int]], stage: Stage, parts: tuple[StagePart, ...]
) -> Iterator[int]:
    """Yield what lives, beside what was kept, in the first block of each part, its last to run.

    The last part comes first.
    """
    freed = waiting = 0
    for part in reversed(parts):
        for kind, count in part.stage.passes:
            freed += count * blocks[kind].saved
            waiting += count * blocks[kind].waiting if stage.has_embedding else 0
        first = part.stage.passes[0].kind
        # All blocks behind that one have freed theirs.
        level = blocks[first].arrival - (freed - blocks[first].saved)
        # The embedding's gradient of a tied table is added to the one that waits, in place.
        yield level if first == EMBEDDING else level + waiting - blocks[first].waiting
