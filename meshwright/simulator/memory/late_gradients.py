"""A backward pass that makes gradients which the update before it has freed, block by block."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, Self

from meshwright.simulator.blocks import BlockShape, BlockTable, Ending
from meshwright.simulator.graph import BlockMemory, Size
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory.block_bytes import block_bytes
from meshwright.simulator.memory.rank import FULLNESS, PassPeak, VirtualStageMemory
from meshwright.simulator.model import BlockKind


class LateGradients(NamedTuple):
    """What blocks need in the first backward pass of a step, whose gradients stay as they come.

    Args:
        blocks: Their sizes, with a block's own gradients among what its backward needs.
        gradients: Bytes of the gradients of a block of each kind.
    """

    blocks: Mapping[BlockKind, BlockMemory[int]]
    gradients: Mapping[BlockKind, int]

    @classmethod
    def of(cls, table: BlockTable, shape: BlockShape, gradient_bytes: int) -> Self | None:
        """Return those of *shape*; None where gradients stay from step to step."""
        if shape.stack.gradient_as_bucket_view:
            return None
        blocks = block_bytes(table, shape, Ending(keeps_gradients=True))
        sizes = {kind: gradient_bytes * count for kind, count in shape.parameters.items()}
        return cls(blocks, sizes)

    def total_bytes(self, stage: Stage) -> int:
        """Return the gradients of *stage*."""
        return sum(count * self.gradients[kind] for kind, count in stage.blocks)

    def fullest(self, stage: Stage) -> PassPeak[int]:
        """Return the fullest moment of the pass through a *stage* that holds the whole model."""
        absent, kept_behind, waiting = self.total_bytes(stage), 0, 0
        peak = PassPeak(0, absent)
        for kind, count in reversed(stage.blocks):
            block, made = self.blocks[kind], self.gradients[kind]
            # From one block to the next as much more is made, and as much less is kept.
            for before in {0, count - 1}:
                needed = block.backward + waiting - kept_behind - before * block.saved
                peak = max(peak, PassPeak(needed, absent - before * made), key=FULLNESS)
            absent -= count * made
            kept_behind += count * block.saved
            waiting += count * block.waiting
        return peak

    def added_to(self, virtual_stage: VirtualStageMemory, stage: Stage) -> VirtualStageMemory:
        """Return the memory of *stage* with its gradients late."""
        late_bytes, fullest = self.total_bytes(stage), PassPeak[Size](*self.fullest(stage))
        return replace(virtual_stage, late_gradients_bytes=late_bytes, first_backward=fullest)
