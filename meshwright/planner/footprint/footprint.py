"""Exact peak memory of all layouts of a space, without simulation."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster, CudaGraphs, counted
from meshwright.planner.footprint.groups import (
    MOST_LIVE_BYTES,
    LargestPeaks,
    PipelineGroup,
    pipeline_groups,
)
from meshwright.planner.footprint.least import MOST_BYTES, least_bytes
from meshwright.planner.footprint.passes import Layouts, Sizes
from meshwright.planner.footprint.replicas import Kind, sharding_kinds
from meshwright.planner.footprint.states import LayoutStates
from meshwright.planner.footprint.units import UnitPeaks
from meshwright.planner.space import Column, Role, ShapeTable, Space, distinct
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import Axis, Mesh
from meshwright.simulator.memory import (
    PARTS,
    SYMMETRIC,
    Fragmentation,
    Overheads,
    PeakBytes,
    num_communicators,
    symmetric_bytes,
)
from meshwright.simulator.model import shares_embedding
from meshwright.simulator.replication import blocks_of, narrow_shard_bytes

Progress = Callable[[str, int, int], None]


def peak_bytes(
    space: Space,
    table: ShapeTable,
    blocks: BlockTable,
    indices: NDArray[np.int64] | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    progress: Progress | None = None,
) -> PeakBytes[Column]:
    """Return the most live bytes of a rank of each layout, and the most reserved for one.

    Args:
        space: The layouts.
        table: Their shapes.
        blocks: Memory of blocks, computed once.
        indices: Indices of layouts; by default all.
        most_bytes: Limit of exact results: for layouts with more live bytes a lower bound is
            returned, itself above the limit.
        progress: Called with the name of the work, the number done, and the total.
    """
    asked = np.arange(len(space)) if indices is None else indices
    live = np.zeros(len(asked), np.int64)
    if most_bytes < MOST_BYTES:
        live = least_bytes(space, table, blocks, asked, most_bytes=most_bytes)
    # Reserved bytes of layouts beyond the limit are no less than their live ones.
    peaks = PeakBytes(live, np.minimum(live, MOST_LIVE_BYTES) * PARTS)
    left = live <= most_bytes
    if left.any():
        own = asked[left]
        footprint = Footprint(space, table.of_layouts(own), blocks)
        for column, found in zip(
            peaks, footprint.peak_bytes(own, most_bytes, progress), strict=True
        ):
            column[left] = found
    return peaks


class Footprint:
    """Exact memory of layouts of a space, computed once for what they share."""

    def __init__(self, space: Space, table: ShapeTable, blocks: BlockTable) -> None:
        blocks.prepare(table.shapes, table.kinds)
        self._space = space
        self._table = table
        self._units = UnitPeaks(space, table, blocks) if space.stack.is_fully_sharded else None
        self._sizes = None if space.stack.is_fully_sharded else Sizes(table, blocks)

    def peak_bytes(
        self,
        indices: NDArray[np.int64],
        most_bytes: int = MOST_BYTES,
        progress: Progress | None = None,
    ) -> PeakBytes[Column]:
        """Return the largest peaks of each layout; see `peak_bytes`."""
        peaks = LargestPeaks.of(self._space, most_bytes)

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(f"sizing the memory of {counted(len(indices), 'layout')}", done, total)

        if self._units is not None:
            self._units.add_to(peaks, indices, tell)
        elif self._sizes is not None:
            kinds, number = sharding_kinds(self._space, indices)
            sharing = np.zeros(len(self._space), np.int64)
            sharing[indices] = number
            for done, group in enumerate(groups := list(pipeline_groups(self._space, indices))):
                tell(done, len(groups))
                # Layouts of a pipeline that share states alike are sized as one.
                first, member = distinct([sharing[group.indices]])
                own = [kinds[each] for each in sharing[group.indices][first].tolist()]
                shapes = self._table.index[group.indices]
                layouts = Layouts(shapes, self._space.num_microbatches[group.indices], member)
                _add_group(peaks, group, layouts, own, self._sizes)
        return PeakBytes(*(column[indices] for column in peaks.peaks))


def _add_group(
    peaks: LargestPeaks, group: PipelineGroup, layouts: Layouts, kinds: list[Kind], sizes: Sizes
) -> None:
    """Add the *peaks* of layouts with one pipeline."""
    space = peaks.space
    states = _States(space, group.indices, layouts, kinds, sizes)
    used, devices = (
        layouts.shapes[distinct([layouts.shapes])[0]],
        space.num_gpus // group.pipeline.pp,
    )
    # Passes depend on few properties of sharding: many layouts are one to them.
    ways = [None, *(kind for kind in kinds if kind.adds_to_passes)]
    places = [ways.index(kind if kind.adds_to_passes else None) for kind in kinds]
    to_passes = layouts._replace(sharing=np.array(places)[layouts.sharing])
    first, member = distinct([*to_passes])
    distinct_layouts = to_passes.chosen(first)
    ranks = []
    for role in group.pipeline.roles:
        lasting, static, at_end = states.of_role(role, sizes)
        passes = sizes.role_peaks(group.pipeline, role, ways, used, devices)
        # The update comes when all activations are gone: of both only the larger counts.
        at_end = static + at_end + passes.held_between_steps[layouts.shapes]
        peaks.add(group.indices, at_end, lasting)
        ranks.append(
            (lasting, static, passes, static + passes.upper_bound(distinct_layouts)[member])
        )
    # Most ranks need less than the fullest however their passes are ordered: that is not walked.
    ranks.sort(key=lambda rank: rank[3].sum(), reverse=True)
    for lasting, static, passes, most in ranks:
        left = np.flatnonzero(peaks.may_grow(group.indices, most, lasting))
        if len(left):
            live = static[left] + passes.bytes(to_passes.chosen(left))
            peaks.add(group.indices[left], live, lasting[left])


class _States:
    """Bytes that live throughout a step in layouts with one pipeline, and at its end."""

    def __init__(
        self, space: Space, indices: Column, own: Layouts, kinds: list[Kind], sizes: Sizes
    ) -> None:
        degrees = sizes.counts.degrees[own.shapes]
        num_shards, expert_shards = space.num_shards[indices], space.expert_shards[indices]
        # States do not depend on microbatches, and on few properties of shapes.
        first, self._member = distinct([degrees, own.sharing, num_shards, expert_shards])
        self._shapes, self._kinds, self._sharing = own.shapes, kinds, own.sharing[first]
        self._degrees, self._expert_shards = degrees[first], expert_shards[first]
        self._num_shards = num_shards[first]
        self._states = LayoutStates.of(kinds, self._sharing, self._num_shards, self._expert_shards)
        self._fragmentation = Fragmentation.of(space.stack)
        self._is_one_graph = space.stack.cuda_graphs == CudaGraphs.WHOLE_STEP

    def of_role(self, role: Role, sizes: Sizes) -> tuple[Column, Column, Column]:
        """Return a role's bytes from step to step, throughout a step, and added at its end.

        At the end temporaries of the update, or of a cast, are added.
        """
        parameters = sizes.counts.of_rank(self._degrees, role.stages)
        experts = sizes.counts.of_experts(self._degrees, role.stages)
        held = self._states.held(parameters, experts)
        gradients = np.asarray(held.gradients_bytes)[self._member]
        weights = np.asarray(held.weights_bytes)
        lasting = weights[self._member] + sizes.counts.beside_bytes(self._shapes, role.stages)
        lasting = lasting + self._narrow_bytes(role, sizes)[self._member]
        buffers = sizes.counts.buffer_bytes(self._shapes, role.stages)
        buffers = buffers + sizes.shared_buffers(role)[self._shapes]
        cast = _cast_last(self._kinds, self._sharing, parameters)
        at_end = np.asarray(held.update_temporary_bytes)
        # The graph's memory pool keeps the temporaries of the update throughout.
        if self._is_one_graph:
            buffers, at_end = buffers + at_end[self._member], at_end * 0
        at_end = np.maximum(at_end, cast)[self._member]
        kept = self._fragmentation.state_bytes(lasting, gradients)
        return kept, lasting + gradients + buffers, at_end

    def _narrow_bytes(self, role: Role, sizes: Sizes) -> Column:
        """Return the bytes of 8-bit weights of flat units beyond those of other weights."""
        extra_bytes = np.zeros(len(self._sharing), np.int64)
        rows = zip(
            self._sharing.tolist(),
            self._degrees.tolist(),
            self._num_shards.tolist(),
            self._expert_shards.tolist(),
            strict=True,
        )
        for row, (sharing, degrees, shards, expert_shards) in enumerate(rows):
            if not self._kinds[sharing].replication.has_flat_units:
                continue
            shape = sizes.counts.shapes[degrees]
            # Kinds do not tell whether experts are sharded apart: flat units follow from the shape.
            shards_of_experts = expert_shards if shape.ep > 1 else shards
            extra_bytes[row] = narrow_shard_bytes(
                shape, blocks_of(role.stages), shards, shards_of_experts
            )
        return extra_bytes


def _cast_last(kinds: list[Kind], member: Column, parameters: Column) -> Column:
    """Return the buffers of gradients that are cast after the last pass, of each layout."""
    is_cast = np.array([kind.casts_last for kind in kinds])[member]
    widths = np.array([kind.cast_bytes(1) for kind in kinds], np.int64)[member]
    return np.asarray(parameters * widths * is_cast, np.int64)


def device_bytes_column(
    space: Space,
    cluster: Cluster,
    peaks: PeakBytes[Column],
    indices: NDArray[np.int64] | None = None,
) -> Column:
    """Return the bytes that the device shows as used at each layout's peaks.

    Args:
        space: The layouts.
        cluster: Hardware.
        peaks: Peaks of their ranks.
        indices: Indices of layouts; by default all.
    """
    rows = slice(None) if indices is None else indices
    names = (*Axis, "ep", "etp", "cp_inner")
    axes = [space.column(name)[rows] for name in names]
    first, member = distinct(axes)
    is_tied = shares_embedding(space.job.model)
    overheads_of_mesh = [
        Overheads.of(
            cluster.device,
            space.stack,
            space.job.model,
            num_communicators(_mesh(dict(zip(names, row, strict=True))), is_tied=is_tied),
        )
        for row in np.stack(axes, axis=1)[first].tolist()
    ]
    outside = np.array([overheads.outside_bytes for overheads in overheads_of_mesh], np.int64)
    overheads = Overheads.of(cluster.device, space.stack, space.job.model)
    reserved = (peaks.reserved_parts + overheads.workspace_parts) // PARTS
    columns = (space.column(name)[rows] for name in SYMMETRIC)
    outside = outside[member] + symmetric_bytes(space.job, space.stack, *columns)
    return np.asarray(reserved + outside, np.int64)


def _mesh(numbers: dict[str, int]) -> Mesh:
    """Return the mesh with such degrees; nodes do not matter."""
    ep, etp, inner = (numbers.pop(name) for name in ("ep", "etp", "cp_inner"))
    experts = etp or numbers["tp"], ep
    return Mesh(node_size=1, experts=experts, cp_inner=inner or 1, **numbers)
