"""What layouts need at least, found at once for all: most of those that never fit go no further."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.footprint.parameters import ParameterCounts
from meshwright.planner.footprint.replicas import kinds_of
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
    """Return the numbers of roles of which one is nearly always fullest.

    They are both ends, the second and that in the middle.
    """
    last = len(pipeline.roles) - 1
    return [0, last, min(1, last), last // 2]


class _Moment(NamedTuple):
    """A time of a rank's step, one row for each pipeline and number of microbatches.

    Args:
        kept: Passes that are kept then through blocks of each kind.
        has_gradients: 1 where gradients of all its parameters are there, else 0.
        is_gathered: 1 where the units of a virtual stage are, else 0.
    """

    kept: NDArray[np.int64]
    has_gradients: Column
    is_gathered: Column


class PassColumns(NamedTuple):
    """Bytes that passes in flight keep, of each layout.

    ``by_shape`` has a column for each kind of block; ``run`` is the row in ``runs`` of each layout.
    """

    shapes: Column
    by_shape: NDArray[np.int64]
    run: Column
    runs: list[tuple[Pipeline, int]]
    makes_gradients: bool
    keeps_units: bool

    @classmethod
    def of(cls, space: Space, table: ShapeTable, blocks: BlockTable, indices: Column) -> Self:
        """Return those of the layouts *indices*."""
        kinds, shapes = table.kinds, table.shapes
        blocks.prepare(shapes, kinds)
        saved = [[blocks.memory(shape, kind).saved for kind in kinds] for shape in shapes]
        by_shape = np.array(saved, np.int64).reshape(len(shapes), len(kinds))
        return cls.with_bytes(space, by_shape, table.index[indices], indices)

    @classmethod
    def with_bytes(
        cls, space: Space, by_shape: NDArray[np.int64], shapes: Column, indices: Column
    ) -> Self:
        """Return those of the layouts *indices* whose *shapes* keep so much."""
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

    def at(self, moment: _Moment, rows: Column) -> Column:
        """Return the bytes that passes keep in *rows* of the layouts."""
        # Column by column: rows of all layouts would take ten times the memory.
        found, own, run = np.zeros(len(rows), np.int64), self.shapes[rows], self.run[rows]
        for kind in np.flatnonzero(moment.kept.any(axis=0)).tolist():
            found += self.by_shape[own, kind] * moment.kept[run, kind]
        return found

    def moments(self, place: int, rows: Column) -> list[_Moment]:
        """Return the times at which most may be live of the rank at a *place* of `_few_roles`.

        What is returned is of the runs of *rows* alone.
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
            found = [self._most_kept(pipeline, role, count) for count in counts]
            kept[runs] = np.array([passes for passes, _ in found]) @ own
            done[runs] = [is_there for _, is_there in found]
            last[runs], in_pipeline[runs] = own[-1], pipeline.pp > 1
        most = _Moment(kept, done, 0 * done)
        if not self.keeps_units:
            return [most]
        # Before the last forward pass, or after the last backward pass where no gradient was there.
        return [most, _Moment((kept - last) * done[:, None], 0 * done + 1, in_pipeline)]

    def _most_kept(self, pipeline: Pipeline, role: Role, count: int) -> tuple[list[int], bool]:
        """Return the passes by virtual stage when most are in flight, and if all gradients are.

        That is in the last pass of the warm-up; where the first backward pass makes gradients, in
        the last forward pass, if all have been made by then.
        """
        schedule, pp, vpp = pipeline.schedule, pipeline.pp, len(role.stages)
        size, group = (role.first, pp, count, vpp), schedule.group(pp, count)
        # Of two passes beside each other one frees what the other keeps.
        in_flight = schedule.in_flight(*size) - bool(schedule.pairs(*size))
        passes, is_there = first_passes(group, count, vpp, in_flight), True
        if self.makes_gradients:
            done = first_passes(group, count, vpp, count * vpp - in_flight)[::-1]
            is_there = all(done)
            if is_there:
                passes = [count - each for each in done]
        return passes, is_there


class RankBytes(NamedTuple):
    """Bytes of ranks beside those that passes keep, a row for each of some layouts.

    Args:
        lasting: Weights and optimizer's states, always.
        gradients: Gradients, when all are there.
        at_end: What is there of gradients when the optimizer runs, with what that needs.
        gathered: Gathered weights of the smallest of a rank's virtual stages.
    """

    lasting: Column
    gradients: Column
    at_end: Column
    gathered: Column


class StateColumns(NamedTuple):
    """The states of ranks of layouts, a row for those alike; ``member`` is that of each layout."""

    counts: ParameterCounts
    degrees: Column
    pipelines: Column
    known: list[Pipeline]
    member: Column
    split: LayoutStates | Sharding

    @classmethod
    def of(cls, space: Space, table: ShapeTable, indices: Column) -> Self:
        """Return those of the layouts *indices*."""
        counts, (kinds, number) = ParameterCounts(table), kinds_of(space, indices)
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
        """Return the bytes of the rank at a *place* of `_few_roles`, of the layouts in *rows*."""
        roles = [_few_roles(pipeline)[place] for pipeline in self.known]
        stages = [each.roles[role].stages for each, role in zip(self.known, roles, strict=True)]
        parameters, experts = self.counts.of_ranks(self.degrees, stages, self.pipelines)
        if isinstance(self.split, LayoutStates):
            held = self.split.held(parameters, experts)
            at_end, gathered = held.gradients_bytes + held.update_temporary_bytes, NOTHING
        else:
            held = unit_states(parameters - experts, experts, NO_PADDING, self.split)
            at_end = held.update_temporary_bytes  # gradients are shards by then
            gathered = self._least_gathered(roles, self.split)
        found = held.weights_bytes, held.gradients_bytes, at_end, gathered
        member = self.member[rows]
        # What is nothing at all is no column of zeros.
        each = map(np.asarray, found)
        return RankBytes(*(column[member] if column.ndim else column for column in each))

    def _least_gathered(self, roles: Sequence[int], sharding: Sharding) -> Column:
        """Return the weights of the smallest virtual stage of a rank as they are gathered."""
        blocks = [each.stage_blocks[role] for each, role in zip(self.known, roles, strict=True)]
        least = self.counts.of_smallest(self.degrees, blocks, self.pipelines)
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
    """Return no more bytes than the live ones of each layout's fullest rank.

    They are the most, over a few ranks of a pipeline, of what a rank has at one time: its weights,
    its optimizer's states, the gradients that are there, and what the passes keep that are in
    flight then; and of its states when the optimizer runs.

    Args:
        space: The layouts.
        table: Their shapes.
        blocks: Where what blocks hold is kept.
        indices: Which layouts.
        most_bytes: Of what is found to need more nothing else is looked at.
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
    """Return no more bytes than the live ones of layouts, or of any that nodes become.

    Args:
        passes: What passes of each keep; of choices that are left the least.
        states_of: Returns the states of some rows, in all ways that are left.
        most_bytes: Of what is found to need more nothing else is looked at.
    """
    rows = np.arange(len(passes.run))
    moments = passes.moments(0, rows)
    least = passes.at(moments[0], rows)
    # States are found of those alone of which passes leave something.
    rows = np.flatnonzero(least <= most_bytes)
    if not len(rows):
        return least
    states = states_of(rows)
    places = np.arange(len(rows))
    for place in range(MOST_ROLES):
        if not len(rows):
            break
        every = [each.of_rank(place, places) for each in states]
        held = RankBytes(*(reduce(np.minimum, each) for each in zip(*every, strict=True)))
        live = held.lasting + held.at_end
        for moment in moments if place == 0 else passes.moments(place, rows):
            run = passes.run[rows]
            found = passes.at(moment, rows) + held.lasting
            found += held.gradients * moment.has_gradients[run]
            if moment.is_gathered.any():
                found += held.gathered * moment.is_gathered[run]
            live = np.maximum(live, found)
        least[rows] = np.maximum(least[rows], live)
        left = least[rows] <= most_bytes
        rows, places = rows[left], places[left]
    return least
