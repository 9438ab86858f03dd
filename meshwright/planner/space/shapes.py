"""The few block shapes that a space has, with their times as columns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space.columns import Column, distinct
from meshwright.planner.space.pipelines import block_kinds
from meshwright.planner.space.prices import Prices
from meshwright.planner.space.space import Space
from meshwright.simulator import CostModel, ResolvedPlan
from meshwright.simulator.blocks import BlockShape, plan_parameters
from meshwright.simulator.layout import (
    DP_CP,
    PLAN_FIELDS,
    is_unwrapped,
    sums_microbatches,
    syncs_by_default,
)
from meshwright.simulator.model import EXPERT_LAYERS, BlockKind
from meshwright.simulator.step import message_between

SWITCHED = ("sequence_parallel", "recompute", "recompute_modules", "offload_modules", "attention")


@dataclass(frozen=True, slots=True)
class ShapeTable:
    """Distinct block shapes of layouts, which one each has, and the kinds of blocks.

    ``index`` is -1 for layouts of the space that were not asked for.
    """

    shapes: tuple[BlockShape, ...]
    index: NDArray[np.int64]
    kinds: tuple[BlockKind, ...]

    @classmethod
    def of(cls, space: Space, indices: Column | None = None) -> "ShapeTable":
        """Return the shapes of the layouts *indices* of *space*, by default of all."""
        chosen = np.arange(len(space)) if indices is None else indices
        names = ["tp", "cp", "cp_type", "cp_inner", "ep", "etp", "microbatch_size", *SWITCHED]
        if set(EXPERT_LAYERS) & set(block_kinds(space.job.model)):
            # Experts' kept gradients slow their products.
            names += ["gradient_precision", "dispatcher"]
        in_pipeline = (space.column("pp") > 1) & space.stack.keeps_stage_outputs
        alone = np.asarray(is_unwrapped(space.stack, space.column(DP_CP)), np.int64)
        flags = (in_pipeline.astype(np.int64), _defers_sums(space, alone), alone)
        columns = [*(space.column(name) for name in names), *flags]
        if len(chosen) < len(space):
            columns = [column[chosen] for column in columns]
        first, member = distinct(columns)
        index = np.full(len(space), -1)
        index[chosen] = member
        return cls(block_shapes(space, chosen[first]), index, space.kinds)

    def of_layouts(self, indices: Column) -> "ShapeTable":
        """Return the table of *indices* alone."""
        own = self.index[indices]
        first, member = distinct([own])
        index = np.full(len(self.index), -1)
        index[indices] = member
        shapes = tuple(self.shapes[each] for each in own[first].tolist())
        return ShapeTable(shapes, index, self.kinds)

    def by_degrees(self) -> tuple[list[BlockShape], Column]:
        """Return a shape of each choice of `BlockShape.weight_degrees`, and that of each shape."""
        alike = {shape.weight_degrees: shape for shape in self.shapes}
        places = {degrees: place for place, degrees in enumerate(alike)}
        members = [places[shape.weight_degrees] for shape in self.shapes]
        return [*alike.values()], np.array(members, np.int64)


def _defers_sums(space: Space, alone: Column) -> Column:
    """Return `BlockShape.defers_sums` of every layout, from which of them nothing wraps."""
    stack = space.stack
    habit = syncs_by_default(stack, space.column("zero_stage"), space.column("pp"))
    # Numbers of a switch: 0 is the stack's habit, then no and yes.
    said = space.column("sync_each_microbatch")
    each = np.where(said == 0, habit, said == PLAN_FIELDS["sync_each_microbatch"].code(True))  # noqa: FBT003
    once = sums_microbatches(each, space.column("pp"), space.num_microbatches)
    return np.asarray((once | alone) & stack.sums_norms_each_microbatch, np.int64)


def block_shapes(space: Space, rows: NDArray[np.int64]) -> tuple[BlockShape, ...]:
    """Return the shapes of the layouts of *rows*."""
    plans = space.plans_without_stages(rows.tolist())
    parameters = {
        degrees: plan_parameters(space.job.model, plan, space.stack)
        for degrees, plan in {_degrees(plan): plan for plan in plans}.items()
    }
    return tuple(
        BlockShape.of(space.job, plan, space.stack, parameters[_degrees(plan)]) for plan in plans
    )


def _degrees(plan: ResolvedPlan) -> tuple[int, int, int | None]:
    return plan.tp, plan.ep, plan.etp


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Picoseconds of each shape, one row a shape.

    ``blocks`` has a column for forward and backward of each kind of block; ``messages``, by kind,
    the time on the port and in all of what such a block sends between nodes, then the least of any
    such message.
    """

    blocks: NDArray[np.int64]
    messages: NDArray[np.int64]
    known: dict[tuple[int | None, ...], list[list[int]]]
    priced: set[int]
    costs: CostModel

    @classmethod
    def empty(cls, table: ShapeTable, costs: CostModel) -> "ShapeTimes":
        """Return the times of no shape yet: zeros."""
        blocks = np.zeros((len(table.shapes), 2 * len(table.kinds)), np.int64)
        messages = np.zeros((len(table.shapes), len(table.kinds), 4), np.int64)
        return cls(blocks, messages, {}, set(), costs)

    def price(self, table: ShapeTable, used: Column) -> None:
        """Find the times of the shapes that *used* indexes."""
        costs, prices = self.costs, self.costs.kept(Prices)
        new = [index for index in dict.fromkeys(used.tolist()) if index not in self.priced]
        self.priced.update(new)
        shapes = [table.shapes[index] for index in new]
        times = [prices.block_times(costs, shapes, kind) for kind in table.kinds]
        self.blocks[new] = np.concatenate(times, axis=1)
        for index, shape in zip(new, shapes, strict=True):
            # Recomputation is of layers: shapes that differ in it share the messages.
            flags = (shape.sequence_parallel, shape.in_pipeline, shape.defers_sums)
            key = (shape.tp, shape.cp, shape.microbatch_size, *flags)
            if key not in self.known:
                self.known[key] = _message_times(shape, costs, table.kinds)
            self.messages[index] = self.known[key]


def _message_times(
    shape: BlockShape, costs: CostModel, kinds: tuple[BlockKind, ...]
) -> list[list[int]]:
    sizes = [costs.blocks.memory(shape, kind).sent for kind in kinds]
    known = {size: _times_of_size(shape, costs, size) for size in dict.fromkeys(sizes)}
    return [known[size] for size in sizes]


def _times_of_size(shape: BlockShape, costs: CostModel, size_bytes: int) -> list[int]:
    far, near = (
        message_between(costs, shape, size_bytes, crosses_nodes=crosses)
        for crosses in (True, False)
    )
    far_ps, near_ps = (each.occupy_ps + each.delay_ps for each in (far, near))
    return [far.occupy_ps, far_ps, min(far.occupy_ps, near.occupy_ps), min(far_ps, near_ps)]
