"""The exact peak memory of every layout of a space, without simulating any."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import StackProfile
from meshwright.planner.footprint.units import UnitPeaks
from meshwright.planner.space import (
    Column,
    Role,
    ShapeTable,
    Space,
    block_counts,
    fullest_moments,
    pipeline_roles,
    representative_microbatches,
)
from meshwright.simulator import RUNTIMES, Phase, Schedule
from meshwright.simulator.blocks import BlockShape, BlockTable, weight_copy_bytes
from meshwright.simulator.layout import Mesh, ParallelPlan, Stage
from meshwright.simulator.memory import (
    BlockBytes,
    StateBytes,
    block_bytes,
    pass_workspace_bytes,
    sharded_workspace_bytes,
)
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import (
    Replication,
    reduced_parts,
    replication_of,
    sum_layers,
)


class PipelineGroup(NamedTuple):
    """Layouts with the same pipeline: degree, schedule and virtual stages in model order."""

    indices: NDArray[np.int64]
    pp: int
    schedule: Schedule
    stages: tuple[Stage, ...]
    roles: list[Role]


def pipeline_groups(space: Space, indices: NDArray[np.int64]) -> Iterator[PipelineGroup]:
    """Yield the layouts among *indices* by pipeline, in a fixed order."""
    names = ("pp", "num_virtual_stages", "schedule")
    keys = np.stack([space.column(name)[indices] for name in names], axis=1)
    distinct, member = np.unique(keys, axis=0, return_inverse=True)
    schedules = tuple(RUNTIMES[space.stack.pipeline_runtime].values())
    for number, (pp, vpp, schedule) in enumerate(distinct.tolist()):
        chosen = indices[member.reshape(-1) == number]
        stages = space.virtual_stages(pp, vpp)
        yield PipelineGroup(chosen, pp, schedules[schedule], stages, pipeline_roles(stages, pp))


class ParameterCounts:
    """Parameters of one rank's blocks for each tensor-parallel degree of a space."""

    def __init__(self, table: ShapeTable) -> None:
        self._kinds = table.kinds
        by_tp = {shape.tp: shape for shape in table.shapes}
        counts = {
            tp: (
                *(shape.parameters[kind] for kind in table.kinds),
                shape.tied_parameters,
            )
            for tp, shape in by_tp.items()
        }
        rows = [counts[shape.tp] for shape in table.shapes]
        self._by_shape = np.array(rows, np.int64).reshape(len(rows), -1)
        copies = [weight_copy_bytes(shape, 1) for shape in table.shapes]
        self._copies = np.array(copies, np.int64)

    def of_rank(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the parameters of a rank that holds *stages*, for each of the layouts."""
        copies = sum(stage.has_head and not stage.has_embedding for stage in stages)
        weights = np.array([*block_counts(self._kinds, stages), copies], np.int64)
        return np.asarray(self._by_shape[shape_index] @ weights, np.int64)

    def copies_bytes(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the bytes of the fp8 copies of weights of such a rank, for each of the layouts."""
        return np.asarray(self._copies[shape_index] * sum_layers(stages), np.int64)


class PassWorkspaces:
    """What passes through a stage need beside what they keep, a column over shapes a stage."""

    def __init__(self, blocks: dict[BlockKind, BlockBytes[Column]]) -> None:
        self._blocks = blocks
        self._known: dict[Stage, NDArray[np.int64]] = {}

    def of(self, stage: Stage) -> NDArray[np.int64]:
        """Return the bytes of forward and backward, one column a shape."""
        if stage not in self._known:
            self._known[stage] = np.stack(pass_workspace_bytes(self._blocks, stage, np.maximum))
        return self._known[stage]


class ShardedWorkspaces:
    """What passes hold of sharded parameters and gradients, a column over shapes a stage."""

    def __init__(self, table: ShapeTable, state: StateBytes) -> None:
        self._table = table
        self._by_tp = {shape.tp: shape for shape in table.shapes}
        self._state = state
        self._known: dict[tuple[Replication, Stage], NDArray[np.int64]] = {}

    def of(self, replication: Replication, stage: Stage) -> NDArray[np.int64]:
        """Return the bytes of forward and backward, one column a shape."""
        key = (replication, stage)
        if key not in self._known:
            pairs = {tp: self._pair(shape, replication, stage) for tp, shape in self._by_tp.items()}
            rows = [pairs[shape.tp] for shape in self._table.shapes]
            self._known[key] = np.array(rows, np.int64).reshape(-1, 2).T
        return self._known[key]

    def _pair(self, shape: BlockShape, replication: Replication, stage: Stage) -> tuple[int, int]:
        if not replication.in_units:
            return 0, 0
        units = [sum(part.buckets) for part in reduced_parts(shape, stage, replication)]
        return sharded_workspace_bytes(units, self._state, replication.shards)


class _Sizes(NamedTuple):
    """Everything that a layout's bytes are read from; ``saved`` has a column for each kind."""

    kinds: tuple[BlockKind, ...]
    saved: NDArray[np.int64]
    counts: ParameterCounts
    state: StateBytes
    passes: PassWorkspaces
    sharded: ShardedWorkspaces


def peak_bytes(space: Space, table: ShapeTable, blocks: BlockTable) -> Column:
    """Return the live bytes of each layout's fullest rank at its fullest moment.

    Args:
        space: The layouts.
        table: Their shapes.
        blocks: Where what blocks hold is kept.
    """
    blocks.prepare(table.shapes)
    state = StateBytes.of(space.stack, space.job.precision)
    groups = pipeline_groups(space, np.arange(len(space)))
    peaks = np.zeros(len(space), np.int64)
    if space.stack.root_unit:
        units = UnitPeaks(space, table, blocks, state)
        for group in groups:
            zero_stages = space.column("zero_stage")[group.indices]
            for zero_stage in np.unique(zero_stages).tolist():
                chosen = group.indices[zero_stages == zero_stage]
                replication = _replication(space.stack, group.pp, zero_stage)
                peaks[chosen] = units.of_layouts(
                    chosen, group.roles, group.pp, group.schedule, replication
                )
        return peaks
    known = [block_bytes(blocks, shape) for shape in table.shapes]
    columns = {kind: _block_columns([each[kind] for each in known]) for kind in table.kinds}
    sizes = _Sizes(
        table.kinds,
        np.stack([columns[kind].saved for kind in table.kinds], axis=1),
        ParameterCounts(table),
        state,
        PassWorkspaces(columns),
        ShardedWorkspaces(table, state),
    )
    for group in groups:
        peaks[group.indices] = _group_peaks(space, group, table.index[group.indices], sizes)
    return peaks


def _block_columns(known: list[BlockBytes[int]]) -> BlockBytes[Column]:
    return BlockBytes[Column](*np.array(known, np.int64).reshape(len(known), -1).T)


def _replication(stack: StackProfile, pp: int, zero_stage: int) -> Replication:
    # Only whether a layout has replicas decides its parts: any degree above 1 stands for all.
    plan = ParallelPlan(pp=pp, dp=2, zero_stage=zero_stage)
    return replication_of(plan, stack, Mesh.of(plan, node_size=2))


def _group_peaks(space: Space, group: PipelineGroup, shapes: Column, sizes: _Sizes) -> Column:
    """Return the peaks of layouts with one pipeline."""
    state, dp = sizes.state, space.column("dp")[group.indices]
    # Without replicas nothing is split, as at stage 0.
    zero_stages = np.where(dp > 1, space.column("zero_stage")[group.indices], 0)
    distinct, sharding = np.unique(zero_stages, return_inverse=True)
    replications = [_replication(space.stack, group.pp, each) for each in distinct.tolist()]
    is_split = np.array([replication.shards for replication in replications])[sharding] > 1
    of_weights, of_gradients, of_optimizer = np.where(is_split, dp[:, None], 1).T
    weight = np.where(of_weights > 1, state.sharded_parameter, state.parameter)
    peaks = np.zeros(len(group.indices), np.int64)
    for role in group.roles:
        parameters = sizes.counts.of_rank(shapes, role.stages)
        # The optimizer's share is what it updates, with what that needs for a moment.
        updated = -(-parameters // of_optimizer)
        static = (
            -(-parameters // of_weights) * weight
            + -(-parameters // of_gradients) * state.gradient
            + updated * state.optimizer
            + sizes.counts.copies_bytes(shapes, role.stages)
        )
        microbatches = space.num_microbatches[group.indices]
        candidates = _candidates(group, role, microbatches, sizes.kinds)
        workspaces = _workspaces(role, replications, sizes)
        kept = np.einsum("lmb,lb->lm", candidates[:, :, :-2], sizes.saved[shapes])
        phases, stages = candidates[:, :, -2], candidates[:, :, -1]
        needed = workspaces[sharding[:, None], stages, phases, shapes[:, None]]
        # The update comes when all activations are gone: of both only the larger counts.
        moving = np.maximum(updated * state.update_temporary, (kept + needed).max(axis=1))
        peaks = np.maximum(peaks, static + moving)
    return np.asarray(peaks, np.int64)


def _candidates(
    group: PipelineGroup, role: Role, microbatches: Column, kinds: tuple[BlockKind, ...]
) -> NDArray[np.int64]:
    """Return the moments among which each layout's peak is, as `PeakCandidate` in numbers."""
    representative = representative_microbatches(role, group.pp, microbatches)
    numbers, member = np.unique(representative, return_inverse=True)
    stages, phases = list(dict.fromkeys(role.stages)), list(Phase)
    moments = [
        [
            (*moment.passes, phases.index(moment.phase), stages.index(moment.stage))
            for moment in fullest_moments(group.schedule, role, group.pp, number, kinds)
        ]
        for number in numbers.tolist()
    ]
    # Repeated where there are fewer, so that all layouts have as many.
    longest = max(map(len, moments))
    rows = [each + each[:1] * (longest - len(each)) for each in moments]
    return np.array(rows, np.int64)[member.reshape(-1)]


def _workspaces(role: Role, replications: list[Replication], sizes: _Sizes) -> NDArray[np.int64]:
    """Return what passes need for a moment, by sharding, kind of stage, phase and shape."""
    kinds = list(dict.fromkeys(role.stages))
    passes = np.stack([sizes.passes.of(stage) for stage in kinds])
    # Whole gradients, and parameters, of a unit are momentary only where shards are kept.
    return np.stack(
        [
            passes + [sizes.sharded.of(replication, stage) for stage in kinds]
            if replication.zero_stage >= 2
            else passes
            for replication in replications
        ]
    )


def device_bytes_column(allocated: Column, stack: StackProfile) -> Column:
    """Return what the device shows as used, for each allocated peak."""
    rounding = (allocated * stack.allocator_fraction).astype(np.int64)
    return np.asarray(allocated + rounding + stack.context_bytes, np.int64)
