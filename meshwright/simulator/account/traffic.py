"""What a rank puts on the wire in a step: every collective with its axis, size and count."""

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, StackProfile
from meshwright.simulator.blocks import (
    BlockOperators,
    BlockShape,
    BlockTable,
    Collective,
)
from meshwright.simulator.costs import sent_ratio
from meshwright.simulator.layout import Axis, Mesh, ParallelPlan, Stage, TrainingJob, rank_stages
from meshwright.simulator.replication import (
    Replication,
    WireBytes,
    bucket_parts,
    part_gathers,
    reduced_parts,
    sum_parameters,
    used_map_bytes,
)
from meshwright.simulator.schedules import Refetches
from meshwright.simulator.step import rank_refetches, replication_of


class Traffic(NamedTuple):
    """Equal collectives of one rank in one step; ``size_bytes`` as in `Collective`."""

    axis: Axis
    op: CollectiveOp
    size_bytes: int
    num_ranks: int
    num_calls: int

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes the rank sends in all of them, by ring; where one rank is the root, on average.

        >>> Traffic(Axis.DP, CollectiveOp.ALL_REDUCE, 800, 8, 1).sent_bytes
        Fraction(1400, 1)
        """
        return self.num_calls * self.size_bytes * sent_ratio(self.op, self.num_ranks)


def rank_traffic(
    job: TrainingJob, plan: ParallelPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the tensor- and data-parallel collectives of a pipeline rank in one step.

    Args:
        job: What is trained.
        plan: How it is laid out.
        stack: With what software.
        pp_rank: Whose collectives; messages between stages are not among them.
    """
    shape, blocks = BlockShape.of(job, plan, stack), BlockTable()
    stages = rank_stages(job.model, plan, pp_rank)
    counted: Counter[tuple[Axis, CollectiveOp, int, int]] = Counter()
    for stage in stages:
        for collective, count in _stage_collectives(blocks, shape, stage):
            key = (Axis.TP, collective.op, collective.size_bytes, plan.tp)
            counted[key] += count * plan.num_microbatches(job)
    for op, size_bytes, num_ranks, count in _data_parallel_collectives(job, plan, shape, pp_rank):
        counted[Axis.DP, op, size_bytes, num_ranks] += count
    return tuple(Traffic(*key, count) for key, count in counted.items() if count)


def sent_bytes(traffic: tuple[Traffic, ...], axis: Axis) -> Fraction:
    """Return what a rank sends over *axis* in a step."""
    return sum((each.sent_bytes for each in traffic if each.axis is axis), start=Fraction(0))


def stage_blocks(
    blocks: BlockTable, shape: BlockShape, stage: Stage
) -> Iterator[tuple[BlockOperators, int]]:
    """Yield the operators of each run of blocks of a virtual stage, and how many it has."""
    for kind, count in stage.blocks:
        yield blocks.operators(shape, kind), count


def _stage_collectives(
    blocks: BlockTable, shape: BlockShape, stage: Stage
) -> Iterator[tuple[Collective, int]]:
    """Yield the tensor-parallel collectives of one microbatch and how often each runs."""
    for operators, count in stage_blocks(blocks, shape, stage):
        for operator in (*operators.forward, *operators.recompute, *operators.backward):
            if isinstance(operator, Collective):
                yield operator, count


def _data_parallel_collectives(
    job: TrainingJob, plan: ParallelPlan, shape: BlockShape, pp_rank: int
) -> Iterator[tuple[CollectiveOp, int, int, int]]:
    """Yield operation, size, ranks and count of the data-parallel collectives of a step."""
    if plan.dp == 1:
        return
    stages = rank_stages(job.model, plan, pp_rank)
    replication = replication_of(plan, shape.stack, Mesh.of(plan))
    wire = WireBytes.of(shape.stack, job.precision, plan)
    num_microbatches = plan.num_microbatches(job)
    in_each = num_microbatches if replication.reduces_each_microbatch else 1
    whole = sum_parameters(shape, stages)
    for parameters in _reduced(shape, stages, replication) or [whole]:
        padded = _padded(parameters, replication)
        for op, size_bytes, span in replication.reductions(padded * wire.reduce_bytes):
            yield op, size_bytes, span.num_ranks, in_each
    if plan.find_unused:
        yield CollectiveOp.ALL_REDUCE, used_map_bytes(shape, stages), replication.span.num_ranks, 1
    refetches = rank_refetches(plan, replication, pp_rank, num_microbatches)
    yield from _parameter_gathers(shape, stages, replication, wire, num_microbatches, refetches)


def _parameter_gathers(
    shape: BlockShape,
    stages: tuple[Stage, ...],
    replication: Replication,
    wire: WireBytes,
    num_microbatches: int,
    refetches: Sequence[Refetches],
) -> Iterator[tuple[CollectiveOp, int, int, int]]:
    """Yield operation, size, ranks and count of what gives parameters to the replicas."""
    if replication.gather_op is None:
        return
    if replication.gathers_units:
        for stage, stage_refetches in zip(stages, refetches, strict=True):
            for part in reduced_parts(shape, stage, replication):
                gathers = part_gathers(part, replication, num_microbatches, stage_refetches)
                for parameters in part.buckets:
                    size_bytes = _padded(parameters, replication) * wire.gather_bytes
                    yield replication.gather_op, size_bytes, replication.span.num_ranks, gathers
        return
    for parameters in _gathered(shape, stages, replication.dp) or [sum_parameters(shape, stages)]:
        size_bytes = _padded(parameters, replication) * wire.gather_bytes
        yield replication.gather_op, size_bytes, replication.span.num_ranks, 1


def _padded(parameters: int, replication: Replication) -> int:
    """Return *parameters*, filled up so that all ranks have shards of one size."""
    if replication.reduce_op is not CollectiveOp.REDUCE_SCATTER:
        return parameters
    return -(-parameters // replication.span.num_ranks) * replication.span.num_ranks


def _reduced(shape: BlockShape, stages: tuple[Stage, ...], replication: Replication) -> list[int]:
    """Return the parameters of each reduction inside a pass; none where a rank's are one."""
    return [
        parameters
        for stage in stages
        for part in reduced_parts(shape, stage, replication)
        for parameters in part.buckets
    ]


def _gathered(shape: BlockShape, stages: tuple[Stage, ...], dp: int) -> list[int]:
    """Return the parameters of each gather inside a pass; none where a rank's are one."""
    if not shape.stack.overlap_parameter_gather:
        return []
    return [
        parameters
        for stage in stages
        for part in bucket_parts(shape, stage, dp)
        for parameters in part.buckets
    ]


def module_link_bytes(size_bytes: int, num_devices: int, num_passes: int = 1) -> int:
    """Return what crosses the link of device 0 of one process: a copy out, a gradient in.

    Args:
        size_bytes: Parameters, and gradients, as they are copied.
        num_devices: Replicas; device 0 is one.
        num_passes: Microbatches; each broadcasts and reduces again.

    >>> module_link_bytes(100, 8)
    1400
    """
    return 2 * (num_devices - 1) * size_bytes * num_passes


def server_link_bytes(size_bytes: int, num_workers: int) -> int:
    """Return what crosses the link of one server of its own in a step: pulls and pushes.

    >>> server_link_bytes(100, 8)
    1600
    """
    return 2 * num_workers * size_bytes


def sharded_worker_bytes(size_bytes: int, num_workers: int) -> Fraction:
    """Return what a worker sends in a step if all workers are servers: as in a ring all-reduce.

    As a worker it pushes, and as a server it hands out, its part to each of the others.

    >>> sharded_worker_bytes(800, 8)
    Fraction(1400, 1)
    """
    return Fraction(2 * (num_workers - 1), num_workers) * size_bytes
