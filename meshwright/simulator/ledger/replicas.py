"""Data-parallel collectives: gradient reductions, and all-gathers of updated parameters."""

from collections import Counter
from collections.abc import Callable, Sequence

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Axis, Stage
from meshwright.simulator.ledger.collectives import StepCollective
from meshwright.simulator.replication import (
    ParametersByGroup,
    Replication,
    StagePart,
    WireBytes,
    scale_bytes,
)

Exchange = Callable[[int, WireBytes, Replication], list[StepCollective]]


def gradient_reductions(
    num_parameters: int, wire: WireBytes, replication: Replication
) -> list[StepCollective]:
    """Return the reductions of the gradients of *num_parameters*, one after the other.

    Under HSDP a reduce-scatter, then the replicate group's all-reduce of a shard.
    """
    op, span = replication.reduce_op, replication.span
    size_bytes = num_parameters * wire.reduce_bytes
    padded_bytes = _padded(num_parameters, replication) * wire.reduce_bytes
    cast_bytes = 0
    # A single rank reduces nothing, and so casts nothing.
    if wire.casts is not None and replication.dp_cp > 1:
        cast_bytes = wire.casts.traffic_bytes(num_parameters, replication.shards.gradients)
    padding_bytes = padded_bytes - size_bytes
    calls = [StepCollective(replication.axis, op, size_bytes, span, 1, padding_bytes, cast_bytes)]
    if replication.sums_replicas_last:
        return calls
    return [*calls, *replica_sums(num_parameters, wire, replication)]


def replica_sums(
    num_parameters: int, wire: WireBytes, replication: Replication
) -> list[StepCollective]:
    """Return the replicate group's all-reduce of a gradient shard of *num_parameters*."""
    if replication.replica_span is None:
        return []
    num_ranks = replication.span.num_ranks
    sizes = num_parameters, _padded(num_parameters, replication)
    share, padded = (-(-each * wire.reduce_bytes // num_ranks) for each in sizes)
    call = CollectiveOp.ALL_REDUCE, share, replication.replica_span
    return [StepCollective(Axis.DP, *call, padding_bytes=padded - share)]


def parameter_gathers(
    num_parameters: int, wire: WireBytes, replication: Replication
) -> list[StepCollective]:
    """Return the all-gather of *num_parameters*; none where each replica updates all parameters."""
    if replication.gather_op is None:
        return []
    size_bytes = wire.gathered_bytes(num_parameters)
    padding = _padded(num_parameters, replication) - num_parameters
    call = replication.gather_op, size_bytes, replication.span
    gather = StepCollective(replication.axis, *call, padding_bytes=padding * wire.gather_bytes)
    narrow = wire.narrow
    if narrow is None or num_parameters != narrow.num_parameters or not narrow.num_scales:
        return [gather]
    # Without precomputed scales each weight's is found before its gather.
    largest = CollectiveOp.ALL_REDUCE, narrow.scale_bytes, replication.span, narrow.num_scales
    return [StepCollective(replication.axis, *largest), gather]


def scale_maxima(
    shape: BlockShape, stages: Sequence[Stage], replication: Replication
) -> list[StepCollective]:
    """Return the all-reduces of maxima from which scales of 8-bit weight shards follow."""
    if not replication.has_flat_units:
        return []
    both = replication, replication.experts or replication
    return [
        StepCollective(each.axis, CollectiveOp.ALL_REDUCE, size_bytes, each.span)
        for each, size_bytes in zip(both, scale_bytes(shape, stages), strict=True)
        if size_bytes
    ]


def rank_collectives(
    exchange: Exchange, held: ParametersByGroup, wire: WireBytes, replication: Replication
) -> list[StepCollective]:
    """Return the *exchange* of all *held* parameters of a rank, experts after all others."""
    return [
        each
        for count, holders in held.by_holders(replication)
        if count  # a rank without layers holds nothing
        for each in exchange(count, wire, holders)
    ]


def bucket_exchanges(
    exchange: Exchange, part: StagePart, wire: WireBytes, replication: Replication
) -> tuple[StepCollective, ...]:
    """Return the *exchange* of each bucket of *part*, equal buckets as calls of one."""
    if exchange is parameter_gathers and part.gathers is not None:
        # These sizes are in bytes already.
        wire = wire._replace(gather_bytes=1)
        part = part._replace(buckets=part.gathers[0], expert_buckets=part.gathers[1])
    return tuple(
        each._replace(num_calls=each.num_calls * num_calls)
        for buckets, holders in part.by_holders(replication)
        for num_parameters, num_calls in Counter(buckets).items()
        for each in exchange(num_parameters, wire, holders)
    )


def _padded(num_parameters: int, replication: Replication) -> int:
    """Return *num_parameters*, padded so that all ranks have shards of one size."""
    # All-reduces and broadcasts do not need equal shards.
    if replication.reduce_op is not CollectiveOp.REDUCE_SCATTER:
        return num_parameters
    return -(-num_parameters // replication.span.num_ranks) * replication.span.num_ranks
