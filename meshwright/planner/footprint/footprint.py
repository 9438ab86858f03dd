"""The exact peak memory of every layout of a space, without simulating any."""

from collections.abc import Callable
from dataclasses import astuple
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import Cluster
from meshwright.planner.footprint.groups import PipelineGroup, pipeline_groups
from meshwright.planner.footprint.least import MOST_BYTES, least_bytes
from meshwright.planner.footprint.parameters import ParameterCounts
from meshwright.planner.footprint.replicas import Kind, ReplicaWorkspaces, kinds_of
from meshwright.planner.footprint.units import UnitPeaks
from meshwright.planner.space import (
    BESIDE,
    Column,
    MessageColumns,
    Pipeline,
    Role,
    ShapeTable,
    Space,
    distinct,
    fullest_moments,
    representative_microbatches,
)
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import Axis, Mesh, Stage
from meshwright.simulator.memory import (
    BlockBytes,
    Overheads,
    StateBytes,
    block_bytes,
    num_communicators,
    pair_bytes,
    pass_workspace_bytes,
    workspace_bytes,
)
from meshwright.simulator.model import EMBEDDING, HEAD, BlockKind, shares_table

Progress = Callable[[str, int, int], None]


class PassWorkspaces:
    """What passes through a stage need beside what they keep, a column over shapes a stage."""

    def __init__(
        self, blocks: dict[BlockKind, BlockBytes[Column]], *, holds_messages: bool
    ) -> None:
        self._blocks = blocks
        self._holds_messages = holds_messages
        self._known: dict[Stage, NDArray[np.int64]] = {}
        self._pairs: dict[tuple[Stage, Stage], Column] = {}

    def of(self, stage: Stage) -> NDArray[np.int64]:
        """Return the bytes of forward and backward, one column a shape."""
        if stage not in self._known:
            pair = pass_workspace_bytes(
                self._blocks, stage, np.maximum, holds_gradient=self._holds_messages
            )
            self._known[stage] = np.stack(pair)
        return self._known[stage]

    def of_pair(self, forward: Stage, backward: Stage) -> Column:
        """Return what two passes beside each other add, of each shape."""
        pair = forward, backward
        if pair not in self._pairs:
            self._pairs[pair] = pair_bytes(self._blocks, forward, backward, np.maximum)
        return self._pairs[pair]


class _Sizes(NamedTuple):
    """Everything that a layout's bytes are read from.

    ``saved`` and ``buffers`` have a column for each kind, ``messages`` those that
    ``message_columns`` says; None where a runtime holds none beside those of passes in flight.
    """

    kinds: tuple[BlockKind, ...]
    saved: NDArray[np.int64]
    buffers: NDArray[np.int64]
    messages: NDArray[np.int64]
    message_columns: MessageColumns | None
    counts: ParameterCounts
    passes: PassWorkspaces
    replicas: ReplicaWorkspaces


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
            else _sizes(table, blocks, holds_messages=space.stack.holds_messages)
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
                progress(f"sizing the memory of {len(indices):,} layouts", done, total)

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
                peaks[group.indices] = _group_peaks(
                    self._space, group, shapes, (own, member), self._sizes
                )
        return peaks[indices]


def _sizes(table: ShapeTable, blocks: BlockTable, *, holds_messages: bool) -> _Sizes:
    known = [block_bytes(blocks, shape, others=table.kinds) for shape in table.shapes]
    columns = {kind: _block_columns([each[kind] for each in known]) for kind in table.kinds}
    of_kinds = [columns[kind] for kind in table.kinds]
    messages, message_columns = _messages(table.kinds, columns)
    return _Sizes(
        table.kinds,
        np.stack([each.saved for each in of_kinds], axis=1),
        np.stack([each.buffer for each in of_kinds], axis=1),
        messages,
        message_columns if holds_messages else None,
        ParameterCounts(table),
        PassWorkspaces(columns, holds_messages=holds_messages),
        ReplicaWorkspaces(table, blocks, known),
    )


def _messages(
    kinds: tuple[BlockKind, ...], columns: dict[BlockKind, BlockBytes[Column]]
) -> tuple[NDArray[np.int64], MessageColumns]:
    """Return the sizes of messages, those alike in all shapes once, and which is whose."""
    # A pipeline begins with the embedding and ends with the head: they get and hand on none.
    received = {kind: columns[kind].received for kind in kinds if kind != EMBEDDING}
    sent = {kind: columns[kind].sent for kind in kinds if kind != HEAD}
    each = np.stack([*received.values(), *sent.values()], axis=1)
    sizes, numbers = np.unique(each, axis=1, return_inverse=True)
    of_received, of_sent = np.split(numbers.reshape(-1), [len(received)])
    return sizes, MessageColumns(
        dict(zip(received, of_received.tolist(), strict=True)),
        dict(zip(sent, of_sent.tolist(), strict=True)),
    )


def _block_columns(known: list[BlockBytes[int]]) -> BlockBytes[Column]:
    rows = np.array(known, np.int64).reshape(len(known), len(BlockBytes._fields))
    return BlockBytes[Column](*rows.T)


def _group_peaks(
    space: Space,
    group: PipelineGroup,
    shapes: Column,
    sharing: tuple[list[Kind], Column],
    sizes: _Sizes,
) -> Column:
    """Return the peaks of layouts with one pipeline."""
    kinds, member = sharing
    num_shards = space.num_shards[group.indices]
    is_split = np.array([kind.replication.shards for kind in kinds])[member] > 1
    of_weights, of_gradients, of_optimizer = np.where(is_split, num_shards[:, None], 1).T
    state = StateBytes(*np.array([astuple(kind.state) for kind in kinds], np.int64)[member].T)
    weight = np.where(of_weights > 1, state.sharded_parameter, state.parameter)
    moved = [kind.moved for kind in kinds]
    optimizer_stays, gradients_stay = 1 - np.array(moved, np.int64)[member].T
    microbatches = space.num_microbatches[group.indices]
    first, family = distinct([shapes, microbatches, member])
    peaks = np.zeros(len(group.indices), np.int64)
    # What schedules hold is known of those that run one pass after the other.
    messages = None if group.pipeline.schedule.runs_beside else sizes.message_columns
    for role in group.pipeline.roles:
        parameters = sizes.counts.of_rank(shapes, role.stages)
        experts = sizes.counts.of_experts(shapes, role.stages)
        others = parameters - experts
        # The optimizer's share is what it updates, with what that needs for a moment.
        shards = space.expert_shards[group.indices]
        updated = (-(-others // of_optimizer) + -(-experts // shards)) * optimizer_stays
        static = (
            (-(-others // of_weights) + -(-experts // np.where(of_weights > 1, shards, 1))) * weight
            + (-(-others // of_gradients) + -(-experts // np.where(of_gradients > 1, shards, 1)))
            * (state.gradient + state.bucket)
            * gradients_stay
            + updated * state.optimizer
            + sizes.counts.beside_bytes(shapes, role.stages)
            + _shared_buffers(sizes, role)[shapes]
        )
        candidates = _candidates(group.pipeline, role, microbatches[first], messages)
        devices = space.num_gpus // group.pipeline.pp
        workspaces = _workspaces(role, kinds, shapes[distinct([shapes])[0]], devices, sizes)
        kept = _kept(candidates[:, :, :-2], sizes, shapes[first])
        own = shapes[first], member[first]
        needed = _needed(candidates, own, workspaces, _paired(role, candidates, sizes))
        # The update comes when all activations are gone: of both only the larger counts.
        at_end = np.maximum(updated * state.update_temporary, _cast_last(kinds, member, parameters))
        at_end += _held_between_steps(sizes, role, messages)[shapes]
        peaks = np.maximum(peaks, static + np.maximum(at_end, (kept + needed).max(axis=1)[family]))
    return np.asarray(peaks, np.int64)


def _shared_buffers(sizes: _Sizes, role: Role) -> Column:
    """Return what blocks of a rank share throughout the step, one row a shape."""
    kinds = {kind for stage in role.stages for kind, _ in stage.passes}
    own = [number for number, kind in enumerate(sizes.kinds) if kind in kinds]
    return np.asarray(sizes.buffers[:, own].max(axis=1), np.int64)


def _kept(counts: NDArray[np.int64], sizes: _Sizes, used: Column) -> NDArray[np.int64]:
    """Return what is kept and held in moments of layouts of the shapes that *used* indexes."""
    columns = np.concatenate([sizes.saved[used], sizes.messages[used]], axis=1)
    return np.asarray(np.einsum("lmb,lb->lm", counts, columns[:, : counts.shape[2]]), np.int64)


def _held_between_steps(sizes: _Sizes, role: Role, columns: MessageColumns | None) -> Column:
    """Return what modules hold of messages when all activations are gone, one row a shape."""
    if columns is None:
        return np.zeros(len(sizes.messages), np.int64)
    weights = 2 * columns.of(role.stages)[1::2].sum(axis=0)
    return np.asarray(sizes.messages @ weights, np.int64)


def _cast_last(kinds: list[Kind], member: Column, parameters: Column) -> Column:
    """Return what holds gradients that are cast after the last pass, of each layout."""
    is_cast = np.array([kind.casts_last for kind in kinds])[member]
    widths = np.array([kind.cast_bytes(1) for kind in kinds], np.int64)[member]
    return np.asarray(parameters * widths * is_cast, np.int64)


def _candidates(
    pipeline: Pipeline, role: Role, microbatches: Column, messages: MessageColumns | None
) -> NDArray[np.int64]:
    """Return the moments among which each layout's peak is, as `fullest_moments` has them."""
    representative = representative_microbatches(
        pipeline, role, microbatches, holds_messages=messages is not None
    )
    first, member = distinct([representative])
    return fullest_moments(pipeline, role, representative[first], messages)[member]


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


def _paired(role: Role, candidates: NDArray[np.int64], sizes: _Sizes) -> NDArray[np.int64] | None:
    """Return what two passes beside each other need, by their stages and shape, where some are."""
    if not (candidates[:, :, -2] == BESIDE).any():
        return None
    stages = list(dict.fromkeys(role.stages))
    return np.stack([sizes.passes.of_pair(*each) for each in product(stages, repeat=2)])


def _needed(
    candidates: NDArray[np.int64],
    own: tuple[Column, Column],
    workspaces: NDArray[np.int64],
    pairs: NDArray[np.int64] | None,
) -> NDArray[np.int64]:
    """Return what the passes of moments need, of layouts with their *own* shapes and sharing."""
    shapes, member = (each[:, None] for each in own)
    phases, stages = candidates[:, :, -2], candidates[:, :, -1]
    if pairs is None:
        return workspaces[member, stages, phases, shapes]
    alone = phases != BESIDE
    needed = workspaces[member, stages * alone, phases * alone, shapes]
    return np.where(alone, needed, pairs[np.where(alone, 0, stages), shapes])


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
    return np.asarray(allocated + rounding + outside[member], np.int64)


def _mesh(numbers: dict[str, int]) -> Mesh:
    """Return the mesh of the numbers of its fields; nodes do not matter."""
    ep, etp, inner = (numbers.pop(name) for name in ("ep", "etp", "cp_inner"))
    experts = etp or numbers["tp"], ep
    return Mesh(node_size=1, experts=experts, cp_inner=inner or 1, **numbers)
