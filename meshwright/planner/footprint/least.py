"""Lower bounds of memory, computed for all layouts at once: most that never fit go no further."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.footprint.parameters import ParameterCounts
from meshwright.planner.footprint.replicas import sharding_kinds
from meshwright.planner.footprint.states import LayoutStates, least_weights
from meshwright.planner.footprint.units import columns_of, shardings_of, taken
from meshwright.planner.space import Column, Pipeline, Role, ShapeTable, Space, distinct
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.schedules import first_passes
from meshwright.simulator.units import Padding, Sharding, unit_states

MOST_BYTES = 2**62
"""More than any device has."""

MOST_ROLES = 4
NO_PADDING = Padding(0, 0)
NOTHING = np.zeros((), np.int64)


def _few_roles(pipeline: Pipeline) -> list[int]:
    """Return the indices of roles of which one is nearly always the fullest.

    They are both ends, the second and the one in the middle.
    """
    last = len(pipeline.roles) - 1
    return [0, last, min(1, last), last // 2]


class _Candidate(NamedTuple):
    """A candidate of the peak, one row for each pipeline and number of microbatches.

    Args:
        kept: Passes in flight through blocks of each kind.
        has_gradients: 1 where gradients of all parameters are allocated, else 0.
        is_gathered: 1 where the FSDP units of a virtual stage are gathered, else 0.
    """

    kept: NDArray[np.int64]
    has_gradients: Column
    is_gathered: Column


class PassColumns(NamedTuple):
    """Activations that passes in flight save, of each layout.

    ``by_shape`` has a column for each kind of block; ``run`` is the row in ``runs`` of each layout.
    """

    shapes: Column
    by_shape: NDArray[np.int64]
    run: Column
    runs: list[tuple[Pipeline, int]]
    materializes_weight_gradients: bool
    keeps_units: bool

    @classmethod
    def of(cls, space: Space, table: ShapeTable, blocks: BlockTable, indices: Column) -> Self:
        """Return the activations of the layouts *indices*."""
        kinds, shapes = table.kinds, table.shapes
        blocks.prepare(shapes, kinds)
        saved = [[blocks.memory(shape, kind).saved for kind in kinds] for shape in shapes]
        by_shape = np.array(saved, np.int64).reshape(len(shapes), len(kinds))
        return cls.with_bytes(space, by_shape, table.index[indices], indices)

    @classmethod
    def with_bytes(
        cls, space: Space, by_shape: NDArray[np.int64], shapes: Column, indices: Column
    ) -> Self:
        """Return the activations of the layouts *indices* from those of their *shapes*."""
        stack = space.stack
        numbers, microbatches = space.pipeline_numbers[indices], space.num_microbatches[indices]
        first, run = distinct([numbers, microbatches])
        runs = zip(numbers[first].tolist(), microbatches[first].tolist(), strict=True)
        return cls(
            shapes,
            by_shape,
            run,
            [(space.pipelines[number], count) for number, count in runs],
            stack.is_fully_sharded or not stack.gradient_as_bucket_view,
            stack.is_fully_sharded,
        )

    def at(self, moment: _Candidate, rows: Column) -> Column:
        """Return the activations at a *moment* in *rows* of the layouts."""
        # Column by column: rows of all layouts would take ten times the memory.
        saved, shapes, run = np.zeros(len(rows), np.int64), self.shapes[rows], self.run[rows]
        for kind in np.flatnonzero(moment.kept.any(axis=0)).tolist():
            saved += self.by_shape[shapes, kind] * moment.kept[run, kind]
        return saved

    def moments(self, place: int, rows: Column) -> list[_Candidate]:
        """Return the candidates of the peak of the rank at index *place* of `_few_roles`.

        They are computed for the runs of *rows* alone.
        """
        used = self.run[rows[distinct([self.run[rows]])[0]]]
        by_pipeline: dict[int, tuple[Pipeline, list[int]]] = {}
        for run in used.tolist():
            pipeline, _ = self.runs[run]
            by_pipeline.setdefault(id(pipeline), (pipeline, []))[1].append(run)
        kept, last = np.zeros((2, len(self.runs), self.by_shape.shape[1]), np.int64)
        done, in_pipeline = np.zeros((2, len(self.runs)), np.int64)
        for pipeline, runs in by_pipeline.values():
            role = pipeline.roles[_few_roles(pipeline)[place]]
            own, counts = pipeline.own_blocks(role), [self.runs[run][1] for run in runs]
            in_flight = [self._most_kept(pipeline, role, count) for count in counts]
            kept[runs] = np.array([passes for passes, _ in in_flight]) @ own
            done[runs] = [is_there for _, is_there in in_flight]
            last[runs], in_pipeline[runs] = own[-1], pipeline.pp > 1
        most = _Candidate(kept, done, 0 * done)
        if not self.keeps_units:
            return [most]
        # Before the last forward pass, or after the last backward pass where no gradient was there.
        return [most, _Candidate((kept - last) * done[:, None], 0 * done + 1, in_pipeline)]

    def _most_kept(self, pipeline: Pipeline, role: Role, count: int) -> tuple[list[int], bool]:
        """Return the passes in flight by virtual stage at their most, and if gradients exist then.

        That is in the last pass of the warm-up; where the first backward pass allocates gradients,
        in the last forward pass, if all are allocated by then.
        """
        schedule, pp, vpp = pipeline.schedule, pipeline.pp, len(role.stages)
        size, group = (role.first, pp, count, vpp), schedule.group(pp, count)
        # Of two overlapped passes one frees what the other saves.
        in_flight = schedule.in_flight(*size) - bool(schedule.pairs(*size))
        passes, all_allocated = first_passes(group, count, vpp, in_flight), True
        if self.materializes_weight_gradients:
            done = first_passes(group, count, vpp, count * vpp - in_flight)[::-1]
            all_allocated = all(done)
            if all_allocated:
                passes = [count - each for each in done]
        return passes, all_allocated


class RankBytes(NamedTuple):
    """Bytes of ranks other than activations, a row for each of some layouts.

    Args:
        lasting: Weights and optimizer states.
        gradients: All gradients, once they are allocated.
        at_end: Gradients during the update, with its temporaries.
        gathered: Gathered weights of the smallest of a rank's virtual stages.
    """

    lasting: Column
    gradients: Column
    at_end: Column
    gathered: Column


class StateColumns(NamedTuple):
    """States of ranks, a row for equal ones; ``member`` is the row of each layout."""

    counts: ParameterCounts
    degrees: Column
    pipelines: Column
    known: list[Pipeline]
    member: Column
    split: LayoutStates | Sharding

    @classmethod
    def of(cls, space: Space, table: ShapeTable, indices: Column) -> Self:
        """Return the states of the layouts *indices*."""
        counts, (kinds, number) = ParameterCounts(table), sharding_kinds(space, indices)
        recipe, is_sharded = (
            space.stack.recipes.get(space.job.precision),
            space.stack.is_fully_sharded,
        )
        if is_sharded:  # a step of one microbatch reduces at once
            number = 2 * number + np.minimum(space.num_microbatches[indices], 2) - 1
        numbers = space.pipeline_numbers[indices]
        used, pipelines = distinct([numbers])
        columns = [counts.degrees[table.index[indices]], pipelines, number]
        columns += [space.num_shards[indices], space.expert_shards[indices]]
        # Equal states are computed once: sharding, degrees and pipeline decide them.
        first, member = distinct(columns)
        degrees, pipelines, number, *shards = (column[first] for column in columns)
        split: LayoutStates | Sharding
        if is_sharded:
            each = [
                one._replace(
                    parameter=one.parameter._replace(
                        state=least_weights(one.parameter.state, recipe)
                    )
                )
                for one in shardings_of(kinds)
            ]
            sharding = taken(columns_of(each), number)
            split = sharding.with_ranks(shards[0], sharding.num_replicas, shards[1])
        else:
            kinds = [each._replace(state=least_weights(each.state, recipe)) for each in kinds]
            split = LayoutStates.of(kinds, number, *shards)
        known = [space.pipelines[each] for each in numbers[used].tolist()]
        return cls(counts, degrees, pipelines, known, member, split)

    def of_rank(self, place: int, rows: Column) -> RankBytes:
        """Return the bytes of the rank at index *place* of `_few_roles`, for *rows* of layouts."""
        roles = [_few_roles(pipeline)[place] for pipeline in self.known]
        stages = [parts.roles[role].stages for parts, role in zip(self.known, roles, strict=True)]
        parameters, experts = self.counts.of_ranks(self.degrees, stages, self.pipelines)
        if isinstance(self.split, LayoutStates):
            held = self.split.held(parameters, experts)
            at_end, gathered = held.gradients_bytes + held.update_temporary_bytes, NOTHING
        else:
            held = unit_states(parameters - experts, experts, NO_PADDING, self.split)
            at_end = held.update_temporary_bytes  # gradients are shards by then
            gathered = self._least_gathered(roles, self.split)
        sizes = held.weights_bytes, held.gradients_bytes, at_end, gathered
        member = self.member[rows]
        # Zeros of all layouts stay a scalar.
        parts = map(np.asarray, sizes)
        return RankBytes(*(column[member] if column.ndim else column for column in parts))

    def _least_gathered(self, roles: Sequence[int], sharding: Sharding) -> Column:
        """Return the gathered weights of a rank's smallest virtual stage."""
        blocks = [each.stage_blocks[role] for each, role in zip(self.known, roles, strict=True)]
        least = self.counts.of_smallest(self.degrees, blocks, self.pipelines)
        # Without FSDP units nothing is gathered.
        weight = sharding.parameter.state.gathered_parameter * (1 - sharding.is_plain)
        return np.asarray(least * weight, np.int64)


def least_bytes(
    space: Space,
    table: ShapeTable,
    blocks: BlockTable,
    indices: Column,
    *,
    most_bytes: int = MOST_BYTES,
) -> Column:
    """Return a lower bound of the live bytes of each layout's fullest rank.

    The most, over a few ranks of a pipeline, of the bytes of a rank at one time: its weights,
    optimizer states, allocated gradients, and the activations of passes in flight; and of its
    states during the update.

    Args:
        space: The layouts.
        table: Their shapes.
        blocks: Memory of blocks, computed once.
        indices: Indices of layouts.
        most_bytes: Limit beyond which a layout's bound is not raised further.
    """
    if not len(indices):
        return np.zeros(0, np.int64)

    def states_of(rows: Column) -> list[StateColumns]:
        own = indices[rows]
        return [StateColumns.of(space, table.of_layouts(own), own)]

    passes = PassColumns.of(space, table.of_layouts(indices), blocks, indices)
    return least_of_columns(passes, states_of, most_bytes=most_bytes)


def least_of_columns(
    passes: PassColumns,
    states_of: Callable[[Column], Sequence[StateColumns]],
    *,
    most_bytes: int = MOST_BYTES,
) -> Column:
    """Return a lower bound of the live bytes of layouts, or of all layouts below nodes.

    Args:
        passes: Activations of each; of open choices the least.
        states_of: Returns the states of some rows, for all ways of sharding that are open.
        most_bytes: Limit beyond which a layout's bound is not raised further.
    """
    rows = np.arange(len(passes.run))
    moments = passes.moments(0, rows)
    least = passes.at(moments[0], rows)
    # States are computed only where activations alone do not exceed the limit.
    rows = np.flatnonzero(least <= most_bytes)
    if not len(rows):
        return least
    states = states_of(rows)
    places = np.arange(len(rows))
    # Only rows that are still below the limit go on to the next role.
    for place in range(MOST_ROLES):
        if not len(rows):
            break
        every = [each.of_rank(place, places) for each in states]
        held = RankBytes(*(reduce(np.minimum, each) for each in zip(*every, strict=True)))
        live = held.lasting + held.at_end
        for moment in moments if place == 0 else passes.moments(place, rows):
            run = passes.run[rows]
            at_moment = passes.at(moment, rows) + held.lasting
            at_moment += held.gradients * moment.has_gradients[run]
            if moment.is_gathered.any():
                at_moment += held.gathered * moment.is_gathered[run]
            live = np.maximum(live, at_moment)
        least[rows] = np.maximum(least[rows], live)
        left = least[rows] <= most_bytes
        rows, places = rows[left], places[left]
    return least
