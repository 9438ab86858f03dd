"""The exact peak memory of every layout of a space, without simulating any."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster, CudaGraphs, counted
from meshwright.planner.footprint.groups import (
    MOST_LIVE_BYTES,
    FullestRanks,
    PipelineGroup,
    pipeline_groups,
)
from meshwright.planner.footprint.least import MOST_BYTES, least_bytes
from meshwright.planner.footprint.passes import Layouts, Sizes
from meshwright.planner.footprint.replicas import Kind, kinds_of
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
from meshwright.simulator.model import shares_table
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
    """Return the most that a rank of each layout has live, and the most an allocator holds for one.

    Args:
        space: The layouts.
        table: Their shapes.
        blocks: Where what blocks hold is kept.
        indices: Which layouts; by default all.
        most_bytes: Of layouts that have more live only so much is certain: that they do, and
            that they need no less than what is returned.
        progress: Called with what is being done, how much is done, and of how much.
    """
    asked = np.arange(len(space)) if indices is None else indices
    live = np.zeros(len(asked), np.int64)
    if most_bytes < MOST_BYTES:
        live = least_bytes(space, table, blocks, asked, most_bytes=most_bytes)
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
    """The exact memory of layouts of a space, found once for what they share."""

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
        """Return the fullest ranks of each layout; see `peak_bytes`."""
        peaks = FullestRanks.of(self._space, most_bytes)

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(f"sizing the memory of {counted(len(indices), 'layout')}", done, total)

        if self._units is not None:
            self._units.add_to(peaks, indices, tell)
        elif self._sizes is not None:
            kinds, number = kinds_of(self._space, indices)
            sharing = np.zeros(len(self._space), np.int64)
            sharing[indices] = number
            for done, group in enumerate(groups := list(pipeline_groups(self._space, indices))):
                tell(done, len(groups))
                first, member = distinct([sharing[group.indices]])
                own = [kinds[each] for each in sharing[group.indices][first].tolist()]
                shapes = self._table.index[group.indices]
                layouts = Layouts(shapes, self._space.num_microbatches[group.indices], member)
                _add_group(peaks, group, layouts, own, self._sizes)
        return PeakBytes(*(column[indices] for column in peaks.peaks))


def _add_group(
    peaks: FullestRanks, group: PipelineGroup, own: Layouts, kinds: list[Kind], sizes: Sizes
) -> None:
    """Write the *peaks* of layouts with one pipeline."""
    space = peaks.space
    states = _States(space, group.indices, own, kinds, sizes)
    used, devices = own.shapes[distinct([own.shapes])[0]], space.num_gpus // group.pipeline.pp
    # Passes know little of how states are shared: many layouts are one to them.
    ways = [None, *(kind for kind in kinds if kind.adds_to_passes)]
    places = [ways.index(kind if kind.adds_to_passes else None) for kind in kinds]
    to_passes = own._replace(sharing=np.array(places)[own.sharing])
    first, member = distinct([*to_passes])
    apart = to_passes.chosen(first)
    ranks = []
    for role in group.pipeline.roles:
        lasting, static, at_end = states.of_role(role, sizes)
        passes = sizes.role_moments(group.pipeline, role, ways, used, devices)
        # The update comes when all activations are gone: of both only the larger counts.
        at_end = static + at_end + passes.held_between_steps[own.shapes]
        peaks.add(group.indices, at_end, lasting)
        ranks.append((lasting, static, passes, static + passes.upper_bound(apart)[member]))
    # Most ranks need less than the fullest however their passes are ordered: that is not walked.
    ranks.sort(key=lambda rank: rank[3].sum(), reverse=True)
    for lasting, static, passes, most in ranks:
        left = np.flatnonzero(peaks.may_grow(group.indices, most, lasting))
        if len(left):
            found = static[left] + passes.bytes(to_passes.chosen(left))
            peaks.add(group.indices[left], found, lasting[left])


class _States:
    """What lives throughout a step in layouts with one pipeline, and at its end."""

    def __init__(
        self, space: Space, indices: Column, own: Layouts, kinds: list[Kind], sizes: Sizes
    ) -> None:
        degrees = sizes.counts.degrees[own.shapes]
        num_shards, expert_shards = space.num_shards[indices], space.expert_shards[indices]
        # States know nothing of microbatches, and little of shapes.
        first, self._member = distinct([degrees, own.sharing, num_shards, expert_shards])
        self._shapes, self._kinds, self._sharing = own.shapes, kinds, own.sharing[first]
        self._degrees, self._expert_shards = degrees[first], expert_shards[first]
        self._num_shards = num_shards[first]
        self._states = LayoutStates.of(kinds, self._sharing, self._num_shards, self._expert_shards)
        self._fragmentation = Fragmentation.of(space.stack)
        self._is_one_graph = space.stack.cuda_graphs == CudaGraphs.WHOLE_STEP

    def of_role(self, role: Role, sizes: Sizes) -> tuple[Column, Column, Column]:
        """Return what lives from step to step on a rank of a role, throughout one, and at its end.

        The last is what the end adds.
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
        if self._is_one_graph:
            buffers, at_end = buffers + at_end[self._member], at_end * 0
        at_end = np.maximum(at_end, cast)[self._member]
        kept = self._fragmentation.state_bytes(lasting, gradients)
        return kept, lasting + gradients + buffers, at_end

    def _narrow_bytes(self, role: Role, sizes: Sizes) -> Column:
        """Return what weights of flat units take in 8 bits beyond others."""
        found = np.zeros(len(self._sharing), np.int64)
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
            # Kinds are alike whether experts are divided: flat units follow from the shape.
            apart = expert_shards if shape.ep > 1 else shards
            found[row] = narrow_shard_bytes(shape, blocks_of(role.stages), shards, apart)
        return found


def _cast_last(kinds: list[Kind], member: Column, parameters: Column) -> Column:
    """Return what holds gradients that are cast after the last pass, of each layout."""
    is_cast = np.array([kind.casts_last for kind in kinds])[member]
    widths = np.array([kind.cast_bytes(1) for kind in kinds], np.int64)[member]
    return np.asarray(parameters * widths * is_cast, np.int64)


def device_bytes_column(
    space: Space,
    cluster: Cluster,
    peaks: PeakBytes[Column],
    indices: NDArray[np.int64] | None = None,
) -> Column:
    """Return what the device shows as used, for each layout's peaks.

    Args:
        space: The layouts.
        cluster: On what.
        peaks: Of their ranks.
        indices: Whose they are; by default of all.
    """
    chosen = slice(None) if indices is None else indices
    names = (*Axis, "ep", "etp", "cp_inner")
    axes = [space.column(name)[chosen] for name in names]
    first, member = distinct(axes)
    is_tied = shares_table(space.job.model)
    each = [
        Overheads.of(
            cluster.device,
            space.stack,
            space.job.model,
            num_communicators(_mesh(dict(zip(names, row, strict=True))), is_tied=is_tied),
        )
        for row in np.stack(axes, axis=1)[first].tolist()
    ]
    outside = np.array([overheads.outside_bytes for overheads in each], np.int64)
    overheads = Overheads.of(cluster.device, space.stack, space.job.model)
    reserved = (peaks.reserved_parts + overheads.workspace_parts) // PARTS
    columns = (space.column(name)[chosen] for name in SYMMETRIC)
    outside = outside[member] + symmetric_bytes(space.job, space.stack, *columns)
    return np.asarray(reserved + outside, np.int64)


def _mesh(numbers: dict[str, int]) -> Mesh:
    """Return the mesh of the numbers of its fields; nodes do not matter."""
    ep, etp, inner = (numbers.pop(name) for name in ("ep", "etp", "cp_inner"))
    experts = etp or numbers["tp"], ep
    return Mesh(node_size=1, experts=experts, cp_inner=inner or 1, **numbers)
