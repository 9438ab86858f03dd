"""Parameters of a stage on one rank, unit by unit."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.hwprofiles import Units
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import Size
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EMBEDDING, BlockKind, BlockRun, ModelSpec
from meshwright.simulator.replication import EndUnits, is_tied, stage_parameters, unit_matrices
from meshwright.simulator.units.layers import ByFamily, alike, families, member


class EndUnit(NamedTuple):
    """Parameters of a unit, of the last of its weights, and of those gathered in 8 bits."""

    size: Size
    last: Size
    narrow: Size = 0


class LayerWeights(NamedTuple):
    """Parameters of a layer on one rank.

    Args:
        most: All but experts of which other ranks hold others.
        experts: Those, a unit of their own.
        narrow: Weights that are gathered in 8 bits.
    """

    most: Size
    experts: EndUnit
    narrow: Size

    @classmethod
    def of(cls, shape: BlockShape, kind: BlockKind) -> "LayerWeights":
        """Return those of a layer of a *kind*."""
        experts = shape.expert_parameters.get(kind, 0)
        gathers_narrow = shape.recipe is not None and shape.recipe.gathers_parameters
        layer = Stage((BlockRun(kind, 1),), has_embedding=False, has_head=False)
        return cls(
            shape.parameters[kind] - experts,
            EndUnit(experts, _last_experts(shape, experts)),
            sum(unit_matrices(shape, layer, 1)) if gathers_narrow else 0,
        )


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
    roots: tuple[EndUnit, ...]
    table: tuple[EndUnit, ...]
    head: tuple[EndUnit, ...]

    @classmethod
    def of(cls, shape: BlockShape, stage: Stage) -> "StageWeights":
        """Return the parameters of *stage*."""
        ends, matrix = (
            EndUnits.of(shape, stage, 1),
            shape.local_vocab_size * shape.model.hidden_size,
        )
        last = matrix
        if shape.stack.units is Units.ROOT:
            last = matrix * (stage.has_head and not is_tied(shape, stage))
        elif not is_tied(shape, stage):
            last = sum(ends.root)  # of positions alone, however few words there are beside them
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
                *(EndUnit(size, size) for size in ends.root[:-1]),
                *(EndUnit(size, last) for size in ends.root[-1:]),
            ),
            table=tuple(_matrix_units(ends.table, matrix)),
            head=tuple(_matrix_units(ends.head, matrix)),
        )


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


def _matrix_units(size: int, matrix: int) -> Iterator[EndUnit]:
    """Yield the unit of so many parameters that ends with a table or an output matrix, if any."""
    if size:
        yield EndUnit(size, matrix)
