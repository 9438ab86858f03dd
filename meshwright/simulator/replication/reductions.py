"""Parts of a stage that are reduced in passes: FSDP units, buckets, or owners' shards."""

from collections.abc import Sequence
from itertools import pairwise

from meshwright.hwprofiles import Offload
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import ResolvedPlan, Stage
from meshwright.simulator.model import BlockRun, layer_kinds
from meshwright.simulator.replication.buckets import bucket_parts, listed_buckets
from meshwright.simulator.replication.data_parallel import (
    NarrowUnit,
    Replication,
    WireBytes,
    stage_parameters,
)
from meshwright.simulator.replication.flat_units import flat_parts
from meshwright.simulator.replication.parts import StagePart, cut_at
from meshwright.simulator.replication.unit_parts import unit_parts, unit_shards, unit_weights


def wire_bytes(shape: BlockShape, plan: ResolvedPlan) -> WireBytes:
    """Return the bytes of a parameter in collectives, also of units gathered in two formats.

    `convert_to_float8_training` of torchao 0.18 (float8/float8_linear_utils.py) makes linear layers
    of transformer blocks gather in 8 bits; weights of one dim are excluded.
    """
    wire, recipe = WireBytes.of(shape.stack, shape.precision, plan), shape.recipe
    if recipe is None or not recipe.gathers_parameters:
        return wire
    # One layer stands for all: each is a unit of its own.
    layer = Stage(
        (BlockRun(layer_kinds(shape.trained)[0], 1),), has_embedding=False, has_head=False
    )
    shards = unit_shards(shape, layer, plan.num_shards)
    matrices = unit_matrices(shape, layer, plan.num_shards)
    found = NarrowUnit(
        num_parameters=plan.num_shards * sum(shards),
        num_narrow=plan.num_shards * sum(matrices),
        num_scales=0 if recipe.precomputes_scales else len(matrices),
        scale_bytes=shape.stack.sharded_parameter_bytes,
    )
    return wire._replace(narrow=found)


def unit_matrices(shape: BlockShape, unit: Stage, num_shards: int) -> list[int]:
    """Return those of `unit_shards` that are matrices, with rows of more than one element."""
    weights = unit_weights(shape, unit, of_experts=False)
    return [-(-rows // num_shards) * width for rows, width, _ in weights if width > 1]


def reduced_parts(
    shape: BlockShape, stage: Stage, replication: Replication
) -> tuple[StagePart, ...]:
    """Return the parts of *stage* whose gradients are reduced in passes, in model order.

    With sharded parameters each layer is a part; sharded gradients, and those whose reduction
    overlaps with the pass, go bucket by bucket, and so do offloaded ones. No part means that a
    rank's gradients are reduced, if at all, as one after the last pass.
    """
    if not replication.has_replicas and replication.offload is Offload.NONE:
        return ()
    if replication.gathers_units:
        return _gathered_parts(shape, stage, replication)
    if replication.finds_unused:
        return cut_at(stage, listed_buckets(shape, stage))
    if replication.in_units or shape.stack.overlap_gradient_reduce:
        return bucket_parts(shape, stage, replication.dp_cp, shards=replication.zero_stage > 0)
    # No overlap: one reduction of the whole stage after each backward pass.
    if replication.reduces_each_microbatch:
        return (StagePart(stage, (stage_parameters(shape, stage),)),)
    return ()


def _gathered_parts(
    shape: BlockShape, stage: Stage, replication: Replication
) -> tuple[StagePart, ...]:
    """Return the FSDP units of *stage*."""
    if replication.has_flat_units:
        return flat_parts(shape, stage, replication)
    experts = replication.experts
    of_experts = 1 if experts is None else experts.span.num_ranks
    units = unit_parts(shape, stage, replication.span.num_ranks, of_experts)
    return _owned(units, replication)


def _owned(units: tuple[StagePart, ...], replication: Replication) -> tuple[StagePart, ...]:
    """Return *units* with a bucket for each rank that owns some of their parameters, if any."""
    if not replication.has_owners:
        return units
    counts = owned_parts([sum(unit.buckets) for unit in units], replication.span.num_ranks)
    return tuple(
        unit._replace(buckets=tuple(owned)) for unit, owned in zip(units, counts, strict=True)
    )


def owned_parts(counts: Sequence[int], num_owners: int) -> list[list[int]]:
    """Return the parameters of each unit by owner: equal stretches of the model, in its order.

    >>> owned_parts([6, 4, 2], 3)
    [[4, 2], [2, 2], [2]]
    """
    share = -(-sum(counts) // num_owners)
    parts: list[list[int]] = []
    start = 0
    for count in counts:
        end = start + count
        # A unit that spans several owners' shards is cut at each border.
        cuts = [start, *range((start // share + 1) * share, end, share), end]
        parts.append([right - left for left, right in pairwise(cuts)])
        start = end
    return parts
