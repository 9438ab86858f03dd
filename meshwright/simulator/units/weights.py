"""Parameters of a stage on one rank, unit by unit."""

from typing import NamedTuple

from meshwright.hwprofiles import Units
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import Size, sum_of
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EMBEDDING, BlockKind, BlockRun, ModelSpec
from meshwright.simulator.replication import (
    EndUnits,
    Rows,
    fills_rows,
    is_tied,
    padding,
    stage_parameters,
    unit_weights,
)
from meshwright.simulator.units.layers import ByFamily, alike, families, member
from meshwright.simulator.units.sharding import Sharding


class UnitWeights(NamedTuple):
    """Parameters of a unit, those of the last of its weights, and what fills up its shards."""

    size: Size
    last: Size
    rows: tuple[Rows, ...] = ()

    def padding(self, num_ranks: Size) -> Size:
        """Return the parameters that fill up the shards of so many ranks."""
        return padding(self.rows, num_ranks)


class LayerWeights(NamedTuple):
    """Parameters of a layer on one rank.

    Args:
        most: All but experts of which other ranks hold others.
        experts: Those, a unit of their own.
    """

    most: UnitWeights
    experts: UnitWeights

    @classmethod
    def of(cls, shape: BlockShape, kind: BlockKind) -> "LayerWeights":
        """Return those of a layer of a *kind*."""
        experts = shape.expert_parameters.get(kind, 0)
        layer = Stage((BlockRun(kind, 1),), has_embedding=False, has_head=False)
        rows, of_experts = (
            tuple(unit_weights(shape, layer, of_experts=apart)) if fills_rows(shape) else ()
            for apart in (False, True)
        )
        return cls(
            UnitWeights(shape.parameters[kind] - experts, 0, rows),
            UnitWeights(experts, _last_experts(shape, experts), of_experts),
        )


class Padding(NamedTuple):
    """Parameters that fill up the shards of a rank.

    Args:
        most: Of all but experts of which other ranks hold others.
        experts: Of those.
    """

    most: Size
    experts: Size


class StageWeights(NamedTuple):
    """Parameters of a stage on one rank; which units there are is structure.

    Args:
        total: Of the stage, but for experts of which other ranks hold others.
        experts: Those of all its layers.
        layers: Of a layer.
        num_experts: How many experts of a layer it has.
        matrix: Of the table, or of the output matrix.
        positions: Of the embedding beside its table.
        tp: Ranks that share a table.
        roots: Units that are gathered before all; they stay.
        table: The unit of the table, if it is one.
        head: The unit of the head, if it is one.
    """

    total: Size
    experts: Size
    layers: ByFamily[LayerWeights]
    num_experts: Size
    matrix: Size
    positions: Size
    tp: Size
    roots: tuple[UnitWeights, ...]
    table: tuple[UnitWeights, ...]
    head: tuple[UnitWeights, ...]

    @classmethod
    def of(cls, shape: BlockShape, stage: Stage) -> "StageWeights":
        """Return the parameters of *stage*."""
        ends, matrix = EndUnits.of(shape, stage), shape.local_vocab_size * shape.model.hidden_size
        last = matrix
        if shape.stack.units is Units.ROOT:
            last = matrix * (stage.has_head and not is_tied(shape, stage))
        elif not is_tied(shape, stage):
            # Of positions alone, however few words there are beside them.
            last = sum(map(_size, ends.root))
        layers = tuple(LayerWeights.of(shape, kind) for kind in families(shape))
        experts = sum(
            each.num_layers * member(layers, has_experts=each.has_experts).experts.size
            for each in alike(stage)
        )
        return cls(
            total=stage_parameters(shape, stage) - experts,
            experts=experts,
            layers=layers,
            num_experts=num_own_experts(shape),
            matrix=matrix,
            positions=shape.parameters[EMBEDDING] - matrix,
            tp=shape.ends_tp,
            roots=(
                *(_end_unit(shape, rows, _size(rows)) for rows in ends.root[:-1]),
                *(_end_unit(shape, rows, last) for rows in ends.root[-1:]),
            ),
            table=tuple(_end_unit(shape, rows, matrix) for rows in (ends.table,) if rows),
            head=tuple(_end_unit(shape, rows, matrix) for rows in (ends.head,) if rows),
        )

    def padding(self, stage: Stage, sharding: Sharding) -> "Padding":
        """Return what fills up the shards of all units of *stage*."""
        own = sum_of(
            each.padding(sharding.num_ranks) for each in (*self.roots, *self.table, *self.head)
        )
        experts: Size = 0
        for each in alike(stage):
            layer = member(self.layers, has_experts=each.has_experts)
            own = own + each.num_layers * layer.most.padding(sharding.num_ranks)
            experts = experts + each.num_layers * layer.experts.padding(sharding.num_expert_ranks)
        return Padding(own, experts)


def _last_experts(shape: BlockShape, num_parameters: int) -> int:
    """Return how many of the parameters of a layer's experts are in the last tensor of them.

    That is the second matrix of all experts, or its biases; the parts of the first are as large.
    """
    if not num_parameters:
        return 0
    experts = shape.model.experts
    assert experts is not None
    if experts.bias:
        return num_own_experts(shape) * shape.model.hidden_size
    return num_parameters // (experts.num_parts + 1)


def num_own_experts(shape: BlockShape) -> int:
    """Return how many routed experts of a layer a rank has."""
    model = shape.trained
    if not isinstance(model, ModelSpec) or model.experts is None:
        return 0
    return model.experts.num_experts // shape.ep


def _size(rows: tuple[Rows, ...]) -> int:
    """Return the parameters of weights of *rows*."""
    return int(sum(each.size for each in rows))


def _end_unit(shape: BlockShape, rows: tuple[Rows, ...], last: int) -> UnitWeights:
    """Return a unit of weights of *rows*, with so many parameters in the *last* of them."""
    return UnitWeights(_size(rows), last, rows if fills_rows(shape) else ())
