"""The exact peak memory of every layout of a space, without simulating any."""

from collections.abc import Callable
from dataclasses import astuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster, counted
from meshwright.planner.footprint.groups import PipelineGroup, pipeline_groups
from meshwright.planner.footprint.least import MOST_BYTES, least_bytes
from meshwright.planner.footprint.passes import Layouts, RolePasses, Sizes
from meshwright.planner.footprint.replicas import Kind, kinds_of
from meshwright.planner.footprint.units import UnitPeaks
from meshwright.planner.space import Column, Role, ShapeTable, Space, distinct
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import Axis, Mesh
from meshwright.simulator.memory import (
    SYMMETRIC,
    Overheads,
    StateBytes,
    num_communicators,
    symmetric_bytes,
    workspace_bytes,
)
from meshwright.simulator.model import shares_table

Progress = Callable[[str, int, int], None]


def peak_bytes(
    space: Space,
    table: ShapeTable,
    blocks: BlockTable,
    indices: NDArray[np.int64] | None = None,
    *,
    most_bytes: int = MOST_BYTES,
    progress: Progress | None = None,
) -> Column:
    """Return the live bytes of each layout's fullest rank at its fullest moment.

    Args:
        space: The layouts.
        table: Their shapes.
        blocks: Where what blocks hold is kept.
        indices: Which layouts; by default all.
        most_bytes: Of layouts that need more than this only so much is certain: that they do, and
            that they need no less than what is returned.
        progress: Called with what is being done, how much is done, and of how much.
    """
    asked = np.arange(len(space)) if indices is None else indices
    peaks = least_bytes(space, table, blocks, asked)
    left = peaks <= most_bytes
    if left.any():
        own = asked[left]
        footprint = Footprint(space, table.of_layouts(own), blocks)
        peaks[left] = footprint.peak_bytes(own, most_bytes, progress)
    return peaks


class Footprint:
    """The exact memory of layouts of a space, found once for what they share."""

    def __init__(self, space: Space, table: ShapeTable, blocks: BlockTable) -> None:
        self._space = space
        self._table = table
        self._units = UnitPeaks(space, table, blocks) if space.stack.is_fully_sharded else None
        self._sizes = (
            None
            if space.stack.is_fully_sharded
            else Sizes.of(table, blocks, holds_messages=space.stack.holds_messages)
        )

    def peak_bytes(
        self,
        indices: NDArray[np.int64],
        most_bytes: int = MOST_BYTES,
        progress: Progress | None = None,
    ) -> Column:
        """Return the live bytes of the fullest rank of each layout; see `peak_bytes`."""
        peaks = np.zeros(len(self._space), np.int64)

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(f"sizing the memory of {counted(len(indices), 'layout')}", done, total)

        if self._units is not None:
            self._units.add_to(peaks, indices, most_bytes, tell)
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
                peaks[group.indices] = _group_peaks(
                    self._space, group, layouts, own, self._sizes, most_bytes
                )
        return peaks[indices]


def _group_peaks(
    space: Space,
    group: PipelineGroup,
    own: Layouts,
    kinds: list[Kind],
    sizes: Sizes,
    most_bytes: int,
) -> Column:
    """Return the peaks of layouts with one pipeline."""
    states = _States(space, group.indices, own, kinds, sizes)
    used, devices = own.shapes[distinct([own.shapes])[0]], space.num_gpus // group.pipeline.pp
    # Passes know little of how states are shared: many layouts are one to them.
    ways = [None, *(kind for kind in kinds if kind.adds_to_passes)]
    places = [ways.index(kind if kind.adds_to_passes else None) for kind in kinds]
    to_passes = own._replace(sharing=np.array(places)[own.sharing])
    first, member = distinct([*to_passes])
    apart = to_passes.chosen(first)
    peaks, ranks = np.zeros(len(group.indices), np.int64), []
    for role in group.pipeline.roles:
        static, at_end = states.of_role(role, sizes)
        passes = RolePasses(
            group.pipeline, role, sizes, sizes.workspaces(role, ways, used, devices)
        )
        # The update comes when all activations are gone: of both only the larger counts.
        peaks = np.maximum(peaks, static + at_end + passes.held_between_steps[own.shapes])
        ranks.append((static, passes, static + passes.most_bytes(apart)[member]))
    # Most ranks need less than the fullest however their passes are ordered: that is not walked.
    for static, passes, most in sorted(ranks, key=lambda rank: rank[2].sum(), reverse=True):
        left = np.flatnonzero((most > peaks) & (peaks <= most_bytes))
        if len(left):
            found = static[left] + passes.bytes(to_passes.chosen(left))
            peaks[left] = np.maximum(peaks[left], found)
    return peaks


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
        is_split = np.array([kind.replication.shards for kind in kinds])[self._sharing] > 1
        self._shards = np.where(is_split, num_shards[first, None], 1).T
        known = np.array([astuple(kind.state) for kind in kinds], np.int64)[self._sharing]
        self._state = StateBytes(*known.T)
        moved = np.array([kind.moved for kind in kinds], np.int64)[self._sharing]
        self._optimizer_stays, self._gradients_stay = 1 - moved.T

    def of_role(self, role: Role, sizes: Sizes) -> tuple[Column, Column]:
        """Return what lives throughout a step on a rank of a role, and what its end adds."""
        state = self._state
        parameters = sizes.counts.of_rank(self._degrees, role.stages)
        experts = sizes.counts.of_experts(self._degrees, role.stages)
        others, shards = parameters - experts, self._expert_shards
        of_weights, of_gradients, of_optimizer = self._shards
        weight = np.where(of_weights > 1, state.sharded_parameter, state.parameter)
        # The optimizer's share is what it updates, with what that needs for a moment.
        updated = (-(-others // of_optimizer) + -(-experts // shards)) * self._optimizer_stays
        static = (
            (-(-others // of_weights) + -(-experts // np.where(of_weights > 1, shards, 1))) * weight
            + (-(-others // of_gradients) + -(-experts // np.where(of_gradients > 1, shards, 1)))
            * (state.gradient + state.bucket)
            * self._gradients_stay
            + updated * state.optimizer
        )[self._member]
        static += sizes.counts.beside_bytes(self._shapes, role.stages)
        static += sizes.shared_buffers(role)[self._shapes]
        cast = _cast_last(self._kinds, self._sharing, parameters)
        return static, np.maximum(updated * state.update_temporary, cast)[self._member]


def _cast_last(kinds: list[Kind], member: Column, parameters: Column) -> Column:
    """Return what holds gradients that are cast after the last pass, of each layout."""
    is_cast = np.array([kind.casts_last for kind in kinds])[member]
    widths = np.array([kind.cast_bytes(1) for kind in kinds], np.int64)[member]
    return np.asarray(parameters * widths * is_cast, np.int64)


def device_bytes_column(
    space: Space, cluster: Cluster, live: Column, indices: NDArray[np.int64] | None = None
) -> Column:
    """Return what the device shows as used, for each layout's live bytes.

    Args:
        space: The layouts.
        cluster: On what.
        live: Bytes of tensors.
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
    allocated = live + workspace_bytes(cluster.device, space.stack, space.job.model)
    rounding = (allocated * space.stack.allocator_fraction).astype(np.int64)
    columns = (space.column(name)[chosen] for name in SYMMETRIC)
    outside = outside[member] + symmetric_bytes(space.job, space.stack, *columns)
    return np.asarray(allocated + rounding + outside, np.int64)


def _mesh(numbers: dict[str, int]) -> Mesh:
    """Return the mesh of the numbers of its fields; nodes do not matter."""
    ep, etp, inner = (numbers.pop(name) for name in ("ep", "etp", "cp_inner"))
    experts = etp or numbers["tp"], ep
    return Mesh(node_size=1, experts=experts, cp_inner=inner or 1, **numbers)
