"""The exact peak memory of every layout of a space, without simulating any."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwprofiles import StackProfile
from planner.roles import (
    Moment,
    Role,
    fullest_moments,
    pipeline_roles,
    telling_microbatches,
)
from planner.shapes import ShapeBytes, ShapeTable
from planner.space import Column, Space
from simulator import SCHEDULES, Phase, Schedule
from simulator.data_parallel import Stage
from simulator.memory import StateBytes


class Group(NamedTuple):
    """Layouts with the same pipeline: degree, virtual stages and schedule."""

    indices: NDArray[np.int64]
    pp: int
    schedule: Schedule
    roles: list[Role]


def pipeline_groups(space: Space, indices: NDArray[np.int64]) -> Iterator[Group]:
    """Yield the layouts among *indices* by pipeline, in a fixed order."""
    names = ("pp", "num_virtual_stages", "schedule")
    keys = np.stack([space.column(name)[indices] for name in names], axis=1)
    distinct, member = np.unique(keys, axis=0, return_inverse=True)
    schedules = tuple(SCHEDULES.values())
    for number, (pp, vpp, schedule) in enumerate(distinct.tolist()):
        chosen = indices[member.reshape(-1) == number]
        roles = pipeline_roles(space.layers(pp, vpp), pp)
        yield Group(chosen, pp, schedules[schedule], roles)


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

    def of_rank(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the parameters of a rank that holds *stages*, for each of the layouts."""
        layers = sum(stage.num_layers for stage in stages)
        embeddings = sum(stage.has_embedding for stage in stages)
        heads = sum(stage.has_head for stage in stages)
        copies = sum(stage.has_head and not stage.has_embedding for stage in stages)
        weights = np.array([layers, embeddings, heads, copies], np.int64)
        return np.asarray(self._by_shape[shape_index] @ weights, np.int64)


def peak_bytes(space: Space, table: ShapeTable) -> Column:
    """Return the live bytes of each layout's fullest rank at its fullest moment."""
    sizes = ShapeBytes.of(table)
    counts = ParameterCounts(table)
    state = StateBytes.of(space.stack, space.job.precision)
    peaks = np.zeros(len(space), np.int64)
    for group in pipeline_groups(space, np.arange(len(space))):
        shape_index = table.index[group.indices]
        shards = np.where(
            space.column("zero_stage")[group.indices] >= 1, space.column("dp")[group.indices], 1
        )
        for role in group.roles:
            parameters = counts.of_rank(shape_index, role.stages)
            share = -(-parameters // shards)
            static = parameters * (state.parameter + state.gradient) + share * state.optimizer
            moving = np.maximum(
                share * state.update_temporary,
                _moving_bytes(space, group, role, sizes, shape_index),
            )
            peaks[group.indices] = np.maximum(peaks[group.indices], static + moving)
    return peaks


def _moving_bytes(
    space: Space, group: Group, role: Role, sizes: ShapeBytes, shape_index: Column
) -> Column:
    """Return activations and workspaces of a role at its fullest moment."""
    most = np.zeros(len(group.indices), np.int64)
    microbatches = telling_microbatches(role, group.pp, space.num_microbatches[group.indices])
    for number in np.unique(microbatches).tolist():
        chosen = np.flatnonzero(microbatches == number)
        shapes = shape_index[chosen]
        for moment in fullest_moments(group.schedule, role, group.pp, number):
            most[chosen] = np.maximum(most[chosen], _moment_bytes(moment, sizes, shapes))
    return most


def _moment_bytes(moment: Moment, sizes: ShapeBytes, shapes: Column) -> Column:
    kept = (
        moment.layer_passes * sizes.saved_layer[shapes]
        + moment.embedding_passes * sizes.saved_embedding[shapes]
        + moment.head_passes * sizes.saved_head[shapes]
    )
    which = 0 if moment.phase is Phase.FORWARD else 1
    workspace = sizes.layer_workspace[which][shapes]
    if moment.has_head:
        workspace = np.maximum(workspace, sizes.head_workspace[which][shapes])
    return np.asarray(kept + workspace, np.int64)


def device_bytes_column(allocated: Column, stack: StackProfile) -> Column:
    """Return what the device shows as used, for each allocated peak."""
    rounding = (allocated * stack.allocator_fraction).astype(np.int64)
    return np.asarray(allocated + rounding + stack.context_bytes, np.int64)
