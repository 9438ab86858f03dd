"""What data parallelism adds to a rank's step: reductions, gathers and the update."""

from collections.abc import Sequence
from typing import NamedTuple

from hwprofiles import CollectiveOp, Precision, StackProfile
from simulator.block_shape import BlockShape
from simulator.costs import Category, Cost, CostModel, PhaseCost
from simulator.memory import Shards, rank_parameters
from simulator.mesh import Axis, GroupSpan, strided_span
from simulator.placement import zero_communication

# An fp32 Adam update reads weight, gradient and two moments and writes all but the gradient.
FP32_UPDATE_TRAFFIC_BYTES = 28
NORM_BYTES = 4


class Stage(NamedTuple):
    """Layers of one virtual stage and whether it holds an end of the model."""

    num_layers: int
    has_embedding: bool
    has_head: bool


class Replication(NamedTuple):
    """The data-parallel side of a plan: sharding, groups and their collectives.

    ``span`` is that of a set of shards (of a data-parallel group where nothing is sharded),
    ``replica_span`` that of the ranks that hold the same shard: None where all share one set.
    """

    zero_stage: int
    span: GroupSpan
    replica_span: GroupSpan | None
    reduce_op: CollectiveOp
    gather_op: CollectiveOp | None
    shards: Shards
    reduces_each_microbatch: bool
    reshards: bool = True

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.span.num_ranks * (self.replica_span.num_ranks if self.replica_span else 1)

    @property
    def gathers_units(self) -> bool:
        """Whether parameters are gathered unit by unit in every pass."""
        return self.shards.parameters > 1

    @classmethod
    def of(
        cls,
        zero_stage: int,
        span: GroupSpan,
        *,
        replica_span: GroupSpan | None = None,
        reduces_each_microbatch: bool = False,
    ) -> "Replication":
        """Return the replication of a plan; its collectives follow from the placements.

        Args:
            zero_stage: What is sharded.
            span: Where a set of shards lies; without sharding, a data-parallel group.
            replica_span: Where the ranks with the same shard lie.
            reduces_each_microbatch: Whether stages 2 and 3 reduce in each microbatch.
        """
        communication = zero_communication(zero_stage)
        assert communication.gradient.op is not None
        return cls(
            zero_stage=zero_stage,
            span=span,
            replica_span=replica_span,
            reduce_op=communication.gradient.op,
            gather_op=communication.parameters and communication.parameters.op,
            shards=Shards.of(
                span.num_ranks, zero_stage, reduces_each_microbatch=reduces_each_microbatch
            ),
            reduces_each_microbatch=reduces_each_microbatch and zero_stage >= 2,
        )

    def reductions(self, size_bytes: int) -> list[tuple[CollectiveOp, int, GroupSpan]]:
        """Return the collectives that reduce *size_bytes* of gradients, one after the other.

        With replicas of the shards, a shard is then summed over them.
        """
        calls = [(self.reduce_op, size_bytes, self.span)]
        if self.replica_span is not None:
            share = -(-size_bytes // self.span.num_ranks)
            calls.append((CollectiveOp.ALL_REDUCE, share, self.replica_span))
        return calls


class Wire(NamedTuple):
    """Bytes a parameter costs in each collective and in the update."""

    reduce_bytes: int
    gather_bytes: int
    update_traffic_bytes: int

    @classmethod
    def of(cls, stack: StackProfile, precision: Precision) -> "Wire":
        """Return the bytes of *stack*; fp32 reduces and gathers fp32."""
        if precision is Precision.FP32:
            return cls(4, 4, FP32_UPDATE_TRAFFIC_BYTES)
        return cls(stack.gradient_reduce_bytes, precision.num_bytes, stack.optimizer_traffic_bytes)


def bucket_layers(shape: BlockShape, stage: Stage) -> list[int]:
    """Return the layers of each gradient bucket of *stage*, as even as whole layers allow.

    >>> from simulator.data_parallel import spread
    >>> spread(7, 3)
    [3, 2, 2]
    """
    parameters = stage_parameters(shape, stage)
    wanted = -(-parameters // shape.stack.gradient_bucket_parameters)
    return spread(stage.num_layers, max(1, min(stage.num_layers, wanted)))


def spread(total: int, num_parts: int) -> list[int]:
    """Return *total* split into *num_parts* whole numbers that differ by at most one."""
    share, extra = divmod(total, num_parts)
    return [share + (index < extra) for index in range(num_parts)]


def stage_parameters(shape: BlockShape, stage: Stage) -> int:
    """Return the parameters that one rank holds of *stage*."""
    return rank_parameters(
        shape, stage.num_layers, has_embedding=stage.has_embedding, has_head=stage.has_head
    )


def bucket_stages(shape: BlockShape, stage: Stage) -> list[Stage]:
    """Return the part of *stage* in each bucket, in model order."""
    layers = bucket_layers(shape, stage)
    last = len(layers) - 1
    return [
        Stage(count, stage.has_embedding and index == 0, stage.has_head and index == last)
        for index, count in enumerate(layers)
    ]


def part_parameters(shape: BlockShape, stage: Stage, parts: Sequence[Stage]) -> list[int]:
    """Return the parameters of each part of *stage* in model order; they add up to the stage's.

    A tied table belongs to the part with the embedding, or as a copy to the head's.
    """
    counts = [stage_parameters(shape, part) for part in parts]
    counts[-1] += stage_parameters(shape, stage) - sum(counts)
    return counts


def bucket_parameters(shape: BlockShape, stage: Stage) -> list[int]:
    """Return the parameters of each gradient bucket of *stage*, in model order."""
    return part_parameters(shape, stage, bucket_stages(shape, stage))


def stage_units(stage: Stage) -> list[Stage]:
    """Return the part of *stage* in each sharded unit, in model order."""
    last = max(0, stage.num_layers - 1)
    return [
        Stage(
            min(1, stage.num_layers),
            stage.has_embedding and index == 0,
            stage.has_head and index == last,
        )
        for index in range(last + 1)
    ]


def sharded_parts(shape: BlockShape, stage: Stage, to: Replication) -> list[Stage]:
    """Return the parts of *stage* whose states are gathered or reduced in every pass, if any.

    With sharded parameters each layer is one, with sharded gradients each bucket.
    """
    if to.gathers_units:
        return stage_units(stage)
    if to.shards.gradients > 1:
        return bucket_stages(shape, stage)
    return []


def reduce_cost(costs: CostModel, num_parameters: int, wire: Wire, to: Replication) -> Cost:
    """Return the time of reducing the gradients of *num_parameters*."""
    calls = [
        costs.collective(op, size_bytes, span, Axis.DP)
        for op, size_bytes, span in to.reductions(num_parameters * wire.reduce_bytes)
    ]
    return Cost(sum(call.time_ps for call in calls), calls[0].source)


def gather_cost(costs: CostModel, num_parameters: int, wire: Wire, to: Replication) -> Cost:
    """Return the time of gathering *num_parameters* updated ones; free where all update all."""
    if to.gather_op is None:
        return Cost(0, costs.cluster.inter_node.kind)
    return costs.collective(to.gather_op, num_parameters * wire.gather_bytes, to.span, Axis.DP)


def update_cost(
    costs: CostModel, num_parameters: int, wire: Wire, to: Replication, cast_bytes: int = 0
) -> PhaseCost:
    """Return the time of the optimizer on one rank's share of *num_parameters*.

    *cast_bytes* is the traffic of casting the rank's weights to fp8 after it, if the stack does.
    """
    share = -(-num_parameters // to.shards.optimizer)
    cost = costs.memory_traffic(share * wire.update_traffic_bytes + cast_bytes)
    return PhaseCost.total([(Category.OPTIMIZER, cost)])


def norm_cost(costs: CostModel) -> Cost:
    """Return the time of the gradient norm's all-reduce over all ranks."""
    span = strided_span(0, 1, costs.world_size, costs.cluster.devices_per_node)
    return costs.collective(CollectiveOp.ALL_REDUCE, NORM_BYTES, span, Axis.DP)


def sum_layers(stages: Sequence[Stage]) -> int:
    """Return the layers of a rank that holds *stages*."""
    return sum(stage.num_layers for stage in stages)


def sum_parameters(shape: BlockShape, stages: Sequence[Stage]) -> int:
    """Return the parameters of a rank that holds *stages*."""
    return sum(stage_parameters(shape, stage) for stage in stages)
