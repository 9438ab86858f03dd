"""What crosses the link between a device and its host in a step, exactly."""

from typing import NamedTuple

from meshwright.hwprofiles import Offload, StackProfile
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Mesh, ParallelPlan, TrainingJob, rank_stages
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.replication import (
    WireBytes,
    part_gathers,
    reduced_parts,
    sum_parameters,
    unit_shards,
)
from meshwright.simulator.step import owned_share, rank_refetches, replication_of


class HostTraffic(NamedTuple):
    """Bytes that cross a device's link to the host in one step, each way."""

    to_device_bytes: int
    to_host_bytes: int


NO_TRAFFIC = HostTraffic(0, 0)


def host_traffic(
    job: TrainingJob, plan: ParallelPlan, stack: StackProfile, pp_rank: int, shard: int = 0
) -> HostTraffic:
    """Return the bytes that cross a rank's link to the host in one step, each way.

    Args:
        job: What is trained.
        plan: How it is laid out.
        stack: With what software.
        pp_rank: Place of the rank in its pipeline.
        shard: Which of the shards it holds. All come to the device filled up to equal rows; their
            gradients leave without what fills up the last ones.
    """
    if plan.offload is Offload.NONE:
        return NO_TRAFFIC
    shape = BlockShape.of(job, plan, stack)
    mesh = Mesh.of(plan)
    replication = replication_of(plan, stack, mesh)
    stages = rank_stages(job.model, plan, pp_rank)
    state = StateBytes.of(stack, job.precision, plan.gradient_formats)
    wire = WireBytes.of(stack, job.precision, plan)
    num_microbatches = plan.num_microbatches(job)
    refetches = rank_refetches(plan, replication, pp_rank, num_microbatches)
    gathers = [
        (part, part_gathers(part, replication, num_microbatches, stage_refetches))
        for stage, stage_refetches in zip(stages, refetches, strict=True)
        for part in reduced_parts(shape, stage, replication)
    ]
    parts = [part for part, _ in gathers]
    shares = sum(owned_share(count, replication) for part in parts for count in part.buckets)
    num_reductions = num_microbatches if replication.reduces_each_microbatch else 1
    if replication.offload is Offload.PARAMETERS:
        gathered = sum(
            owned_share(count, replication) * times
            for part, times in gathers
            for count in part.buckets
        )
        if stack.root_unit:
            num_shards = replication.span.num_ranks
            shares = sum(sum(unit_shards(shape, each, num_shards, shard)) for each in stages)
        to_host = num_reductions * shares * state.gradient
        return HostTraffic(gathered * state.sharded_parameter, to_host)
    updated = owned_share(sum_parameters(shape, stages), replication) * wire.gather_bytes
    stage_refetches = (num_reductions - 1) * shares * state.gradient
    return HostTraffic(updated + stage_refetches, num_reductions * shares * state.gradient)
