"""Memory of a gradient bucket cast to the format in which it is reduced."""

from collections.abc import Callable, Iterator, Mapping

from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import PEAK_BYTES, BlockMemory, PassPeak, ReallocatedGradients
from meshwright.simulator.model import EMBEDDING, BlockKind
from meshwright.simulator.replication.parts import StagePart


def bucket_cast_peak(
    blocks: Mapping[BlockKind, BlockMemory[int]],
    stage: Stage,
    parts: tuple[StagePart, ...],
    cast_bytes: Callable[[int], int],
    late: ReallocatedGradients | None = None,
) -> PassPeak[int]:
    """Return the peak of a backward pass, beyond saved activations, while a bucket is cast.

    A bucket is cast once its last gradient has arrived, when the loss is long done, and its copy is
    freed when it has been reduced and cast back (PyTorch,
    torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py, `_compress_hook`). One copy is
    counted, in the block that completes its bucket: copies that wait for a slow network come on
    top.

    Args:
        blocks: Sizes of a block of each kind.
        stage: Stage of the pass.
        parts: Its blocks by the buckets that they complete, in model order.
        cast_bytes: Bytes of the copy of so many gradients.
        late: Sizes in place of *blocks* where the pass allocates the gradients.
    """
    sizes = blocks if late is None else late.blocks
    absent = 0 if late is None else late.total_bytes(stage)
    peak = PassPeak(0, absent)
    for part, level in zip(reversed(parts), _levels(sizes, stage, parts), strict=True):
        # Of a part all blocks but the first have their gradients when its buckets are complete.
        later_blocks = part.stage.part(1, part.stage.num_blocks)
        allocated = 0 if late is None else late.total_bytes(later_blocks)
        part_peak = PassPeak(level + max(map(cast_bytes, part.all_buckets)), absent - allocated)
        peak = max(peak, part_peak, key=PEAK_BYTES)
        absent -= 0 if late is None else late.total_bytes(part.stage)
    return peak


def _levels(
    blocks: Mapping[BlockKind, BlockMemory[int]], stage: Stage, parts: tuple[StagePart, ...]
) -> Iterator[int]:
    """Yield the live bytes, beyond saved ones, in the first block of each part, its last to run.

    The last part comes first.
    """
    freed = tied_gradient = 0
    for part in reversed(parts):
        for kind, count in part.stage.passes:
            # Backward runs the last part first: its activations are freed by then.
            freed += count * blocks[kind].saved
            tied_gradient += count * blocks[kind].waiting if stage.has_embedding else 0
        first = part.stage.passes[0].kind
        # All blocks behind that one have freed theirs.
        level = blocks[first].arrival - (freed - blocks[first].saved)
        # The embedding's gradient of a tied table is added to the one that waits, in place.
        yield level if first == EMBEDDING else level + tied_gradient - blocks[first].waiting
