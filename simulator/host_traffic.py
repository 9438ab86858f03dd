"""What crosses the link between a device and its host in a step, exactly."""

from typing import NamedTuple

from hwprofiles import Offload, StackProfile
from simulator.block_shape import BlockShape
from simulator.data_parallel import Wire, sum_parameters
from simulator.gradient_buckets import part_gathers, reduced_parts
from simulator.memory import StateBytes
from simulator.mesh import Mesh
from simulator.offload import owned_share
from simulator.plan import ParallelPlan, TrainingJob
from simulator.step_builder import rank_stages, replication_of


class HostTraffic(NamedTuple):
    """Bytes that cross a device's link to the host in one step, each way."""

    to_device_bytes: int
    to_host_bytes: int


def host_traffic(
    job: TrainingJob, plan: ParallelPlan, stack: StackProfile, pp_rank: int
) -> HostTraffic:
    """Return the bytes that cross a rank's link to the host in one step, each way."""
    shape = BlockShape.of(job, plan, stack)
    mesh = Mesh(tp=plan.tp, dp=plan.dp, pp=plan.pp, node_size=1)
    to = replication_of(plan, stack, mesh)
    if to.offload is Offload.NONE:
        return HostTraffic(0, 0)
    stages = rank_stages(plan, pp_rank)
    state = StateBytes.of(stack, job.precision, plan.gradient_formats)
    wire = Wire.of(stack, job.precision, plan)
    parts = [part for stage in stages for part in reduced_parts(shape, stage, to)]
    shares = sum(owned_share(count, to) for part in parts for count in part.buckets)
    num_microbatches = plan.num_microbatches(job)
    num_reductions = num_microbatches if to.reduces_each_microbatch else 1
    to_host = num_reductions * shares * state.gradient
    if to.offload is Offload.PARAMETERS:
        gathered = sum(
            owned_share(count, to) * part_gathers(part, to, num_microbatches)
            for part in parts
            for count in part.buckets
        )
        return HostTraffic(gathered * state.sharded_parameter, to_host)
    updated = owned_share(sum_parameters(shape, stages), to) * wire.gather_bytes
    return HostTraffic(updated + (num_reductions - 1) * shares * state.gradient, to_host)
