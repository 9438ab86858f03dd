"""The exact peak memory of every layout of a space, without simulating any."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import StackProfile
from meshwright.planner.footprint.units import UnitPeaks
from meshwright.planner.space import (
    Column,
    PeakCandidate,
    Role,
    ShapeBytes,
    ShapeTable,
    Space,
    fullest_moments,
    pipeline_roles,
    representative_microbatches,
)
from meshwright.simulator import SCHEDULES, Phase, Schedule
from meshwright.simulator.blocks import BlockShape, weight_copy_bytes
from meshwright.simulator.layout import Mesh, ParallelPlan, Stage
from meshwright.simulator.memory import (
    StateBytes,
    pass_workspace_bytes,
    sharded_workspace_bytes,
)
from meshwright.simulator.replication import Replication, reduced_parts, sum_layers
from meshwright.simulator.step import replication_of


class PipelineGroup(NamedTuple):
    """Layouts with the same pipeline: degree, virtual stages and schedule."""

    indices: NDArray[np.int64]
    pp: int
    schedule: Schedule
    roles: list[Role]


def pipeline_groups(space: Space, indices: NDArray[np.int64]) -> Iterator[PipelineGroup]:
    """Yield the layouts among *indices* by pipeline, in a fixed order."""
    names = ("pp", "num_virtual_stages", "schedule")
    keys = np.stack([space.column(name)[indices] for name in names], axis=1)
    distinct, member = np.unique(keys, axis=0, return_inverse=True)
    schedules = tuple(SCHEDULES.values())
    for number, (pp, vpp, schedule) in enumerate(distinct.tolist()):
        chosen = indices[member.reshape(-1) == number]
        roles = pipeline_roles(space.layers(pp, vpp), pp)
        yield PipelineGroup(chosen, pp, schedules[schedule], roles)


class ParameterCounts:
    """Parameters of one rank's blocks for each tensor-parallel degree of a space."""

    def __init__(self, table: ShapeTable) -> None:
        by_tp = {shape.tp: shape for shape in table.shapes}
        counts = {
            tp: (
                shape.parameters.layer,
                shape.parameters.embedding,
                shape.parameters.head,
                shape.local_vocab_size * shape.model.hidden_size * shape.model.tied_embeddings,
            )
            for tp, shape in by_tp.items()
        }
        rows = [counts[shape.tp] for shape in table.shapes]
        self._by_shape = np.array(rows, np.int64).reshape(-1, 4)
        copies = [weight_copy_bytes(shape, 1) for shape in table.shapes]
        self._copies = np.array(copies, np.int64)

    def of_rank(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the parameters of a rank that holds *stages*, for each of the layouts."""
        layers = sum_layers(stages)
        embeddings = sum(stage.has_embedding for stage in stages)
        heads = sum(stage.has_head for stage in stages)
        copies = sum(stage.has_head and not stage.has_embedding for stage in stages)
        weights = np.array([layers, embeddings, heads, copies], np.int64)
        return np.asarray(self._by_shape[shape_index] @ weights, np.int64)

    def copies_bytes(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the bytes of the fp8 copies of weights of such a rank, for each of the layouts."""
        return np.asarray(self._copies[shape_index] * sum_layers(stages), np.int64)


class PassWorkspaces:
    """What passes through a stage need beside what they keep, a column over shapes a stage."""

    def __init__(self, table: ShapeTable) -> None:
        self._table = table
        self._known: dict[Stage, NDArray[np.int64]] = {}

    def of(self, stage: Stage) -> NDArray[np.int64]:
        """Return the bytes of forward and backward, one row a shape."""
        if stage not in self._known:
            rows = [
                pass_workspace_bytes(
                    shape,
                    stage.num_layers,
                    has_embedding=stage.has_embedding,
                    has_head=stage.has_head,
                )
                for shape in self._table.shapes
            ]
            self._known[stage] = np.array(rows, np.int64).reshape(-1, 2)
        return self._known[stage]


class ShardedWorkspaces:
    """What passes hold of sharded parameters and gradients, a column over shapes a stage."""

    def __init__(self, table: ShapeTable, state: StateBytes) -> None:
        self._table = table
        self._state = state
        self._known: dict[tuple[Replication, Stage], NDArray[np.int64]] = {}

    def of(self, replication: Replication, stage: Stage) -> NDArray[np.int64]:
        """Return the bytes of forward and backward, one row a shape."""
        key = (replication, stage)
        if key not in self._known:
            by_tp = {
                shape.tp: self._pair(shape, replication, stage) for shape in self._table.shapes
            }
            rows = [by_tp[shape.tp] for shape in self._table.shapes]
            self._known[key] = np.array(rows, np.int64).reshape(-1, 2)
        return self._known[key]

    def _pair(self, shape: BlockShape, replication: Replication, stage: Stage) -> tuple[int, int]:
        if not replication.in_units:
            return 0, 0
        units = [sum(part.buckets) for part in reduced_parts(shape, stage, replication)]
        return sharded_workspace_bytes(units, self._state, replication.shards)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Everything that a layout's bytes are read from."""

    shapes: ShapeBytes
    counts: ParameterCounts
    state: StateBytes
    passes: PassWorkspaces
    workspaces: ShardedWorkspaces
    units: UnitPeaks
    moments: dict[tuple[str, Role, int, int], list[PeakCandidate]] = field(default_factory=dict)

    def fullest_moments(
        self, group: PipelineGroup, role: Role, num_microbatches: int
    ) -> list[PeakCandidate]:
        """Return the moments of a role, found once for all ZeRO stages."""
        key = (group.schedule.name, role, group.pp, num_microbatches)
        if key not in self.moments:
            self.moments[key] = fullest_moments(group.schedule, role, group.pp, num_microbatches)
        return self.moments[key]


def peak_bytes(space: Space, table: ShapeTable) -> Column:
    """Return the live bytes of each layout's fullest rank at its fullest moment."""
    state = StateBytes.of(space.stack, space.job.precision)
    workspaces = ShardedWorkspaces(table, state)
    sizes = _Sizes(
        ShapeBytes.of(table),
        ParameterCounts(table),
        state,
        PassWorkspaces(table),
        workspaces,
        UnitPeaks(space, table, state),
    )
    peaks = np.zeros(len(space), np.int64)
    for group in pipeline_groups(space, np.arange(len(space))):
        zero_stages = space.column("zero_stage")[group.indices]
        for zero_stage in np.unique(zero_stages).tolist():
            same = group._replace(indices=group.indices[zero_stages == zero_stage])
            peaks[same.indices] = _group_peaks(space, same, table, sizes, zero_stage)
    return peaks


def _group_peaks(
    space: Space, group: PipelineGroup, table: ShapeTable, sizes: _Sizes, zero_stage: int
) -> Column:
    """Return the peaks of layouts with one pipeline and one ZeRO stage."""
    shapes, dp = table.index[group.indices], space.column("dp")[group.indices]
    # Only whether a layout has replicas decides its parts: any degree above 1 stands for all.
    plan = ParallelPlan(pp=group.pp, dp=2, zero_stage=zero_stage)
    replication = replication_of(plan, space.stack, Mesh.of(plan, node_size=2))
    split, state = replication.shards, sizes.state
    if space.stack.root_unit:
        return sizes.units.of_layouts(
            group.indices, group.roles, group.pp, group.schedule, replication
        )
    peaks = np.zeros(len(group.indices), np.int64)
    for role in group.roles:
        parameters = sizes.counts.of_rank(shapes, role.stages)
        weights = _share(parameters, dp, is_split=split.parameters > 1)
        as_shard = (dp > 1) & (split.parameters > 1)
        weight = np.where(as_shard, state.sharded_parameter, state.parameter)
        # The optimizer's share is what it updates, with what that needs for a moment.
        updated = _share(parameters, dp, is_split=split.optimizer > 1)
        static = (
            weights * weight
            + _share(parameters, dp, is_split=split.gradients > 1) * state.gradient
            + updated * state.optimizer
            + sizes.counts.copies_bytes(shapes, role.stages)
        )
        moving = _moving_bytes(space, group, role, sizes, shapes, replication)
        # The update comes when all activations are gone: of both only the larger counts.
        moving = np.maximum(updated * state.update_temporary, moving)
        peaks = np.maximum(peaks, static + moving)
    return np.asarray(peaks, np.int64)


def _share(parameters: Column, dp: Column, *, is_split: bool) -> Column:
    return np.asarray(-(-parameters // dp) if is_split else parameters, np.int64)


def _moving_bytes(
    space: Space,
    group: PipelineGroup,
    role: Role,
    sizes: _Sizes,
    shape_index: Column,
    replication: Replication,
) -> Column:
    """Return activations and workspaces of a role at its fullest moment."""
    most = np.zeros(len(group.indices), np.int64)
    has_replicas = space.column("dp")[group.indices] > 1
    # Few numbers of microbatches tell layouts apart here: their moments are found once for each.
    microbatches = representative_microbatches(
        role, group.pp, space.num_microbatches[group.indices]
    )
    for number in np.unique(microbatches).tolist():
        chosen = np.flatnonzero(microbatches == number)
        shapes = shape_index[chosen]
        for moment in sizes.fullest_moments(group, role, number):
            bytes_then = _moment_bytes(moment, sizes, shapes)
            # Whole gradients, and parameters, of a unit are momentary only where shards are kept.
            if replication.zero_stage >= 2:
                which = 0 if moment.phase is Phase.FORWARD else 1
                sharded = sizes.workspaces.of(replication, moment.stage)[shapes, which]
                bytes_then = bytes_then + sharded * has_replicas[chosen]
            most[chosen] = np.maximum(most[chosen], bytes_then)
    return most


def _moment_bytes(moment: PeakCandidate, sizes: _Sizes, shapes: Column) -> Column:
    saved = sizes.shapes
    kept = (
        moment.layer_passes * saved.saved_layer[shapes]
        + moment.embedding_passes * saved.saved_embedding[shapes]
        + moment.head_passes * saved.saved_head[shapes]
    )
    which = 0 if moment.phase is Phase.FORWARD else 1
    return np.asarray(kept + sizes.passes.of(moment.stage)[shapes, which], np.int64)


def device_bytes_column(allocated: Column, stack: StackProfile) -> Column:
    """Return what the device shows as used, for each allocated peak."""
    rounding = (allocated * stack.allocator_fraction).astype(np.int64)
    return np.asarray(allocated + rounding + stack.context_bytes, np.int64)
