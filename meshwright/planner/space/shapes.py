"""Distinct block shapes of a space, with their times as columns."""

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
    """Distinct block shapes of layouts, the shape of each layout, and the kinds of blocks.

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
            # Gradients of experts, in the format they are kept in, slow their GEMMs.
            names += ["gradient_precision", "dispatcher"]
        # Pipelines that keep outputs until backward change the bytes of blocks.
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
        """Return one shape for each `BlockShape.weight_degrees`, and its index for each shape."""
        shape_of = {shape.weight_degrees: shape for shape in self.shapes}
        indices = {degrees: place for place, degrees in enumerate(shape_of)}
        members = [indices[shape.weight_degrees] for shape in self.shapes]
        return [*shape_of.values()], np.array(members, np.int64)


def _defers_sums(space: Space, alone: Column) -> Column:
    """Return `defers_norm_all_reduce` of every layout; *alone* marks those without units."""
    stack = space.stack
    default = syncs_by_default(stack, space.column("zero_stage"), space.column("pp"))
    # Codes of the field: 0 is the stack's default, then no and yes.
    codes = space.column("sync_each_microbatch")
    syncs = np.where(codes == 0, default, codes == PLAN_FIELDS["sync_each_microbatch"].code(True))  # noqa: FBT003
    once_a_step = sums_microbatches(syncs, space.column("pp"), space.num_microbatches)
    return np.asarray((once_a_step | alone) & stack.sums_norms_each_microbatch, np.int64)


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
    """Picoseconds of each shape, one row for each.

    ``blocks`` has a column for forward and backward of each kind of block; ``messages``, by kind,
    the port time and the whole time of its p2p message between nodes, then the least of both over
    any such message.
    """

    blocks: NDArray[np.int64]
    messages: NDArray[np.int64]
    known: dict[tuple[int | None, ...], list[list[int]]]
    priced: set[int]
    costs: CostModel

    @classmethod
    def empty(cls, table: ShapeTable, costs: CostModel) -> "ShapeTimes":
        """Return zeros, the times of no shape yet."""
        blocks = np.zeros((len(table.shapes), 2 * len(table.kinds)), np.int64)
        messages = np.zeros((len(table.shapes), len(table.kinds), 4), np.int64)
        return cls(blocks, messages, {}, set(), costs)

    def price(self, table: ShapeTable, used: Column) -> None:
        """Compute the times of the shapes that *used* indexes."""
        costs, prices = self.costs, self.costs.kept(Prices)
        new = [index for index in dict.fromkeys(used.tolist()) if index not in self.priced]
        self.priced.update(new)
        shapes = [table.shapes[index] for index in new]
        times = [prices.block_times(costs, shapes, kind) for kind in table.kinds]
        self.blocks[new] = np.concatenate(times, axis=1)
        for index, shape in zip(new, shapes, strict=True):
            # Recomputation is of layers: shapes that differ in it share the messages.
            flags = (shape.sequence_parallel, shape.in_pipeline, shape.defers_norm_all_reduce)
            key = (shape.tp, shape.cp, shape.microbatch_size, *flags)
            if key not in self.known:
                self.known[key] = _message_times(shape, costs, table.kinds)
            self.messages[index] = self.known[key]


def _message_times(
    shape: BlockShape, costs: CostModel, kinds: tuple[BlockKind, ...]
) -> list[list[int]]:
    """Return the message times of each kind of block."""
    sizes = [costs.blocks.memory(shape, kind).sent for kind in kinds]
    by_size = {size: _times_of_size(shape, costs, size) for size in dict.fromkeys(sizes)}
    return [by_size[size] for size in sizes]


def _times_of_size(shape: BlockShape, costs: CostModel, size_bytes: int) -> list[int]:
    """Return port and whole time of a message between nodes, then the least of any message."""
    far, near = (
        message_between(costs, shape, size_bytes, crosses_nodes=crosses)
        for crosses in (True, False)
    )
    far_ps, near_ps = (each.occupy_ps + each.delay_ps for each in (far, near))
    # Which pairs of stages cross nodes depends on the rank: a bound takes the lesser time.
    return [far.occupy_ps, far_ps, min(far.occupy_ps, near.occupy_ps), min(far_ps, near_ps)]
