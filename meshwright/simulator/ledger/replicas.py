"""What data-parallel replicas exchange: gradients, and the parameters made of them."""

from collections import Counter
from collections.abc import Callable, Sequence

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Axis, Stage
from meshwright.simulator.ledger.collectives import StepCollective
from meshwright.simulator.replication import (
    HeldParameters,
    Replication,
    StagePart,
    WireBytes,
    scale_bytes,
)

Exchange = Callable[[int, WireBytes, Replication], list[StepCollective]]


def gradient_reductions(
    num_parameters: int, wire: WireBytes, replication: Replication
) -> list[StepCollective]:
    """Return what reduces the gradients of *num_parameters*, one after the other.

    With replicas of the shards, a shard is then summed over them.
    """
    op, span = replication.reduce_op, replication.span
    size_bytes = num_parameters * wire.reduce_bytes
    filled_bytes = _filled(num_parameters, replication) * wire.reduce_bytes
    cast_bytes = 0
    if wire.casts is not None and replication.dp_cp > 1:
        cast_bytes = wire.casts.traffic_bytes(num_parameters, replication.shards.gradients)
    padding_bytes = filled_bytes - size_bytes
    calls = [StepCollective(replication.axis, op, size_bytes, span, 1, padding_bytes, cast_bytes)]
    if replication.sums_replicas_last:
        return calls
    return [*calls, *replica_sums(num_parameters, wire, replication)]


def replica_sums(
    num_parameters: int, wire: WireBytes, replication: Replication
) -> list[StepCollective]:
    """Return what sums a shard of the gradients of *num_parameters* over its replicas."""
    if replication.replica_span is None:
        return []
    num_ranks = replication.span.num_ranks
    whole = num_parameters, _filled(num_parameters, replication)
    share, filled = (-(-each * wire.reduce_bytes // num_ranks) for each in whole)
    over = CollectiveOp.ALL_REDUCE, share, replication.replica_span
    return [StepCollective(Axis.DP, *over, padding_bytes=filled - share)]


def parameter_gathers(
    num_parameters: int, wire: WireBytes, replication: Replication
) -> list[StepCollective]:
    """Return what gives *num_parameters* to all replicas; nothing where all update all."""
    if replication.gather_op is None:
        return []
    size_bytes = wire.gathered_bytes(num_parameters)
    filled = _filled(num_parameters, replication) - num_parameters
    call = replication.gather_op, size_bytes, replication.span
    gather = StepCollective(replication.axis, *call, padding_bytes=filled * wire.gather_bytes)
    narrow = wire.narrow
    if narrow is None or num_parameters != narrow.num_parameters or not narrow.num_scales:
        return [gather]
    largest = CollectiveOp.ALL_REDUCE, narrow.scale_bytes, replication.span, narrow.num_scales
    return [StepCollective(replication.axis, *largest), gather]


def scale_maxima(
    shape: BlockShape, stages: Sequence[Stage], replication: Replication
) -> list[StepCollective]:
    """Return what finds the scales of updated weights that ranks hold in 8 bits as shards."""
    if not replication.has_flat_units:
        return []
    both = replication, replication.experts or replication
    return [
        StepCollective(each.axis, CollectiveOp.ALL_REDUCE, size_bytes, each.span)
        for each, size_bytes in zip(both, scale_bytes(shape, stages), strict=True)
        if size_bytes
    ]


def held_exchanges(
    exchange: Exchange, held: HeldParameters, wire: WireBytes, replication: Replication
) -> list[StepCollective]:
    """Return the *exchange* of all that a rank has *held*, experts after all else."""
    return [
        each
        for count, holders in held.by_holders(replication)
        if count  # a rank without layers holds nothing
        for each in exchange(count, wire, holders)
    ]


def bucket_exchanges(
    exchange: Exchange, part: StagePart, wire: WireBytes, replication: Replication
) -> tuple[StepCollective, ...]:
    """Return the *exchange* of each bucket of *part*, equal ones as calls of one."""
    if exchange is parameter_gathers and part.gathers is not None:
        wire = wire._replace(gather_bytes=1)
        part = part._replace(buckets=part.gathers[0], expert_buckets=part.gathers[1])
    return tuple(
        each._replace(num_calls=each.num_calls * num_calls)
        for buckets, holders in part.by_holders(replication)
        for num_parameters, num_calls in Counter(buckets).items()
        for each in exchange(num_parameters, wire, holders)
    )


def _filled(num_parameters: int, replication: Replication) -> int:
    """Return *num_parameters*, filled up so that all ranks have shards of one size."""
    if replication.reduce_op is not CollectiveOp.REDUCE_SCATTER:
        return num_parameters
    return -(-num_parameters // replication.span.num_ranks) * replication.span.num_ranks
