"""The units of Megatron-FSDP: flat buckets of each layer, and of what lies outside all layers.

A layer is a unit of one bucket, or of two where it has routed experts.  Embedding, final norm and
head are one list of weights, cut where a bucket is full.  Weights of a bucket lie behind each other
so that a shard ends where rows do: all is filled up (`build_data_parallel_buffer_index` and
`_get_parameter_groups` of megatron/core/distributed/fsdp/src/megatron_fsdp/
param_and_grad_buffer.py, core 0.16.1).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import lcm, prod

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EMBEDDING, HEAD, BlockKind, is_expert, rank_tensors
from meshwright.simulator.replication.buckets import bucket_limit
from meshwright.simulator.replication.parts import StagePart
from meshwright.simulator.replication.unit_walk import EndBuckets, FlatBucket, UnitWalk, Weights

Shape = tuple[int, ...]


def bucket_size(shapes: Sequence[Shape], num_ranks: int) -> int:
    """Return the elements of a bucket of weights of these *shapes* that *num_ranks* share.

    All weights but vectors that are shorter than the longest row begin at a multiple of a grid that
    all rows divide; what a weight leaves of its last cell another's rest or short vectors take.

    >>> bucket_size([(8, 4), (4,), (6, 8)], 2)
    96
    """
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
    rests = [size for size in long if size % grid]
    while rests:
        size = rests.pop(0)
        end += -(-size // grid) * grid
        space = grid - size % grid
        other = next((each for each in rests if each % grid <= space), None)
        if other is not None:
            rests.remove(other)
            end += other // grid * grid
            space -= other % grid
        for vector in [*short]:
            if vector <= space:
                space -= vector
                short.remove(vector)
    multiple = num_ranks * grid
    return -(-(end + sum(short)) // multiple) * multiple


def flat_parts(shape: BlockShape, stage: Stage, num_ranks: int) -> tuple[StagePart, ...]:
    """Return the units of *stage*, a whole model that *num_ranks* share, in model order."""
    walk, apart = flat_walk(shape, stage, num_ranks), bool(shape.expert_parameters)
    nothing = Stage((), has_embedding=False, has_head=False)
    embedding, head = nothing._replace(has_embedding=True), nothing._replace(has_head=True)
    parts = [StagePart(embedding, walk.ends.early, stays=True, is_once=True)]
    for place, ((_, unit), vain) in enumerate(zip(walk.layers, walk.vain_gathers, strict=True), 1):
        sizes, unused = (
            _by_holders(unit, (1,) * len(unit), apart=apart),
            _by_holders(unit, vain, apart=apart),
        )
        one = stage.part(place, place + 1)
        parts.append(StagePart(one, sizes[0], expert_buckets=sizes[1], unused=unused))
    return (*parts, StagePart(head, walk.ends.late, stays=True, is_once=True))


def _by_holders(
    unit: Sequence[FlatBucket], times: Sequence[int], *, apart: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return buckets so many times: those of a replica's ranks, and experts' of others."""
    every = [(each, each.is_expert and apart) for each in unit]
    of_most, of_experts = (
        tuple(
            each.size
            for (each, is_apart), count in zip(every, times, strict=True)
            for _ in range(count)
            if is_apart is others
        )
        for others in (False, True)
    )
    return of_most, of_experts


@lru_cache
def flat_walk(shape: BlockShape, stage: Stage, num_ranks: int) -> UnitWalk:
    """Return how passes gather the buckets of *stage* and reduce their gradients.

    Args:
        shape: Of its blocks.
        stage: The whole model.
        num_ranks: Data- times context-parallel ranks, which share all but routed experts.
    """
    shapes = dict(_weights(shape))
    experts = num_ranks * shape.tp // (shape.expert_tp * shape.ep)
    layers = []
    for kind, count in stage.layers:
        unit = tuple(_unit(shapes[kind], num_ranks, experts))
        layers += [(kind, unit)] * count
    num_parameters = sum(
        sum(map(prod, (*shapes[kind].most, *shapes[kind].experts))) for kind, _ in layers
    )
    ends = _end_buckets(shapes, bucket_limit(shape.stack, num_ranks), num_ranks)
    return UnitWalk.of(ends, tuple(layers), num_parameters // len(layers))


def _weights(shape: BlockShape) -> Iterator[tuple[BlockKind, Weights]]:
    """Yield the weights of a block of each kind on one rank; each expert has its own."""
    tensors = rank_tensors(shape.trained, shape.tp, shape.stack.vocabulary_multiple)
    for kind in shape.parameters:
        most: list[Shape] = []
        experts: list[Shape] = []
        for tensor in tensors:
            if tensor.block == kind and is_expert(tensor):
                num, *rest = shape.local_shape(tensor)
                experts += [tuple(rest)] * num
            elif tensor.block == kind:
                most.append(shape.local_shape(tensor))
        yield kind, Weights(tuple(most), tuple(experts))


def _unit(weights: Weights, num_ranks: int, of_experts: int) -> Iterator[FlatBucket]:
    """Yield the buckets of a layer: that of its experts if it has some, which fewer may share."""
    yield FlatBucket(bucket_size(weights.most, num_ranks))
    if weights.experts:
        size = bucket_size(weights.experts, of_experts)
        yield FlatBucket(size, is_expert=True, is_whole=of_experts == 1)


def _end_buckets(shapes: dict[BlockKind, Weights], limit: int, num_ranks: int) -> EndBuckets:
    """Return the buckets outside all layers: a tied matrix is a weight of the embedding."""
    buckets: list[list[Shape]] = [[]]
    num_early, num_shared = 0, 0
    for kind in (EMBEDDING, HEAD):
        num_early = len(buckets) if kind == HEAD else 0
        num_shared = len(buckets[-1])
        for weight in shapes[kind].most:
            if sum(map(prod, buckets[-1])) >= limit:
                buckets.append([])
            buckets[-1].append(weight)
    sizes = tuple(bucket_size(bucket, num_ranks) for bucket in buckets)
    is_shared = len(buckets[num_early - 1]) > num_shared
    return EndBuckets(sizes[:num_early], sizes[num_early:], is_shared)
