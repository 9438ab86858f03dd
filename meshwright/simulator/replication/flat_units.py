"""Units of Megatron-FSDP: flat buckets of each layer, and of all weights outside of layers.

A layer is a unit of one bucket for each format, and one more where it has routed experts. All other
weights form a list for each format, split where a bucket is full. Weights of a bucket lie behind
each other so that a shard ends where rows do: each shard is padded
(`build_data_parallel_buffer_index` and `_get_parameter_groups` of
megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py, core 0.16.1).

With ``fp8_param_gather`` weights of linear layers are in 8 bits, and gathered so. All ranks compute
a tensor's scale together; MXFP8, whose scales are not sharded, has a copy along rows and one along
columns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import lcm, prod
from typing import NamedTuple

from meshwright.hwprofiles import Recompute, RecomputeModule
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage, recomputed_modules
from meshwright.simulator.model import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    PREDICTIONS,
    BlockKind,
    ParameterTensor,
    in_engine_order,
    is_expert,
    is_linear,
    rank_tensors,
)
from meshwright.simulator.replication.buckets import bucket_limit
from meshwright.simulator.replication.data_parallel import Replication
from meshwright.simulator.replication.parts import StagePart
from meshwright.simulator.replication.unit_walk import (
    EndBucket,
    FlatBucket,
    FlatUnit,
    Step,
    UnitWalk,
    WalkSettings,
)

Shape = tuple[int, ...]
Format = tuple[bool, bool]
AROUND = (EMBEDDING, FINAL_NORM, PREDICTIONS, HEAD)
"""Blocks with weights outside all units."""
APART_NAMES = ("enorm.", "hnorm.", "eh_proj.", "prediction_norm.")
"""MTP weights outside of its layer, which is the unit."""


def bucket_size(shapes: Sequence[Shape], num_ranks: int) -> int:
    """Return the elements of a bucket of weights of these *shapes* over *num_ranks*.

    All weights but vectors shorter than the longest row begin at a multiple of a grid that all rows
    divide; the padding of a weight's last cell is filled with another's rest or short vectors.

    >>> bucket_size([(8, 4), (4,), (6, 8)], 2)
    96
    """
    # Widest rows first: they set the grid.
    rows = sorted(shapes, key=lambda shape: prod(shape[1:]), reverse=True)
    grid = prod(rows[0][1:])
    for shape in rows:
        size, width = prod(shape), prod(shape[1:])
        if size >= grid and (grid % width or size % grid):
            grid = lcm(grid, width)
    sizes = [prod(shape) for shape in rows]
    short = [size for size in sizes if size < grid]
    long = [size for size in sizes if size >= grid]
    end = sum(size for size in long if size % grid == 0)
    partial_cells = [size for size in long if size % grid]
    while partial_cells:
        size = partial_cells.pop(0)
        end += -(-size // grid) * grid
        space = grid - size % grid
        other = next((each for each in partial_cells if each % grid <= space), None)
        if other is not None:
            partial_cells.remove(other)
            end += other // grid * grid
            space -= other % grid
        # Short vectors fill the gap behind each weight; what is left of them comes last.
        for vector in [*short]:
            if vector <= space:
                space -= vector
                short.remove(vector)
    multiple = num_ranks * grid
    return -(-(end + sum(short)) // multiple) * multiple


class LocalWeight(NamedTuple):
    """Weight of a rank, with the tensor it is part of, its local shape, and its format.

    ``is_apart`` says that it is outside all units.
    """

    tensor: ParameterTensor
    shape: Shape
    is_narrow: bool
    is_apart: bool

    @property
    def format(self) -> Format:
        """Whether the weight is of experts, and in 8 bits: both decide its bucket."""
        return is_expert(self.tensor), self.is_narrow


def flat_parts(shape: BlockShape, stage: Stage, replication: Replication) -> tuple[StagePart, ...]:
    """Return the units of *stage*, a whole model, in model order."""
    walk, apart = flat_walk(shape, stage, *shard_counts(replication)), bool(shape.expert_parameters)
    nothing = Stage((), has_embedding=False, has_head=False)
    parts: list[StagePart] = []
    for block, steps in groupby(walk.steps, key=lambda step: step.block):
        units = [step.unit for step in steps if step.unit is not None]
        one = stage.part(block, block + 1)
        if units:
            parts.append(_unit_part(walk, one, units, apart=apart))
        ends = tuple(end.bucket for end in walk.ends if end.first == block)
        # Weights outside of layers are gathered once and stay to the end of the step.
        if ends or not units:
            # Weights with columns are gathered twice, along rows and along columns.
            gathered = [
                each.size * each.width for each in ends for _ in range(1 + each.has_columns)
            ]
            sizes = tuple(each.size for each in ends)
            held = nothing if units else one
            gathers = (tuple(gathered), ())
            parts.append(StagePart(held, sizes, stays=True, gathered_once=True, gathers=gathers))
    return tuple(parts)


def _unit_part(walk: UnitWalk, stage: Stage, units: Sequence[int], *, apart: bool) -> StagePart:
    """Return the part of a *stage*'s block that holds *units*."""
    every = [each for unit in units for each in walk.units[unit].buckets]
    vain = [each for unit in units for each in walk.repeated_gathers[unit]]
    sizes = [each.size for each in every]
    gathered = [each.size * each.width for each in every]
    once = (1,) * len(every)
    buckets, experts = _by_holders(every, sizes, once, split_experts=apart)
    return StagePart(
        stage,
        buckets,
        expert_buckets=experts,
        gathers=_by_holders(every, gathered, once, split_experts=apart),
        unused=_by_holders(every, gathered, vain, split_experts=apart),
        transposed=sum(each.transposed for each in every),
    )


def _by_holders(
    unit: Sequence[FlatBucket], sizes: Sequence[int], times: Sequence[int], *, split_experts: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return each of *sizes* so many times, split into those of replicas and of experts."""
    of_most, of_experts = (
        tuple(
            size
            for each, size, count in zip(unit, sizes, times, strict=True)
            for _ in range(count)
            # Experts without a group of their own are reduced with all else.
            if (each.is_expert and split_experts) is others
        )
        for others in (False, True)
    )
    return of_most, of_experts


def shard_counts(replication: Replication) -> tuple[int, int]:
    """Return the ranks of a bucket's shard group, and all ranks that reduce its gradients."""
    return replication.span.num_ranks, replication.dp_cp


def shards_of(replication: Replication) -> tuple[int, int]:
    """Return the ranks of a shard group of weights, and of routed experts."""
    experts = replication.experts or replication
    return replication.span.num_ranks, experts.span.num_ranks


@lru_cache
def flat_walk(
    shape: BlockShape, stage: Stage, num_shards: int, num_ranks: int | None = None
) -> UnitWalk:
    """Return the gathers and reductions of the buckets of *stage*, block by block.

    Args:
        shape: Shape of its blocks.
        stage: The whole model.
        num_shards: Ranks of a shard group of all weights but routed experts.
        num_ranks: All data- times context-parallel ranks; by default as many.
    """
    weights = [*_local_weights(shape)]
    units, num_layers = _units(shape, stage, weights, num_shards)
    kinds = [kind for kind, count in stage.blocks for _ in range(count)]
    places = {kind: place for place, kind in enumerate(kinds) if kind in AROUND}
    limit = bucket_limit(shape.stack, num_ranks or num_shards)
    wide, narrow = (
        [*_end_buckets([each for each in own if each.is_narrow is is_narrow], limit, places)]
        for own in [[each for each in weights if each.is_apart]]
        for is_narrow in (False, True)
    )
    ends = [
        EndBucket(_bucket(shape, own, num_shards), first, last)
        for own, first, last in (*wide, *narrow)
    ]
    num_further = len(units) - num_layers
    walk = UnitWalk(
        ends=tuple(ends),
        num_first=len(wide),
        units=units,
        num_layers=num_layers,
        steps=tuple(_steps(ends, places, num_layers, num_further)),
    )
    own_of = {kind: [each for each in weights if each.tensor.block == kind] for kind in {*kinds}}
    num_parameters = sum(
        prod(each.shape) for kind in kinds for each in own_of[kind] if not each.is_apart
    )
    settings = WalkSettings.of(
        num_parameters // len(units),
        shape.stack.unit_gather_parameters,
        is_pooled=shape.stack.doubles_unit_buffers,
        ends_prefetch=shape.stack.ends_gather_ahead,
    )
    return walk.walked(settings)


def _units(
    shape: BlockShape, stage: Stage, weights: Sequence[LocalWeight], num_shards: int
) -> tuple[tuple[FlatUnit, ...], int]:
    """Return the units of all layers, those of MTP last, and the number of the others."""
    num_mtp = shape.model.prediction_layers if stage.has_predictions else 0
    sharing = num_shards, num_shards * shape.tp // (shape.expert_tp * shape.ep)
    kinds = [kind for kind, count in stage.layers for _ in range(count)]
    by_kind: dict[BlockKind, FlatUnit] = {}
    for kind in {*kinds, *([PREDICTIONS] * bool(num_mtp))}:
        own_weights = [each for each in weights if each.tensor.block == kind and not each.is_apart]
        if kind == PREDICTIONS:
            own_weights = own_weights[: len(own_weights) // num_mtp]
        by_kind[kind] = _unit(shape, kind, own_weights, sharing)
    all_kinds = [*kinds, *[PREDICTIONS] * num_mtp]
    units = [
        by_kind[kind]._replace(repeated=() if stage.checkpoints.keeps_layers and place < len(kinds)
                             and stage.checkpoints.keeps(place) else by_kind[kind].repeated)
        for place, kind in enumerate(all_kinds)
    ]  # fmt: skip
    return tuple(units), len(kinds)


def _steps(
    ends: Sequence[EndBucket], places: Mapping[BlockKind, int], num_layers: int, num_mtp: int
) -> Iterator[Step]:
    """Yield the gathers that a forward pass asks for, in order.

    MTP layers look up tokens first; norms, their projection and the head have hooks of their own.
    """
    yield Step(0, tuple(place for place, end in enumerate(ends) if end.first == 0))
    yield from (Step(1 + unit, unit=unit) for unit in range(num_layers))
    for kind in (FINAL_NORM, PREDICTIONS, HEAD):
        block = places.get(kind, -1)
        own = [place for place, end in enumerate(ends) if end.first <= block <= end.last]
        if kind == PREDICTIONS:
            yield from (Step(block, (0, *own), num_layers + each) for each in range(num_mtp))
        elif block > 0:
            yield Step(block, tuple(own[-1:]))


def _local_weights(shape: BlockShape) -> Iterator[LocalWeight]:
    """Yield the weights of a block of each kind on one rank, each expert's by itself."""
    recipe = shape.recipe
    narrows = recipe is not None and recipe.holds_parameters
    for tensor in rank_tensors(shape.trained, shape.tp, shape.stack.vocabulary_multiple):
        # MTP's norms and projection are outside of the unit of its layer.
        is_apart = tensor.block in AROUND and (
            tensor.block != PREDICTIONS or tensor.name.startswith(APART_NAMES)
        )
        own, number = shape.local_shape(tensor), 1
        if is_expert(tensor):
            number, own = own[0], own[1:]
        is_narrow = narrows and is_linear(tensor)
        yield from [LocalWeight(tensor, own, is_narrow, is_apart)] * number


def _unit(
    shape: BlockShape, kind: BlockKind, weights: Sequence[LocalWeight], sharing: tuple[int, int]
) -> FlatUnit:
    """Return a layer's unit: a bucket for each format of its weights, and of its experts'.

    Of several formats they are in the order in which modules list weights (`named_parameters`).
    """
    ordered = list(weights)
    if any(each.is_narrow for each in weights):
        ordered = in_engine_order(weights, lambda each: each.tensor.name.partition(".")[0])
    found = []
    for of_experts, is_narrow in dict.fromkeys(each.format for each in ordered):
        own = [each for each in weights if each.format == (of_experts, is_narrow)]
        bucket = _bucket(shape, own, sharing[of_experts])
        found.append(bucket._replace(is_expert=of_experts))
    return FlatUnit(kind, tuple(found), _recomputed_buckets(shape, found))


def _bucket(shape: BlockShape, weights: Sequence[LocalWeight], num_ranks: int) -> FlatBucket:
    """Return the bucket of *weights* of one format.

    Transposes are made for backward where 8-bit GEMMs take operands in one layout
    (`post_all_gather_processing` of Transformer Engine 2.11, pytorch/tensor/utils.py).
    """
    size, recipe = bucket_size([each.shape for each in weights], num_ranks), shape.recipe
    if recipe is None or not weights[0].is_narrow:
        return FlatBucket(size, width=shape.precision.num_bytes, is_whole=num_ranks == 1)
    is_scaled = recipe.scaled_elements > 0
    transposed = sum(prod(each.shape) for each in weights) * (recipe.weight_copy_bytes - 1)
    return FlatBucket(
        size,
        is_whole=num_ranks == 1,
        width=1,
        has_columns=is_scaled,
        transposed=0 if is_scaled else transposed,
    )


def _recomputed_buckets(shape: BlockShape, buckets: Sequence[FlatBucket]) -> tuple[int, ...]:
    """Return the buckets of a layer whose weights recomputation reads."""
    is_full, modules = (
        shape.recompute is Recompute.FULL,
        {*recomputed_modules(shape.recompute, shape.modules)},
    )
    routes = any(each.is_expert for each in buckets)
    inner = (
        {RecomputeModule.MOE, RecomputeModule.SHARED_EXPERTS} if routes else {RecomputeModule.MLP}
    )
    wanted = {
        True: is_full or RecomputeModule.MOE in modules,
        False: is_full or bool(modules & {*inner, RecomputeModule.MLA_UP_PROJ}),
    }
    # Of parts of a layer only modules that ask by themselves do so again: those of MXFP8.
    return tuple(
        place
        for place, each in enumerate(buckets)
        if wanted[each.is_expert] and (is_full or each.has_columns)
    )


def _end_buckets(
    weights: Iterable[LocalWeight], limit: int, places: Mapping[BlockKind, int]
) -> Iterator[tuple[list[LocalWeight], int, int]]:
    """Yield the weights of each bucket outside all units, with its first and its last block.

    A tied matrix is a weight of the embedding.
    """
    buckets: list[list[LocalWeight]] = []
    for weight in weights:
        # A bucket is closed once it has reached the limit, so that it may exceed it.
        if not buckets or sum(prod(each.shape) for each in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(weight)
    for bucket in buckets:
        yield bucket, places[bucket[0].tensor.block], places[bucket[-1].tensor.block]
