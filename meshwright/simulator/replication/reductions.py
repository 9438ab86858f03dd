"""What is reduced in passes: units, buckets, or stretches of what each rank owns."""

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
    """Return the bytes of a parameter on the wire, and of units that are gathered in two formats.

    `convert_to_float8_training` of torchao 0.18 (float8/float8_linear_utils.py) makes linear layers
    of transformer blocks gather so; weights of one dim are none.
    """
    wire, recipe = WireBytes.of(shape.stack, shape.precision, plan), shape.recipe
    if recipe is None or not recipe.gathers_parameters:
        return wire
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
    """Return of `unit_shards` those of weights that have rows of more than one element."""
    weights = unit_weights(shape, unit, of_experts=False)
    return [-(-rows // num_shards) * width for rows, width, _ in weights if width > 1]


def reduced_parts(
    shape: BlockShape, stage: Stage, replication: Replication
) -> tuple[StagePart, ...]:
    """Return the parts of *stage* whose gradients are reduced in passes, in model order.

    With sharded parameters each layer is one; sharded gradients, and those that are reduced under
    the pass, go bucket by bucket, and so they come from the host or go there.  None means that a
    rank's gradients, if there are other replicas, are reduced as one after the last pass.
    """
    if not replication.has_replicas and replication.offload is Offload.NONE:
        return ()
    if replication.gathers_units:
        return _gathered_parts(shape, stage, replication)
    if replication.finds_unused:
        return cut_at(stage, listed_buckets(shape, stage))
    if replication.in_units or shape.stack.overlap_gradient_reduce:
        return bucket_parts(shape, stage, replication.dp_cp, shards=replication.zero_stage > 0)
    if replication.reduces_each_microbatch:
        return (StagePart(stage, (stage_parameters(shape, stage),)),)
    return ()


def _gathered_parts(
    shape: BlockShape, stage: Stage, replication: Replication
) -> tuple[StagePart, ...]:
    """Return the units of *stage*."""
    if replication.has_flat_units:
        return flat_parts(shape, stage, replication)
    experts = replication.experts
    of_experts = 1 if experts is None else experts.span.num_ranks
    units = unit_parts(shape, stage, replication.span.num_ranks, of_experts)
    return _owned(units, replication)


def _owned(units: tuple[StagePart, ...], replication: Replication) -> tuple[StagePart, ...]:
    """Return *units* with a bucket for each rank that owns something of them, where ranks do."""
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
        cuts = [start, *range((start // share + 1) * share, end, share), end]
        parts.append([right - left for left, right in pairwise(cuts)])
        start = end
    return parts
