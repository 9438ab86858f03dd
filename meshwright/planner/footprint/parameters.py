"""Parameters of ranks, a column over shapes for each set of stages."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space import Column, ShapeTable, block_counts
from meshwright.simulator.blocks import (
    extra_weight_bytes,
    layer_rope_cache_bytes,
    num_rope_caches,
    rope_cache_bytes,
)
from meshwright.simulator.layout import Stage, copies_embedding
from meshwright.simulator.memory import dummy_gradient_bytes
from meshwright.simulator.model import BlockKind, BlockRun, model_blocks
from meshwright.simulator.replication import blocks_of


class BesideWeights:
    """Bytes that ranks hold beside their weights, for a block of each kind."""

    def __init__(self, table: ShapeTable) -> None:
        self._kinds = table.kinds
        runs = [[BlockRun(each, 1) for each in model_blocks(kind)] for kind in table.kinds]
        keys = [(*shape.weight_degrees, layer_rope_cache_bytes(shape)) for shape in table.shapes]
        alike = dict(zip(keys, table.shapes, strict=True))
        known = {
            key: [extra_weight_bytes(shape, blocks) for blocks in runs]
            for key, shape in alike.items()
        }
        of_blocks = [known[key] for key in keys]
        self._bytes = np.array(of_blocks, np.int64).reshape(-1, len(table.kinds))
        self._tables = np.array([*map(rope_cache_bytes, table.shapes)], np.int64)
        self._model = table.shapes[0].trained

    def of_rank(self, shape_index: Column, stages: Sequence[Stage]) -> Column:
        """Return these bytes of a rank that holds *stages*, for each of the layouts."""
        counts = np.array(block_counts(self._kinds, stages), np.int64)
        return np.asarray((self._bytes @ counts)[shape_index], np.int64)

    def angle_tables(self, shape_index: Column, stages: Sequence[Stage]) -> Column:
        """Return the bytes of such a rank's RoPE cos/sin caches, which its passes make."""
        each = self._tables * num_rope_caches(self._model, stages)
        return np.asarray(each[shape_index], np.int64)


class ParameterCounts:
    """Parameters of one rank's blocks for each choice of the degrees that shard them.

    ``degrees`` are the numbers of these choices, one for each shape; ``shapes`` has one shape of
    each.
    """

    def __init__(self, table: ShapeTable) -> None:
        self._kinds = table.kinds
        self.shapes, self.degrees = table.by_degrees()
        counts = [
            [
                *(_total(shape.parameters, kind) for kind in table.kinds),
                shape.tied_embedding_parameters,
            ]
            for shape in self.shapes
        ]
        self._counts = np.array(counts, np.int64).reshape(-1, len(table.kinds) + 1)
        experts = [
            [_total(shape.expert_parameters, kind) for kind in table.kinds] for shape in self.shapes
        ]
        self._experts = np.array(experts, np.int64).reshape(-1, len(table.kinds))
        self._beside = BesideWeights(table)
        self._dummy_gradients: dict[tuple[BlockKind, ...], Column] = {}
        self._table = table

    def of_rank(self, degrees: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the parameters of a rank that holds *stages*, for each of some `degrees`."""
        return np.asarray((self._counts @ self._weights(stages))[degrees], np.int64)

    def of_experts(self, degrees: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the parameters of experts with a data-parallel group of their own."""
        return np.asarray((self._experts @ self._weights(stages)[:-1])[degrees], np.int64)

    def of_ranks(
        self, degrees: Column, ranks: Sequence[Sequence[Stage]], member: Column
    ) -> tuple[Column, Column]:
        """Return all parameters, and those of experts, of the rank of each row, one of *ranks*."""
        weights = np.array([self._weights(stages) for stages in ranks])
        every, experts = self._counts @ weights.T, self._experts @ weights[:, :-1].T
        return np.asarray(every[degrees, member]), np.asarray(experts[degrees, member])

    def of_smallest(
        self, degrees: Column, stages: Sequence[NDArray[np.int64]], member: Column
    ) -> Column:
        """Return the parameters of the smallest of some stages, for each row.

        Args:
            degrees: Numbers of `degrees`.
            stages: Blocks of each kind in the stages of each set.
            member: Index of the set of each row.
        """
        each = [(self._counts[:, :-1] @ blocks.T).min(axis=1) for blocks in stages]
        return np.asarray(np.stack(each, axis=1)[degrees, member])

    def _weights(self, stages: Sequence[Stage]) -> Column:
        """Return the blocks of each kind of a rank of *stages*, and its copies of the embedding."""
        model = self._table.shapes[0].trained
        copies = sum(copies_embedding(model, stage) for stage in stages)
        return np.array([*block_counts(self._kinds, stages), copies], np.int64)

    def beside_bytes(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the bytes of layers beside their weights on such a rank, for each layout."""
        return self._beside.of_rank(shape_index, stages)

    def buffer_bytes(self, shape_index: Column, stages: tuple[Stage, ...]) -> Column:
        """Return the buffers of such a rank's passes: RoPE cos/sin caches and dummy gradients."""
        tables = self._beside.angle_tables(shape_index, stages)
        if not self._table.shapes[0].stack.keeps_stand_ins:
            return tables
        return np.asarray(tables + self._dummy_gradient_bytes(stages)[self.degrees[shape_index]])

    def _dummy_gradient_bytes(self, stages: tuple[Stage, ...]) -> Column:
        """Return the dummy gradients of a rank for each of `degrees`: one for equal shapes."""
        kinds = tuple(dict.fromkeys(kind for kind, _ in blocks_of(stages)))
        if kinds not in self._dummy_gradients:
            # Counts do not matter: weights of equal shape share one dummy.
            blocks = [BlockRun(kind, 1) for kind in kinds]
            each = [dummy_gradient_bytes(shape, blocks) for shape in self.shapes]
            self._dummy_gradients[kinds] = np.array(each, np.int64)
        return self._dummy_gradients[kinds]


def _total(parameters: Mapping[BlockKind, int], kind: BlockKind) -> int:
    """Return the *parameters* of a block of *kind*, summed over the model's kinds in it."""
    return sum(parameters.get(each, 0) for each in model_blocks(kind))
