"""The exact peak memory of every layout of a space, without simulating any."""

from collections.abc import Iterator
from dataclasses import astuple
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster
from meshwright.planner.footprint.replicas import Kind, ReplicaWorkspaces
from meshwright.planner.footprint.units import UnitPeaks
from meshwright.planner.space import (
    Column,
    Role,
    ShapeTable,
    Space,
    block_counts,
    distinct,
    fullest_moments,
    pipeline_roles,
    representative_microbatches,
)
from meshwright.simulator import RUNTIMES, Phase, Schedule
from meshwright.simulator.blocks import BlockTable, weight_copy_bytes
from meshwright.simulator.layout import PLAN_FIELDS, Axis, Stage, model_stages
from meshwright.simulator.memory import (
    BlockBytes,
    Overheads,
    StateBytes,
    block_bytes,
    num_communicators,
    pass_workspace_bytes,
    workspace_bytes,
)
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import (
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
    names = ("pp", "num_virtual_stages", "schedule", "stages")
    keys = [space.column(name)[indices] for name in names]
    first, member = distinct(keys)
    schedules = tuple(RUNTIMES[space.stack.pipeline_runtime].values())
    ends = np.cumsum(np.bincount(member, minlength=len(first)))
    by_group = np.split(indices[np.argsort(member, kind="stable")], ends[:-1])
    for (pp, vpp, schedule, code), chosen in zip(
        np.stack(keys, axis=1)[first].tolist(), by_group, strict=bool(len(first))
    ):
        layers = space.layers(pp, vpp, PLAN_FIELDS["stages"].value(code))
        stages = model_stages(space.job.model, layers)
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
        self._by_shape = np.array(rows, np.int64).reshape(len(rows), len(table.kinds) + 1)
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

    def __init__(
        self, blocks: dict[BlockKind, BlockBytes[Column]], *, holds_messages: bool
    ) -> None:
        self._blocks = blocks
        self._holds_messages = holds_messages
        self._known: dict[Stage, NDArray[np.int64]] = {}

    def of(self, stage: Stage) -> NDArray[np.int64]:
        """Return the bytes of forward and backward, one column a shape."""
        if stage not in self._known:
            pair = pass_workspace_bytes(
                self._blocks, stage, np.maximum, holds_gradient=self._holds_messages
            )
            self._known[stage] = np.stack(pair)
        return self._known[stage]


class _Sizes(NamedTuple):
    """Everything that a layout's bytes are read from.

    ``saved`` and ``buffers`` have a column for each kind, ``messages`` two: of what it receives,
    then of what it sends.
    """

    kinds: tuple[BlockKind, ...]
    saved: NDArray[np.int64]
    buffers: NDArray[np.int64]
    messages: NDArray[np.int64]
    counts: ParameterCounts
    passes: PassWorkspaces
    replicas: ReplicaWorkspaces


def peak_bytes(
    space: Space, table: ShapeTable, blocks: BlockTable, indices: NDArray[np.int64] | None = None
) -> Column:
    """Return the live bytes of each layout's fullest rank at its fullest moment.

    Args:
        space: The layouts.
        table: Their shapes.
        blocks: Where what blocks hold is kept.
        indices: Which layouts; by default all.
    """
    return Footprint(space, table, blocks).peak_bytes(
        np.arange(len(space)) if indices is None else indices
    )


class Footprint:
    """The exact memory of layouts of a space, found once for what they share."""

    def __init__(self, space: Space, table: ShapeTable, blocks: BlockTable) -> None:
        self._space = space
        self._table = table
        blocks.prepare(table.shapes)
        self._units = UnitPeaks(space, table, blocks) if space.stack.is_fully_sharded else None
        self._sizes = (
            None
            if space.stack.is_fully_sharded
            else _sizes(table, blocks, holds_messages=space.stack.holds_messages)
        )

    @property
    def is_slow(self) -> bool:
        """Whether the memory of each layout is found apart, which takes a millisecond."""
        return self._units is not None

    def peak_bytes(self, indices: NDArray[np.int64]) -> Column:
        """Return the live bytes of the fullest rank of each layout at its fullest moment."""
        peaks = np.zeros(len(self._space), np.int64)
        for group in pipeline_groups(self._space, indices):
            if self._sizes is not None:
                shapes = self._table.index[group.indices]
                peaks[group.indices] = _group_peaks(self._space, group, shapes, self._sizes)
                continue
            assert self._units is not None
            kinds, member = _kinds(self._space, group.indices)
            for number, kind in enumerate(kinds):
                chosen = group.indices[member == number]
                peaks[chosen] = self._units.of_layouts(
                    chosen, group.roles, group.pp, group.schedule, kind
                )
        return peaks[indices]


def _sizes(table: ShapeTable, blocks: BlockTable, *, holds_messages: bool) -> _Sizes:
    known = [block_bytes(blocks, shape) for shape in table.shapes]
    columns = {kind: _block_columns([each[kind] for each in known]) for kind in table.kinds}
    of_kinds = [columns[kind] for kind in table.kinds]
    messages = [*(each.received for each in of_kinds), *(each.sent for each in of_kinds)]
    return _Sizes(
        table.kinds,
        np.stack([each.saved for each in of_kinds], axis=1),
        np.stack([each.buffer for each in of_kinds], axis=1),
        np.stack(messages, axis=1),
        ParameterCounts(table),
        PassWorkspaces(columns, holds_messages=holds_messages),
        ReplicaWorkspaces(table, known),
    )


def _block_columns(known: list[BlockBytes[int]]) -> BlockBytes[Column]:
    rows = np.array(known, np.int64).reshape(len(known), len(BlockBytes._fields))
    return BlockBytes[Column](*rows.T)


def _kinds(space: Space, indices: NDArray[np.int64]) -> tuple[list[Kind], Column]:
    """Return the ways in which layouts with one pipeline share states, and which one each has."""
    has_replicas = space.column("dp")[indices] > 1
    zero_stages = np.where(has_replicas, space.column("zero_stage")[indices], 0)
    columns = [has_replicas.astype(np.int64), zero_stages, space.sharing[indices]]
    first, member = distinct(columns)
    pairs = zip(indices[first].tolist(), has_replicas[first].tolist(), strict=True)
    return [Kind.of(space, index, has_replicas=several) for index, several in pairs], member


def _group_peaks(space: Space, group: PipelineGroup, shapes: Column, sizes: _Sizes) -> Column:
    """Return the peaks of layouts with one pipeline."""
    kinds, member = _kinds(space, group.indices)
    num_shards = space.num_shards[group.indices]
    is_split = np.array([kind.replication.shards for kind in kinds])[member] > 1
    of_weights, of_gradients, of_optimizer = np.where(is_split, num_shards[:, None], 1).T
    state = StateBytes(*np.array([astuple(kind.state) for kind in kinds], np.int64)[member].T)
    weight = np.where(of_weights > 1, state.sharded_parameter, state.parameter)
    microbatches = space.num_microbatches[group.indices]
    first, family = distinct([shapes, microbatches, member])
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
            + _shared_buffers(sizes, role)[shapes]
        )
        holds = space.stack.holds_messages and group.pp > 1
        candidates = _candidates(
            group, role, microbatches[first], sizes.kinds, holds_messages=holds
        )
        devices = space.num_gpus // group.pp
        workspaces = _workspaces(role, kinds, np.unique(shapes), devices, sizes)
        kept = _kept(candidates[:, :, :-2], sizes, shapes[first])
        phases, stages = candidates[:, :, -2], candidates[:, :, -1]
        needed = workspaces[member[first][:, None], stages, phases, shapes[first][:, None]]
        # The update comes when all activations are gone: of both only the larger counts.
        at_end = np.maximum(updated * state.update_temporary, _cast_last(kinds, member, parameters))
        at_end += _held_between_steps(sizes, role)[shapes] * holds
        peaks = np.maximum(peaks, static + np.maximum(at_end, (kept + needed).max(axis=1)[family]))
    return np.asarray(peaks, np.int64)


def _shared_buffers(sizes: _Sizes, role: Role) -> Column:
    """Return what blocks of a rank share throughout the step, one row a shape."""
    kinds = {kind for stage in role.stages for kind, _ in stage.blocks}
    own = [number for number, kind in enumerate(sizes.kinds) if kind in kinds]
    return np.asarray(sizes.buffers[:, own].max(axis=1), np.int64)


def _kept(counts: NDArray[np.int64], sizes: _Sizes, used: Column) -> NDArray[np.int64]:
    """Return what is kept and held in moments of layouts of the shapes that *used* indexes."""
    columns = np.concatenate([sizes.saved[used], sizes.messages[used]], axis=1)
    return np.asarray(np.einsum("lmb,lb->lm", counts, columns[:, : counts.shape[2]]), np.int64)


def _held_between_steps(sizes: _Sizes, role: Role) -> Column:
    """Return what modules hold of messages when all activations are gone, one row a shape."""
    firsts = [stage.blocks[0].kind for stage in role.stages if not stage.has_embedding]
    weights = np.array([2 * firsts.count(kind) for kind in sizes.kinds], np.int64)
    return np.asarray(sizes.messages[:, : len(sizes.kinds)] @ weights, np.int64)


def _cast_last(kinds: list[Kind], member: Column, parameters: Column) -> Column:
    """Return what holds gradients that are cast after the last pass, of each layout."""
    is_cast = np.array([kind.casts_last for kind in kinds])[member]
    widths = np.array([kind.cast_bytes(1) for kind in kinds], np.int64)[member]
    return np.asarray(parameters * widths * is_cast, np.int64)


def _candidates(
    group: PipelineGroup,
    role: Role,
    microbatches: Column,
    kinds: tuple[BlockKind, ...],
    *,
    holds_messages: bool,
) -> NDArray[np.int64]:
    """Return the moments among which each layout's peak is, as `PeakCandidate` in numbers."""
    representative = representative_microbatches(group.schedule, role, group.pp, microbatches)
    numbers, member = np.unique(representative, return_inverse=True)
    stages, phases = list(dict.fromkeys(role.stages)), list(Phase)
    moments = [
        [
            (*moment.passes, phases.index(moment.phase), stages.index(moment.stage))
            for moment in fullest_moments(
                group.schedule, role, group.pp, number, kinds, holds_messages=holds_messages
            )
        ]
        for number in numbers.tolist()
    ]
    # Repeated where there are fewer, so that all layouts have as many.
    longest = max(map(len, moments))
    rows = [each + each[:1] * (longest - len(each)) for each in moments]
    return np.array(rows, np.int64)[member.reshape(-1)]


def _workspaces(
    role: Role, kinds: list[Kind], used: Column, devices: int, sizes: _Sizes
) -> NDArray[np.int64]:
    """Return what passes need for a moment, by sharing, kind of stage, phase and shape."""
    stages = list(dict.fromkeys(role.stages))
    return np.stack(
        [
            [
                sizes.replicas.added_to(sizes.passes.of(stage), kind, stage, used, devices)
                for stage in stages
            ]
            for kind in kinds
        ]
    )


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
    axes = np.stack([space.column(axis) for axis in Axis], axis=1)
    axes = axes if indices is None else axes[indices]
    degrees, member = np.unique(axes, axis=0, return_inverse=True)
    is_tied = space.job.model.tied_embeddings
    each = [
        Overheads.of(
            cluster.device,
            space.stack,
            num_communicators(dict(zip(Axis, row, strict=True)), is_tied=is_tied),
        )
        for row in degrees.tolist()
    ]
    outside = np.array([overheads.outside_bytes for overheads in each], np.int64)
    allocated = live + workspace_bytes(cluster.device, space.stack)
    rounding = (allocated * space.stack.allocator_fraction).astype(np.int64)
    return np.asarray(allocated + rounding + outside[member.reshape(-1)], np.int64)
