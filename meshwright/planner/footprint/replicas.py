"""What replicas add to the passes of layouts: shards that are made whole, and casts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Offload, Units
from meshwright.planner.space import Column, ShapeTable, Space, distinct
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import DP_CP, MAX_ZERO_STAGE, GroupSpan, Mesh, Stage
from meshwright.simulator.memory import (
    FULLNESS,
    BlockBytes,
    LateGradients,
    StateBytes,
)
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import (
    Replication,
    StagePart,
    WireBytes,
    bucket_cast_peak,
    flat_pass_bytes,
    reduced_parts,
    replication_of,
)
from meshwright.simulator.step import unit_workspace_bytes


def makes_gradients_once(space: Space, indices: Column) -> Column:
    """Return whether each layout has one backward pass, which makes gradients that were freed.

    Of several the later ones, which add to them, are as full or FULLNESS.
    """
    if space.stack.gradient_as_bucket_view:
        return np.zeros(len(indices), np.int64)
    return np.asarray(space.num_microbatches[indices] == 1, np.int64)


class Kind(NamedTuple):
    """How the replicas of layouts share states, what a parameter costs there and on the wire."""

    replication: Replication
    state: StateBytes
    wire: WireBytes
    overlaps: bool
    """Whether gradients are reduced under the passes."""
    is_late: bool
    """Whether the only backward pass of a step makes the gradients."""
    num_sets: int = 1
    """Sets of shards of flat units."""

    @classmethod
    def of(cls, space: Space, index: int, *, has_replicas: bool) -> "Kind":
        """Return that of layout *index*, with two replicas in place of any number of them."""
        # Only whether a layout has replicas, sets of shards, and units of experts, decides its
        # parts: any degrees above 1 stand for all.
        (plan,) = space.plans_without_stages([index])
        # Without replicas tensor ranks alone could have other experts, which no such stack offers.
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
        """Whether passes hold more, or gradients later, than with no replicas."""
        return self.replication.in_units or self.cast_bytes(1) > 0 or self.is_late

    def cast_bytes(self, num_parameters: int) -> int:
        """Return what holds gradients that are reduced together in another format than theirs."""
        casts, replication = self.wire.casts, self.replication
        if casts is None or replication.dp_cp == 1:
            return 0
        return casts.buffer_bytes(num_parameters, replication.shards.gradients)

    @property
    def moved(self) -> tuple[bool, bool]:
        """Whether the optimizer's states, and gradients that are reduced, are on the host."""
        is_moved = self.replication.offload is not Offload.NONE
        return is_moved, is_moved and self.replication.reduces_each_microbatch

    @property
    def casts_last(self) -> bool:
        """Whether gradients are cast, and reduced as one, when activations are gone."""
        replication = self.replication
        in_passes = replication.in_units or replication.reduces_each_microbatch
        return not (in_passes or self.overlaps)


def kinds_of(space: Space, indices: NDArray[np.int64]) -> tuple[list[Kind], Column]:
    """Return the ways in which layouts share states, and which one each has."""
    has_replicas = space.column(DP_CP)[indices] > 1
    if space.stack.units is Units.FLAT:  # of which those of experts alone may be divided
        is_sharded = space.column("zero_stage")[indices] == MAX_ZERO_STAGE
        has_replicas |= is_sharded & (space.column("ep") * space.expert_shards > 1)[indices]
    is_split = has_replicas | (space.column("offload")[indices] > 0)
    zero_stages = np.where(is_split, space.column("zero_stage")[indices], 0)
    divides = space.column("ep")[indices] > (1 if space.stack.is_fully_sharded else np.inf)
    flags = (has_replicas, space.column("pp")[indices] > 1, divides)
    columns = [*(flag.astype(np.int64) for flag in flags), zero_stages, space.sharing[indices]]
    columns.append(_flat_sets(space, indices))
    first, member = distinct([*columns, makes_gradients_once(space, indices)])
    pairs = zip(indices[first].tolist(), has_replicas[first].tolist(), strict=True)
    return [Kind.of(space, index, has_replicas=several) for index, several in pairs], member


def _flat_sets(space: Space, indices: Column) -> Column:
    """Return how many sets of shards of flat units each layout has."""
    if space.stack.units is not Units.FLAT:
        return np.ones(len(indices), np.int64)
    return np.asarray(space.column(DP_CP)[indices] // space.num_shards[indices], np.int64)


class ReplicaWorkspaces:
    """What passes hold of sharded states and of gradients that are cast, beside all else."""

    def __init__(
        self,
        table: ShapeTable,
        walked: BlockTable,
        blocks: Sequence[Mapping[BlockKind, BlockBytes[int]]],
    ) -> None:
        self._table = table
        self._walked = walked
        self._blocks = blocks
        self._parts: dict[tuple[int, int, Replication, Stage], tuple[StagePart, ...]] = {}

    def added_to(
        self, passes: NDArray[np.int64], kind: Kind | None, stage: Stage, used: Column, devices: int
    ) -> NDArray[np.int64]:
        """Return *passes*, the bytes of forward and backward, with what replicas add to them.

        Args:
            passes: One column a shape.
            kind: How states are shared, if that adds anything.
            stage: Whose passes.
            used: Shapes that are asked for.
            devices: Of a stage: data- times tensor-parallel ranks.
        """
        if kind is None:
            return passes
        whole = passes.copy()
        for index in used.tolist():
            whole[:, index] = self._pair(kind, stage, index, devices, *passes[:, index].tolist())
        return whole

    def _pair(
        self, kind: Kind, stage: Stage, index: int, devices: int, forward: int, backward: int
    ) -> tuple[int, int]:
        shape, replication = self._table.shapes[index], kind.replication
        dp = devices // shape.tp
        if replication.has_flat_units:
            shards, rest = divmod(dp, kind.num_sets)
            if rest or shards * shape.tp % (shape.ep * shape.expert_tp):  # of no layout
                return forward, backward
            sharing = shards, dp
            return flat_pass_bytes(shape, stage, self._blocks[index], kind.state, sharing)
        key = (shape.tp, dp, replication, stage)
        if key not in self._parts:
            spanned = replication._replace(span=GroupSpan(dp, 1, dp))
            self._parts[key] = reduced_parts(shape, stage, spanned)
        parts = self._parts[key]
        if kind.is_late:
            return self._late_pair(kind, stage, index, parts, forward)
        if not parts:
            return forward, backward
        if not replication.in_units:
            peak = bucket_cast_peak(self._blocks[index], stage, parts, kind.cast_bytes)
            return forward, max(backward, peak.total_bytes)
        units = [sum(part.buckets) for part in parts]
        spanned = replication._replace(span=GroupSpan(dp, 1, dp))
        workspace = unit_workspace_bytes(kind.state, spanned, units)
        largest = max(size for part in parts for size in part.all_buckets)
        return forward + workspace[0], backward + workspace[1] + kind.cast_bytes(largest)

    def _late_pair(
        self, kind: Kind, stage: Stage, index: int, parts: tuple[StagePart, ...], forward: int
    ) -> tuple[int, int]:
        late = LateGradients.of(self._walked, self._table.shapes[index], kind.state.gradient)
        assert late is not None
        peak = late.fullest(stage)
        if parts and kind.cast_bytes(1):
            cast = bucket_cast_peak(self._blocks[index], stage, parts, kind.cast_bytes, late)
            peak = max(peak, cast, key=FULLNESS)
        return forward - late.total_bytes(stage), peak.total_bytes
