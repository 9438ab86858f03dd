"""Parameters of a stage on one rank, by FSDP unit."""

from typing import NamedTuple

from meshwright.hwprofiles import Units
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import Size
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EMBEDDING, BlockKind, BlockRun
from meshwright.simulator.replication import (
    EndUnits,
    Rows,
    fills_rows,
    is_tied,
    padding,
    shard_padding,
    stage_parameters,
    unit_matrices,
)
from meshwright.simulator.units.layers import ByFamily, alike, families


class UnitWeights(NamedTuple):
    """Parameters of a unit, of the last of its weights, and of those gathered in 8 bits.

    ``padding`` of its shards is not in ``size``.
    """

    size: Size
    last: Size
    padding: Size
    narrow: Size = 0


class Padding(NamedTuple):
    """Parameters that pad the shards of a rank.

    Args:
        most: Padding of all but experts with a shard group of their own.
        experts: Padding of those.
    """

    most: Size
    experts: Size


class LayerWeights(NamedTuple):
    """Parameters of a layer on one rank.

    Args:
        most: Unit of all but experts with a shard group of their own.
        experts: Unit of those.
    """

    most: UnitWeights
    experts: UnitWeights

    @classmethod
    def of(cls, shape: BlockShape, kind: BlockKind, num_ranks: tuple[int, int]) -> "LayerWeights":
        """Return the parameters of a layer of a *kind*, with the ranks of both shard groups."""
        experts = shape.expert_parameters.get(kind, 0)
        layer = Stage((BlockRun(kind, 1),), has_embedding=False, has_head=False)
        paddings = _paddings(shape, layer, num_ranks)
        gathers_narrow = shape.recipe is not None and shape.recipe.gathers_parameters
        narrow = sum(unit_matrices(shape, layer, 1)) if gathers_narrow else 0
        return cls(
            UnitWeights(shape.parameters[kind] - experts, 0, paddings.most, narrow),
            UnitWeights(experts, _last_experts(shape, experts), paddings.experts),
        )


class StageWeights(NamedTuple):
    """Parameters of a stage on one rank; which units there are is structure.

    Args:
        total: Parameters of the stage but for experts with a shard group of their own.
        experts: Parameters of those in all its layers.
        padding: Padding of the shards.
        layers: Parameters of a layer of each family.
        cuts_experts: 1 where each of them is cut along its widths, as they are fewer than the ranks
            that share them, else 0.
        matrix: Parameters of the word embedding, or of the output matrix.
        positions: Parameters of the position embedding.
        tp: Tensor-parallel ranks that shard the embedding.
        roots: Units that are gathered before all others and stay gathered.
        table: Unit of the embedding, if it is one.
        head: Unit of the head, if it is one.
    """

    total: Size
    experts: Size
    padding: Padding
    layers: ByFamily[LayerWeights]
    cuts_experts: Size
    matrix: Size
    positions: Size
    tp: Size
    roots: tuple[UnitWeights, ...]
    table: tuple[UnitWeights, ...]
    head: tuple[UnitWeights, ...]

    @classmethod
    def of(
        cls, shape: BlockShape, stage: Stage, num_ranks: int = 1, num_expert_ranks: int = 1
    ) -> "StageWeights":
        """Return the parameters of *stage* with shard groups of so many ranks."""
        ranks = num_ranks, num_expert_ranks
        ends, matrix = EndUnits.of(shape, stage), shape.local_vocab_size * shape.model.hidden_size
        last = matrix
        if shape.stack.units is Units.ROOT:
            last = matrix * (stage.has_head and not is_tied(shape, stage))
        elif not is_tied(shape, stage):
            # Of positions alone, however few words there are beside them.
            last = sum(map(_size, ends.root))

        def end_unit(rows: tuple[Rows, ...], last: int) -> UnitWeights:
            filling = padding(rows, num_ranks) if fills_rows(shape) else 0
            return UnitWeights(_size(rows), last, filling)

        # One layer of each family stands for all of them.
        kinds = families(shape)
        layers = tuple(LayerWeights.of(shape, kind, ranks) for kind in kinds)
        experts = sum(
            each.num_layers * layers[each.family].experts.size for each in alike(stage, kinds)
        )
        return cls(
            total=stage_parameters(shape, stage) - experts,
            experts=experts,
            padding=_paddings(shape, stage, ranks),
            layers=layers,
            cuts_experts=int(
                shape.stack.splits_experts and num_expert_ranks > num_own_experts(shape)
            ),
            matrix=matrix,
            positions=shape.parameters[EMBEDDING] - matrix,
            tp=shape.ends_tp,
            roots=(
                *(end_unit(rows, _size(rows)) for rows in ends.root[:-1]),
                *(end_unit(rows, last) for rows in ends.root[-1:]),
            ),
            table=tuple(end_unit(rows, matrix) for rows in (ends.table,) if rows),
            head=tuple(end_unit(rows, matrix) for rows in (ends.head,) if rows),
        )

    @property
    def filled(self) -> tuple[Size, Size]:
        """Parameters with padding: of all but such experts, and of those."""
        return self.total + self.padding.most, self.experts + self.padding.experts


def _last_experts(shape: BlockShape, num_parameters: int) -> int:
    """Return the parameters of a layer's experts that are in their last tensor.

    That is the second matrix of all experts, or its biases; the parts of the first are as large.
    """
    if not num_parameters:
        return 0
    experts = shape.model.experts
    assert experts is not None
    # With biases the last tensor is that of the second matrix's.
    if experts.bias:
        return num_own_experts(shape) * shape.model.hidden_size
    return num_parameters // (experts.num_parts + 1)


def num_own_experts(shape: BlockShape) -> int:
    """Return the number of routed experts of a layer on a rank."""
    experts = shape.trained.experts
    return 0 if experts is None else experts.num_experts // shape.ep


def _size(rows: tuple[Rows, ...]) -> int:
    """Return the number of elements of *rows*."""
    return sum(each.size for each in rows)


def _paddings(shape: BlockShape, unit: Stage, num_ranks: tuple[int, int]) -> Padding:
    """Return the padding of the shards of *unit*, with the ranks of both shard groups."""
    return Padding(
        shard_padding(shape, unit, num_ranks[0]),
        shard_padding(shape, unit, num_ranks[1], of_experts=True),
    )
