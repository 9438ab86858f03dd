"""Memory that data parallelism adds to passes: gathered shards, casts, re-allocated gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import Size, larger
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import (
    PEAK_BYTES,
    BlockMemory,
    PassPeak,
    ReallocatedGradients,
    StateBytes,
    VirtualStageMemory,
    with_workspace,
)
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import (
    Replication,
    StagePart,
    WireBytes,
    bucket_cast_peak,
    flat_pass_bytes,
    shard_counts,
)
from meshwright.simulator.step.offload import unit_workspace_bytes

Blocks = Mapping[BlockKind, BlockMemory[int]]


class PassSharing(NamedTuple):
    """Sharding of a rank's states, and bytes of a parameter in memory and in collectives."""

    replication: Replication
    state: StateBytes
    wire: WireBytes

    def cast_bytes(self, num_parameters: int) -> int:
        """Return the buffer of gradients cast to the format of their reduction."""
        casts, replication = self.wire.casts, self.replication
        if casts is None or replication.dp_cp == 1:
            return 0
        return casts.buffer_bytes(num_parameters, replication.shards.gradients)

    def added_to(
        self,
        virtual_stage: VirtualStageMemory,
        shape: BlockShape,
        stage: Stage,
        blocks: Blocks,
        parts: Sequence[StagePart],
        late: ReallocatedGradients | None,
    ) -> VirtualStageMemory:
        """Return *virtual_stage*, the memory without data parallelism, with that added.

        Args:
            virtual_stage: Memory of *stage*.
            shape: Shape of its blocks.
            stage: Stage of the passes.
            blocks: Sizes of a block of each kind.
            parts: Parts that are reduced in passes.
            late: Gradients that the first backward pass allocates, if it does.
        """
        replication = self.replication
        if replication.has_flat_units:
            passes = flat_pass_bytes(shape, stage, blocks, self.state, shard_counts(replication))
            virtual_stage = replace(
                virtual_stage, forward_workspace_bytes=passes[0], backward_workspace_bytes=passes[1]
            )
        elif replication.in_units and parts:
            units = [sum(part.buckets) for part in parts]
            workspace = unit_workspace_bytes(self.state, replication, units)
            virtual_stage = with_workspace(virtual_stage, workspace)
        # The first backward pass allocates gradients on top of all else.
        if late is not None:
            virtual_stage = late.added_to(virtual_stage, stage)
        largest = max((size for part in parts for size in part.all_buckets), default=0)
        # Buckets are cast one by one: the largest decides.
        if not self.cast_bytes(largest):
            return virtual_stage
        if replication.in_units:
            return with_workspace(virtual_stage, (0, self.cast_bytes(largest)))
        cast_peak = bucket_cast_peak(blocks, stage, tuple(parts), self.cast_bytes).total_bytes
        backward = larger(virtual_stage.backward_workspace_bytes, cast_peak)
        first = virtual_stage.first_backward
        if first is not None:
            cast = bucket_cast_peak(blocks, stage, tuple(parts), self.cast_bytes, late)
            first = max(first, PassPeak[Size](*cast), key=PEAK_BYTES)
        return replace(virtual_stage, backward_workspace_bytes=backward, first_backward=first)
