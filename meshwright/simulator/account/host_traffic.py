"""Bytes between a device and its host in a step, exactly."""

from typing import NamedTuple

from meshwright.hwprofiles import Offload, StackProfile
from meshwright.simulator.layout import ResolvedPlan, TrainingJob
from meshwright.simulator.ledger import StepPoint, StepSetting, rank_ledger
from meshwright.simulator.replication import unit_shards
from meshwright.simulator.step import owned_share


class HostTraffic(NamedTuple):
    """Bytes over a device's host link in one step, each way."""

    to_device_bytes: int
    to_host_bytes: int


NO_TRAFFIC = HostTraffic(0, 0)


def host_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int, shard: int = 0
) -> HostTraffic:
    """Return the bytes over a rank's host link in one step, each way.

    Args:
        job: Model, sequence length and batch.
        plan: Parallel degrees and offloading.
        stack: Software stack.
        pp_rank: Pipeline rank.
        shard: Index of its shard. All are copied to the device padded to equal rows; gradients
            are copied out without padding.
    """
    if plan.offload is Offload.NONE:
        return NO_TRAFFIC
    setting = StepSetting.of(job, plan, stack)
    replication, state = setting.replication, setting.state
    shares = dict.fromkeys(StepPoint, 0)
    for entry in rank_ledger(setting, pp_rank).entries:
        num_owned = sum(owned_share(count, replication) for count in entry.part.buckets)
        shares[entry.moment] += entry.num_times * num_owned
    reduced_bytes = shares[StepPoint.REDUCE] * state.gradient
    if replication.offload is Offload.OPTIMIZER:
        # What earlier microbatches left comes back to be added to, then what was updated.
        added_bytes = reduced_bytes - reduced_bytes // setting.num_reductions
        updated_bytes = shares[StepPoint.UPDATED] * setting.wire.gather_bytes
        return HostTraffic(updated_bytes + added_bytes, reduced_bytes)
    if stack.is_fully_sharded:
        stages, num_shards = setting.rank_stages(pp_rank), replication.span.num_ranks
        owned = sum(
            sum(unit_shards(setting.shape, num_owned, num_shards, shard)) for num_owned in stages
        )
        reduced_bytes = setting.num_reductions * owned * state.gradient
    return HostTraffic(shares[StepPoint.GATHER] * state.sharded_parameter, reduced_bytes)
