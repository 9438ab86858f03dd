"""FSDP units of fully_shard, and the weights in them.

Ranks shard each weight along its first dim, whole row by whole row: the last ranks may have fewer
rows, or none, and all shards are padded to the first's (`FSDPParam` of PyTorch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from meshwright.hwprofiles import Units
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage, copies_embedding
from meshwright.simulator.model import (
    BlockKind,
    ParameterTensor,
    is_expert,
    rank_tensors,
)
from meshwright.simulator.replication.buckets import module_of, separate_widths
from meshwright.simulator.replication.data_parallel import (
    ParametersByGroup,
    Replication,
    parameters_by_group,
    stage_parameters,
)
from meshwright.simulator.replication.parts import StagePart


class Rows(NamedTuple):
    """Weight that is sharded row by row.

    Args:
        number: Number of rows.
        width: Elements of a row.
        splits: Whether more ranks than rows shard the elements of each row.
    """

    number: int
    width: int
    splits: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.number * self.width

    def padding(self, num_ranks: int) -> int:
        """Return the elements that pad the shards of so many ranks to one size.

        >>> [Rows(8, 10).padding(ranks) for ranks in (4, 6, 16)]
        [0, 40, 80]
        """
        # Cut along its width instead: each row is shared by several ranks without padding.
        if self.splits and num_ranks > self.number:
            return 0
        return -self.number % num_ranks * self.width


def padding(weights: Iterable[Rows], num_ranks: int) -> int:
    """Return the elements that pad the shards of *weights*."""
    return sum(each.padding(num_ranks) for each in weights)


def filled(weights: Sequence[Rows], num_ranks: int) -> int:
    """Return the elements of all shards of *weights*, padded to one size."""
    return sum(each.size for each in weights) + padding(weights, num_ranks)


@lru_cache(maxsize=4096)  # pipelines of a search have many stages in common
def unit_parts(
    shape: BlockShape, stage: Stage, num_shards: int = 1, num_expert_shards: int = 1
) -> tuple[StagePart, ...]:
    """Return the FSDP units of *stage* in model order: each layer is one.

    The embedding is part of the first unit, the head of the last; a tied embedding belongs to the
    unit with the embedding, or as a copy to the head's.

    Args:
        shape: Shape of its blocks.
        stage: Pipeline stage.
        num_shards: Ranks of a shard group.
        num_expert_shards: Ranks of a shard group of experts with a data-parallel group of their
            own.
    """
    if shape.stack.is_fully_sharded:
        return _units_with_ends(shape, stage, num_shards, num_expert_shards)
    # The embedding shares the first layer's unit, the head the last one's.
    second = int(stage.has_embedding) + 1
    cuts = [0, *range(second, second + stage.num_layers - 1), stage.num_blocks]
    units = [stage.part(first, end) for first, end in pairwise(cuts)]
    counts = [stage_parameters(shape, unit) for unit in units]
    # The last unit takes a tied matrix for a copy, also where its table is in the first one.
    counts[-1] += stage_parameters(shape, stage) - sum(counts)
    return tuple(StagePart(unit, (count,)) for unit, count in zip(units, counts, strict=True))


class EndUnits(NamedTuple):
    """Weights of a stage's units other than its layers.

    Args:
        root: Units that are gathered before all others and stay gathered.
        table: Gathered for the embedding, and again for its backward.
        head: Gathered for the head, and stays.
    """

    root: tuple[tuple[Rows, ...], ...]
    table: tuple[Rows, ...] = ()
    head: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, shape: BlockShape, stage: Stage) -> "EndUnits":
        """Return the units of *stage*."""
        ends = stage._replace(layers=())
        weights = tuple(unit_weights(shape, ends))
        if shape.stack.units is Units.ROOT:
            return cls(_units(weights))
        if not stage.has_embedding:
            return cls((), head=weights)
        first = len([*unit_weights(shape, ends._replace(has_head=False))])
        table, others, head = weights[:1], weights[1:first], weights[first:]
        # One parameter belongs to one unit: both ends are gathered together.
        if is_tied(shape, stage):
            return cls((*_units(others), table + head))
        return cls(_units(others), table, head)


def _units(weights: tuple[Rows, ...]) -> tuple[tuple[Rows, ...], ...]:
    return (weights,) if weights else ()


def is_tied(shape: BlockShape, stage: Stage) -> bool:
    """Return True if one weight is the stage's embedding and its output matrix.

    Added to the head's gradient, which is sharded over tensor-parallel ranks, the embedding's is
    sharded, too.
    """
    return shape.trained.tied_embeddings and stage.has_embedding and stage.has_head


def keeps_last_layer(shape: BlockShape, stage: Stage) -> bool:
    """Return True if the last layer of *stage*, a whole model, stays gathered until backward."""
    is_whole = stage.has_embedding and stage.has_head and stage.num_layers > 0
    return is_whole and shape.stack.keeps_last_layer


def _units_with_ends(
    shape: BlockShape, stage: Stage, num_shards: int, num_expert_shards: int
) -> tuple[StagePart, ...]:
    """Return each layer as a unit between those of `EndUnits`.

    The root is gathered first and reduced last: it belongs to the part before all layers.
    """
    no_blocks = Stage((), has_embedding=False, has_head=False)

    def buckets(weights: Sequence[Rows], num_ranks: int = num_shards) -> tuple[int, ...]:
        return (filled(weights, num_ranks),) if weights else ()

    units = EndUnits.of(shape, stage)
    embedding = no_blocks._replace(has_embedding=stage.has_embedding)
    parts: list[StagePart] = []
    if units.root:
        root = tuple(filled(each, num_shards) for each in units.root)
        parts.append(StagePart(no_blocks if units.table else embedding, root, stays=True))
    if units.table:
        parts.append(StagePart(embedding, buckets(units.table)))
    block = int(stage.has_embedding)
    for _, count in stage.layers:
        # As they are in the stage: of layers of a kind some may run again, and others not.
        layers = [stage.part(at, at + 1) for at in range(block, block + count)]
        own, experts = (
            [*unit_weights(shape, layers[0], of_experts=apart)] for apart in (False, True)
        )
        sizes = buckets(own), buckets(experts, num_expert_shards)
        parts += [StagePart(each, sizes[0], expert_buckets=sizes[1]) for each in layers]
        block += count
    # Its backward follows at once, so that to reshard it would be in vain.
    if keeps_last_layer(shape, stage):
        parts[-1] = parts[-1]._replace(stays=True)
    if stage.has_head:
        head = buckets(units.head)
        parts.append(StagePart(no_blocks._replace(has_head=True), head, stays=bool(head)))
    return tuple(parts)


def unit_shards(
    shape: BlockShape,
    unit: Stage,
    num_shards: int,
    shard: int | None = None,
    *,
    of_experts: bool = False,
) -> list[int]:
    """Return the elements of one shard of each weight of *unit*.

    Args:
        shape: Sizes of its blocks.
        unit: Layers, embedding and head of the unit.
        num_shards: Ranks of a shard group.
        shard: Index of the shard, without padding: the last ones may have fewer rows.
        of_experts: Weights of experts with a data-parallel group of their own, not the others:
            in a layer they are a unit of their own.
    """
    sizes = []
    for weight in unit_weights(shape, unit, of_experts=of_experts):
        rows, width, _ = weight
        shard_rows = -(-rows // num_shards)
        # torch.chunk: shards of equal size until rows run out.
        num_rows = (
            shard_rows if shard is None else min(shard_rows, max(0, rows - shard * shard_rows))
        )
        sizes.append(num_rows * width)
    return sizes


def num_weights(shape: BlockShape, unit: Stage, *, of_experts: bool = False) -> int:
    """Return the number of weights of *unit*; see `unit_shards`."""
    return sum(count for _, count in _counted_weights(shape, unit, of_experts=of_experts))


def filled_parameters(
    shape: BlockShape, stages: Sequence[Stage], replication: Replication
) -> ParametersByGroup:
    """Return `parameters_by_group` with their `shard_padding`."""
    found = []
    for count, holders in parameters_by_group(shape, stages).by_holders(replication):
        num_ranks, apart = holders.span.num_ranks, holders is not replication
        paddings = (shard_padding(shape, each, num_ranks, of_experts=apart) for each in stages)
        found.append(count + sum(paddings))
    return ParametersByGroup(*found)


def shard_padding(
    shape: BlockShape, unit: Stage, num_ranks: int, *, of_experts: bool = False
) -> int:
    """Return the padding of the shards of *unit* as memory counts it; see `unit_shards`."""
    if num_ranks == 1 or not fills_rows(shape):
        return 0
    weights = _counted_weights(shape, unit, of_experts=of_experts)
    return sum(count * each.padding(num_ranks) for each, count in weights)


def fills_rows(shape: BlockShape) -> bool:
    """Return True if memory counts the padding of each weight's shards.

    Models without experts have so many rows that their padding is next to nothing.
    """
    has_experts = shape.trained.experts is not None
    return shape.stack.is_fully_sharded and has_experts and not _is_flat(shape)


def _is_flat(shape: BlockShape) -> bool:
    """Return True if FullyShardedDataParallel (FSDP1) flattens the units of a model with experts.

    Its gradient norm is one number for all weights of a rank, DTensor's one for each weight.
    """
    return shape.trained.experts is not None and not shape.stack.norm_by_axis


def unit_weights(shape: BlockShape, unit: Stage, *, of_experts: bool = False) -> Iterator[Rows]:
    """Yield the weights of *unit*, see `unit_shards`."""
    for weight, count in _counted_weights(shape, unit, of_experts=of_experts):
        yield from [weight] * count


def _counted_weights(
    shape: BlockShape, unit: Stage, *, of_experts: bool
) -> Iterator[tuple[Rows, int]]:
    """Yield each different weight of *unit*, with its count."""
    counts: Counter[BlockKind] = Counter()
    for kind, count in unit.blocks:
        counts[kind] += count
    for kind, weights in _module_weights(shape, of_experts=of_experts):
        if counts[kind]:
            yield from ((weight, counts[kind]) for weight in weights)
    if copies_embedding(shape.trained, unit) and not of_experts:
        yield Rows(shape.local_vocab_size, shape.model.hidden_size), 1


@lru_cache  # of each shape every stage asks
def _module_weights(shape: BlockShape, *, of_experts: bool) -> list[tuple[BlockKind, list[Rows]]]:
    """Return the weights of each tensor, with its kind of block."""
    found: list[tuple[BlockKind, list[Rows]]] = []
    for tensor in rank_tensors(shape.trained, shape.ends_tp, shape.stack.vocabulary_multiple):
        if (bool(shape.expert_parameters) and is_expert(tensor)) is not of_experts:
            continue
        rows, *rest = shape.local_shape(tensor)
        parts = separate_widths(shape, module_of(tensor)) or (rows,)
        weights = [Rows(part, prod(rest)) for part in parts]
        if _is_flat(shape):
            weights = [Rows(rows * prod(rest), 1)]
        elif is_expert(tensor):
            weights = _expert_weights(shape, tensor, weights[0], of_experts=of_experts)
        found.append((tensor.block, weights))
    return found


def _expert_weights(
    shape: BlockShape, tensor: ParameterTensor, weight: Rows, *, of_experts: bool
) -> list[Rows]:
    """Return the weights of a *tensor* of experts, each of which is a row of *weight*.

    torchtitan's gate and up projections are separate weights.
    """
    is_apart = module_of(tensor) == "experts_in" and not shape.stack.transformers_layers
    parts = 2 if is_apart else 1
    splits = of_experts and shape.stack.splits_experts
    return [Rows(weight.number, weight.width // parts, splits)] * parts
