"""What passes of a pipeline's ranks keep, need and hold of messages, in columns over layouts."""

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.footprint.parameters import ParameterCounts
from meshwright.planner.footprint.replicas import Kind, ReplicaWorkspaces
from meshwright.planner.space import (
    BESIDE,
    Column,
    MessageColumns,
    Pipeline,
    Role,
    ShapeTable,
    distinct,
    few_rows,
    fullest_moments,
    representative_microbatches,
)
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import (
    BlockBytes,
    block_bytes,
    captures_whole_layers,
    most_messages,
    pair_bytes,
    pass_workspace_bytes,
)
from meshwright.simulator.model import EMBEDDING, HEAD, BlockKind

MOST_ROWS = 512  # at a time: what is made of them stays in caches


class PassWorkspaces:
    """What passes through a stage need beside what they keep, a column over shapes a stage."""

    def __init__(
        self, blocks: dict[BlockKind, BlockBytes[Column]], *, holds_messages: bool, has_pools: bool
    ) -> None:
        self._blocks, self._has_pools = blocks, has_pools
        self._holds_messages = holds_messages
        self._nothing = next(iter(blocks.values())).saved * 0
        self._known: dict[Stage, NDArray[np.int64]] = {}
        self._saved: dict[Stage, Column] = {}
        self._pairs: dict[tuple[Stage, Stage], Column] = {}

    def of(self, stage: Stage) -> NDArray[np.int64]:
        """Return the bytes of forward and backward, one column a shape."""
        if stage not in self._known:
            pair = pass_workspace_bytes(
                self._blocks,
                stage,
                np.maximum,
                holds_gradient=self._holds_messages,
                has_pools=self._has_pools,
            )
            self._known[stage] = np.stack(pair)
        return self._known[stage]

    def saved_ahead(self, stage: Stage) -> Column:
        """Return what a pass through a stage keeps of all but the head, of each shape."""
        if stage not in self._saved:
            runs = [
                (self._blocks[kind].saved, count) for kind, count in stage.passes if kind != HEAD
            ]
            self._saved[stage] = sum((saved * count for saved, count in runs), start=self._nothing)
        return self._saved[stage]

    def of_pair(self, forward: Stage, backward: Stage) -> Column:
        """Return what two passes beside each other add, of each shape."""
        pair = forward, backward
        if pair not in self._pairs:
            self._pairs[pair] = pair_bytes(self._blocks, forward, backward, np.maximum)
        return self._pairs[pair]


class Sizes(NamedTuple):
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

    @classmethod
    def of(cls, table: ShapeTable, blocks: BlockTable, *, holds_messages: bool) -> "Sizes":
        """Return those of the shapes of *table*."""
        known = [block_bytes(blocks, shape, others=table.kinds) for shape in table.shapes]
        columns = {kind: _block_columns([each[kind] for each in known]) for kind in table.kinds}
        of_kinds = [columns[kind] for kind in table.kinds]
        messages, message_columns = _messages(table.kinds, columns)
        return cls(
            table.kinds,
            np.stack([each.saved for each in of_kinds], axis=1),
            np.stack([each.buffer for each in of_kinds], axis=1),
            messages,
            message_columns if holds_messages else None,
            ParameterCounts(table),
            PassWorkspaces(
                columns,
                holds_messages=holds_messages,
                has_pools=captures_whole_layers(table.shapes[0]),
            ),
            ReplicaWorkspaces(table, blocks, known),
        )

    def shared_buffers(self, role: Role) -> Column:
        """Return what blocks of a rank share throughout the step, one row a shape."""
        kinds = {kind for stage in role.stages for kind, _ in stage.passes}
        own = [number for number, kind in enumerate(self.kinds) if kind in kinds]
        return np.asarray(self.buffers[:, own].max(axis=1), np.int64)

    def workspaces(
        self, role: Role, sharing: Sequence[Kind | None], used: Column, devices: int
    ) -> NDArray[np.int64]:
        """Return what passes need for a moment, by sharing, stage that differs, phase and shape.

        Args:
            role: Whose passes.
            sharing: The ways in which states are shared, as far as passes know of it.
            used: Shapes that are asked for.
            devices: Of a stage: data- times tensor-parallel ranks.
        """
        added = self.replicas.added_to
        stages = [(stage, self.passes.of(stage)) for stage in dict.fromkeys(role.stages)]
        return np.stack(
            [
                [added(alone, kind, stage, used, devices) for stage, alone in stages]
                for kind in sharing
            ]
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


class Layouts(NamedTuple):
    """Layouts with one pipeline: number of shape, microbatches, and number of way of sharing."""

    shapes: Column
    microbatches: Column
    sharing: Column

    def chosen(self, rows: Column) -> "Layouts":
        """Return those in *rows*."""
        return Layouts(*(column[rows] for column in self))


class RolePasses:
    """The passes of ranks of a role, whatever parameters they hold.

    Args:
        pipeline: The pipeline.
        role: Which of its ranks.
        sizes: What is read from the layouts' shapes.
        workspaces: What passes need for a moment, by sharing, kind of stage, phase and shape.
    """

    def __init__(
        self, pipeline: Pipeline, role: Role, sizes: Sizes, workspaces: NDArray[np.int64]
    ) -> None:
        self._pipeline = pipeline
        self._role = role
        self._sizes = sizes
        self._workspaces = workspaces
        # What schedules hold is known of those that run one pass after the other.
        self._messages = None if pipeline.schedule.runs_beside else sizes.message_columns

    @property
    def held_between_steps(self) -> Column:
        """What modules hold of messages when all activations are gone, one row a shape."""
        if self._messages is None:
            return np.zeros(len(self._sizes.messages), np.int64)
        weights = 2 * self._messages.of(self._role.stages)[1::2].sum(axis=0)
        return np.asarray(self._sizes.messages @ weights, np.int64)

    def most_bytes(self, own: Layouts) -> Column:
        """Return no fewer bytes than the fullest moment of each layout's has.

        In no order are more passes in flight, or messages held, and none keeps or needs more.
        """
        sizes, (shapes, microbatches, sharing) = self._sizes, own
        first, member = distinct([microbatches])
        most = np.array([self._most(each) for each in microbatches[first].tolist()], np.int64)
        passes, last, messages = most[member].T
        saved = np.max([sizes.passes.saved_ahead(stage) for stage in self._stages], axis=0)
        kept = passes * saved[shapes]
        if self._role.stages[-1].has_head:
            kept += last * sizes.saved[:, -1][shapes]  # the head's column is the last one
        kept += messages * sizes.messages.max(axis=1)[shapes]
        needed = self._workspaces.max(axis=(1, 2))[sharing, shapes]
        pairs = 0 if self._pairs is None else self._pairs.max(axis=0)[shapes]
        return np.asarray(kept + needed + pairs, np.int64)

    def _most(self, num_microbatches: int) -> tuple[int, int, int]:
        """Return the most passes in flight, those of the last stage, and the most messages."""
        schedule, pp, vpp = self._pipeline.schedule, self._pipeline.pp, len(self._role.stages)
        group = schedule.group(pp, num_microbatches)
        # Through the last stage of whole groups as many are in flight as with no other stage.
        passes, last = (
            schedule.in_flight(self._role.first, pp, num_microbatches, count)
            for count in (vpp, vpp if num_microbatches % group else 1)
        )
        return passes, last, 0 if self._messages is None else most_messages(vpp, group - pp)

    def bytes(self, own: Layouts) -> Column:
        """Return what passes keep, hold of messages and need, at each layout's fullest moment."""
        first, family = distinct([*own])
        shapes, microbatches, sharing = own.chosen(first)
        moments, member = self._moments(microbatches)
        peaks = np.empty(len(first), np.int64)
        for rows in few_rows(len(first), MOST_ROWS):
            known, of = moments[member[rows]], shapes[rows]
            kept = self._kept(known[:, :, :-2], of)
            needed = self._needed(known, of[:, None], sharing[rows, None])
            np.max(np.add(kept, needed, out=kept), axis=1, out=peaks[rows])
        return peaks[family]

    def _moments(self, microbatches: Column) -> tuple[NDArray[np.int64], Column]:
        """Return moments as `fullest_moments` has them, and among which each layout's peak is."""
        holds = self._messages is not None
        first, member = distinct([microbatches])
        representative = [
            representative_microbatches(self._pipeline, self._role, each, holds_messages=holds)
            for each in microbatches[first].tolist()
        ]
        numbers, place = np.unique(representative, return_inverse=True)
        found = fullest_moments(self._pipeline, self._role, numbers, self._messages)
        return found, place.reshape(-1)[member]

    def _kept(self, counts: NDArray[np.int64], shapes: Column) -> NDArray[np.int64]:
        """Return what is kept and held in moments of layouts of such *shapes*."""
        columns = np.concatenate([self._sizes.saved[shapes], self._sizes.messages[shapes]], axis=1)
        return np.asarray(np.einsum("lmb,lb->lm", counts, columns[:, : counts.shape[2]]), np.int64)

    def _needed(
        self, moments: NDArray[np.int64], shapes: Column, sharing: Column
    ) -> NDArray[np.int64]:
        """Return what the passes of *moments* need, of layouts with such shapes and sharing."""
        phases, stages = moments[:, :, -2], moments[:, :, -1]
        if self._pairs is None:
            return self._workspaces[sharing, stages, phases, shapes]
        alone = phases != BESIDE
        needed = self._workspaces[sharing, stages * alone, phases * alone, shapes]
        return np.where(alone, needed, self._pairs[np.where(alone, 0, stages), shapes])

    @cached_property
    def _stages(self) -> list[Stage]:
        """The role's stages that differ."""
        return list(dict.fromkeys(self._role.stages))

    @cached_property
    def _pairs(self) -> NDArray[np.int64] | None:
        """What two passes beside each other need, by their stages and shape, where some are."""
        if not self._pipeline.schedule.runs_beside:
            return None
        pairs = product(self._stages, repeat=2)
        return np.stack([self._sizes.passes.of_pair(*each) for each in pairs])
