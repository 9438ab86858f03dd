"""Memory that data parallelism adds to passes: gathered shards, casts and sharding ways."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Offload, Units
from meshwright.planner.space import Column, ShapeTable, Space, distinct
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.layout import DP_CP, MAX_ZERO_STAGE, GroupSpan, Mesh, Stage
from meshwright.simulator.memory import (
    BlockMemory,
    ReallocatedGradients,
    SentBytes,
    StateBytes,
    VirtualStageMemory,
)
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import (
    Replication,
    StagePart,
    WireBytes,
    reduced_parts,
    replication_of,
)
from meshwright.simulator.step import PassSharing


def makes_gradients_once(space: Space, indices: Column) -> Column:
    """Return 1 where the only backward pass of a step allocates gradients, else 0.

    With several passes the later ones, which accumulate, are at least as full.
    """
    if space.stack.gradient_as_bucket_view:
        return np.zeros(len(indices), np.int64)
    return np.asarray(space.num_microbatches[indices] == 1, np.int64)


class Kind(NamedTuple):
    """A way of sharding: replication, bytes of a parameter, and bytes in collectives."""

    replication: Replication
    state: StateBytes
    wire: WireBytes
    overlaps: bool
    """Whether gradient reductions overlap with the passes."""
    is_late: bool
    """Whether the only backward pass of a step allocates the gradients."""
    num_sets: int = 1
    """Number of shard groups of Megatron-FSDP's units."""

    @classmethod
    def of(cls, space: Space, index: int, *, has_replicas: bool) -> "Kind":
        """Return the kind of layout *index*, with two replicas in place of any number of them."""
        # Only whether a layout has replicas, replicate groups, and units of experts, decides
        # its parts: any degrees above 1 stand for all.
        (plan,) = space.plans_without_stages([index])
        # Without replicas only tensor ranks could shard experts, which no such stack offers.
        ep = 1 + (plan.ep > 1 and space.stack.is_fully_sharded and has_replicas)
        has_sets = plan.num_shards < plan.dp_cp
        dp, shard = (4, 2) if has_sets else (1 + has_replicas, None)
        # First: ranks that cut sequences may have experts between them.
        undivided = replace(plan, ep=1, etp=None)
        uncut = replace(undivided, tp=1, cp=1, cp_type=None, cp_inner=None)
        plan = replace(uncut, dp=dp, dp_shard=shard, ep=ep)
        if not has_replicas and plan.offload is Offload.NONE:  # nothing is split, as at stage 0
            plan = replace(plan, zero_stage=0)
        stack, precision = space.stack, space.job.precision
        return cls(
            replication_of(plan, stack, Mesh.of(plan, node_size=2)),
            StateBytes.of(stack, precision, plan.gradient_formats, plan.moment_precision),
            WireBytes.of(stack, precision, plan),
            stack.overlap_gradient_reduce,
            bool(makes_gradients_once(space, np.array([index]))[0]),
            int(_flat_sets(space, np.array([index]))[0]),
        )

    @property
    def adds_to_passes(self) -> bool:
        """Whether passes hold more, or gradients later, than without data parallelism."""
        return self.replication.in_units or self.cast_bytes(1) > 0 or self.is_late

    def cast_bytes(self, num_parameters: int) -> int:
        """Return the buffer of gradients cast to the format of their reduction."""
        return PassSharing(self.replication, self.state, self.wire).cast_bytes(num_parameters)

    @property
    def moved(self) -> tuple[bool, bool]:
        """Whether optimizer states, and reduced gradients, are offloaded."""
        is_moved = self.replication.offload is not Offload.NONE
        return is_moved, is_moved and self.replication.reduces_each_microbatch

    @property
    def casts_last(self) -> bool:
        """Whether gradients are cast, and reduced as one, when activations are freed."""
        replication = self.replication
        in_passes = replication.in_units or replication.reduces_each_microbatch
        return not (in_passes or self.overlaps)


def sharding_kinds(space: Space, indices: NDArray[np.int64]) -> tuple[list[Kind], Column]:
    """Return the ways of sharding of layouts, and the index of each layout's."""
    has_replicas = space.column(DP_CP)[indices] > 1
    if space.stack.units is Units.FLAT:  # of which those of experts alone may be divided
        is_sharded = space.column("zero_stage")[indices] == MAX_ZERO_STAGE
        has_replicas |= is_sharded & (space.column("ep") * space.expert_shards > 1)[indices]
    is_split = has_replicas | (space.column("offload")[indices] > 0)
    zero_stages = np.where(is_split, space.column("zero_stage")[indices], 0)
    divides = space.column("ep")[indices] > (1 if space.stack.is_fully_sharded else np.inf)
    # Few properties decide a kind, so that thousands of layouts have a handful of kinds.
    flags = (has_replicas, space.column("pp")[indices] > 1, divides)
    columns = [*(flag.astype(np.int64) for flag in flags), zero_stages, space.sharing[indices]]
    columns.append(_flat_sets(space, indices))
    first, member = distinct([*columns, makes_gradients_once(space, indices)])
    pairs = zip(indices[first].tolist(), has_replicas[first].tolist(), strict=True)
    return [Kind.of(space, index, has_replicas=has_several) for index, has_several in pairs], member


def _flat_sets(space: Space, indices: Column) -> Column:
    """Return the number of shard groups of Megatron-FSDP's units in each layout."""
    if space.stack.units is not Units.FLAT:
        return np.ones(len(indices), np.int64)
    return np.asarray(space.column(DP_CP)[indices] // space.num_shards[indices], np.int64)


class StageSharing:
    """Memory that data parallelism adds to the passes through stages, for each shape."""

    def __init__(
        self,
        table: ShapeTable,
        walked: BlockTable,
        blocks: Sequence[Mapping[BlockKind, BlockMemory[int]]],
    ) -> None:
        self._table = table
        self._walked = walked
        self._blocks = blocks
        self._parts: dict[tuple[int, int, Replication, Stage], tuple[StagePart, ...]] = {}

    def memory(
        self, alone: VirtualStageMemory, kind: Kind, stage: Stage, index: int, devices: int
    ) -> VirtualStageMemory:
        """Return the memory of a virtual stage of one shape.

        Args:
            alone: Memory without data parallelism, in columns over shapes.
            kind: Way of sharding.
            stage: Virtual stage.
            index: Index of the shape.
            devices: Devices of a stage: data- times tensor-parallel ranks.
        """
        shape = self._table.shapes[index]
        sizes = {each.name: _of_row(getattr(alone, each.name), index) for each in fields(alone)}
        memory = replace(alone, **sizes)
        replication = _spanned(kind, shape, devices // shape.tp)
        if replication is None:
            return memory
        # Parts depend on weights and their sharding, not on activations.
        key = shape.tp, devices // shape.tp, replication, stage
        if key not in self._parts:
            self._parts[key] = reduced_parts(shape, stage, replication)
        late = None
        if kind.is_late:
            late = ReallocatedGradients.of(self._walked, shape, kind.state.gradient)
        sharing = PassSharing(replication, kind.state, kind.wire)
        return sharing.added_to(memory, shape, stage, self._blocks[index], self._parts[key], late)


def _of_row(sizes: Any, row: int) -> Any:  # noqa: ANN401 -- a size, a record of some, or none
    """Return the numbers of one row of *sizes*, some of which are columns."""
    if isinstance(sizes, SentBytes):
        return SentBytes(*(_of_row(size, row) for size in sizes))
    return int(sizes[row]) if isinstance(sizes, np.ndarray) else sizes


def _spanned(kind: Kind, shape: BlockShape, dp: int) -> Replication | None:
    """Return the replication of *kind* over so many ranks; None where no layout has it."""
    replication = kind.replication
    if not replication.has_flat_units:
        return replication._replace(span=GroupSpan(dp, 1, dp))
    shards, rest = divmod(dp, kind.num_sets)
    if rest or shards * shape.tp % (shape.ep * shape.expert_tp):
        return None
    sets = GroupSpan(kind.num_sets, shards, dp) if kind.num_sets > 1 else None
    return replication._replace(span=GroupSpan(shards, 1, shards), replica_span=sets)
