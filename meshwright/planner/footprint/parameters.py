"""The parameters of ranks, a column over shapes for each set of stages."""

from collections.abc import Mapping

import numpy as np

from meshwright.planner.footprint.units import BesideWeights
from meshwright.planner.space import Column, ShapeTable, block_counts
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage, copies_table
from meshwright.simulator.memory import stand_in_bytes
from meshwright.simulator.model import BlockKind, model_blocks
from meshwright.simulator.replication import blocks_of


class ParameterCounts:
    """Parameters of one rank's blocks for each tensor-parallel degree of a space."""

    def __init__(self, table: ShapeTable) -> None:
        self._kinds = table.kinds
        by_degrees = {_degrees(shape): shape for shape in table.shapes}
        counts = {
            degrees: (
                *(_total(shape.parameters, kind) for kind in table.kinds),
                shape.copied_parameters,
            )
            for degrees, shape in by_degrees.items()
        }
        rows = [counts[_degrees(shape)] for shape in table.shapes]
        self._by_shape = np.array(rows, np.int64).reshape(len(rows), len(table.kinds) + 1)
        self._experts = None
        if any(shape.expert_parameters for shape in table.shapes):
            experts = [
                [_total(shape.expert_parameters, kind) for kind in table.kinds]
                for shape in table.shapes
            ]
            self._experts = np.array(experts, np.int64)
        self._beside = BesideWeights(table)
        self._table = table

    def of_rank(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the parameters of a rank that holds *stages*, for each of the layouts."""
        model = self._table.shapes[0].trained
        copies = sum(copies_table(model, stage) for stage in stages)
        weights = np.array([*block_counts(self._kinds, stages), copies], np.int64)
        return np.asarray(self._by_shape[shape_index] @ weights, np.int64)

    def of_experts(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column | int:
        """Return those of experts that other ranks than those of a replica hold."""
        if self._experts is None:
            return 0
        weights = np.array(block_counts(self._kinds, stages), np.int64)
        return np.asarray(self._experts[shape_index] @ weights, np.int64)

    def beside_bytes(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return what layers of such a rank hold beside their weights, for each of the layouts."""
        own = self._beside.of_rank(shape_index, stages)
        if not self._table.shapes[0].stack.keeps_stand_ins:
            return own
        blocks = blocks_of(stages)
        once = [stand_in_bytes(shape, blocks) for shape in self._table.shapes]
        return np.asarray(own + np.array(once, np.int64)[shape_index], np.int64)


def _total(parameters: Mapping[BlockKind, int], kind: BlockKind) -> int:
    """Return the *parameters* of a block of *kind*, of those by the kinds of a model's blocks."""
    return sum(parameters.get(each, 0) for each in model_blocks(kind))


def _degrees(shape: BlockShape) -> tuple[int, int, int]:
    return shape.tp, shape.ep, shape.expert_tp
