"""Memory of a backward pass that re-allocates the gradients which ``set_to_none`` has freed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, Self

from meshwright.simulator.blocks import BlockShape, BlockTable, BorderGradients
from meshwright.simulator.graph import BlockMemory, Size
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory.block_bytes import block_bytes
from meshwright.simulator.memory.rank import PEAK_BYTES, PassPeak, VirtualStageMemory
from meshwright.simulator.model import BlockKind


class ReallocatedGradients(NamedTuple):
    """Bytes of blocks in the first backward pass of a step, which allocates the gradients.

    Args:
        blocks: Sizes of blocks, with a block's own gradients within its backward workspace.
        gradients: Bytes of the gradients of a block of each kind.
    """

    blocks: Mapping[BlockKind, BlockMemory[int]]
    gradients: Mapping[BlockKind, int]

    @classmethod
    def of(cls, table: BlockTable, shape: BlockShape, gradient_bytes: int) -> Self | None:
        """Return the bytes of *shape*; None where gradients stay allocated from step to step."""
        # Views of buckets are zeroed, never freed.
        if shape.stack.gradient_as_bucket_view:
            return None
        # Gradients stay, so that they are part of each block's workspace.
        blocks = block_bytes(table, shape, BorderGradients(keeps_gradients=True))
        sizes = {kind: gradient_bytes * count for kind, count in shape.parameters.items()}
        return cls(blocks, sizes)

    def total_bytes(self, stage: Stage) -> int:
        """Return the bytes of the gradients of *stage*."""
        return sum(count * self.gradients[kind] for kind, count in stage.blocks)

    def fullest(self, stage: Stage) -> PassPeak[int]:
        """Return the peak of the pass through a *stage* that holds the whole model."""
        absent, saved_behind, waiting = self.total_bytes(stage), 0, 0
        peak = PassPeak(0, absent)
        for kind, count in reversed(stage.blocks):
            # Gradients count as static: those of blocks that have not run are subtracted as absent.
            block, gradient_bytes = self.blocks[kind], self.gradients[kind]
            # From one block to the next as much more is made, and as much less is kept.
            for before in {0, count - 1}:
                workspace = block.backward + waiting - saved_behind - before * block.saved
                peak = max(
                    peak, PassPeak(workspace, absent - before * gradient_bytes), key=PEAK_BYTES
                )
            absent -= count * gradient_bytes
            saved_behind += count * block.saved
            waiting += count * block.waiting
        return peak

    def added_to(self, virtual_stage: VirtualStageMemory, stage: Stage) -> VirtualStageMemory:
        """Return the memory of *stage* with its gradients allocated in the first backward pass."""
        late_bytes, fullest = self.total_bytes(stage), PassPeak[Size](*self.fullest(stage))
        return replace(
            virtual_stage, reallocated_gradients_bytes=late_bytes, first_backward=fullest
        )
