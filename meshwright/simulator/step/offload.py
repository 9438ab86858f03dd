"""Offloading to the host: host memory, copies over its link, and the CPU optimizer.

Two ways. FSDP with CPU offload keeps shards of parameters, gradients and optimizer states on the
host: a unit's shard is copied to the device before each all-gather, its reduced gradient back
(PyTorch, CPUOffloadPolicy). ZeRO-Offload keeps the optimizer states there: 16-bit gradients are
copied out as they are reduced, updated 16-bit parameters come back (Ren et al. 2021, arXiv
2101.06840).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from meshwright.hwprofiles import Cluster, Offload, Source, StackProfile
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import Category, Cost, CostModel, PhaseCost
from meshwright.simulator.layout import (
    STACK_FORMATS,
    Axis,
    Mesh,
    ResolvedPlan,
    Stage,
    TrainingJob,
    chosen_formats,
)
from meshwright.simulator.memory import (
    RankMemory,
    RankStates,
    Shards,
    StateBytes,
    sharded_workspace_bytes,
)
from meshwright.simulator.replication import (
    FP32_UPDATE_TRAFFIC_BYTES,
    ParametersByGroup,
    Replication,
    StagePart,
    WireBytes,
    filled_parameters,
    unit_shards,
    update_cost,
)

# ZeRO stages that are combined with each way of offloading.
OFFLOAD_STAGES = {Offload.OPTIMIZER: (1, 2), Offload.PARAMETERS: (3,)}
# fp32 weight and two moments, which ZeRO-Offload keeps on the host whatever the precision.
ADAM_STATE_BYTES = 12
# Parameters that CPU-Adam updates before it copies them, while it updates the next ones
# (DeepSpeed, csrc/includes/cpu_adam.h).
TILE_PARAMETERS = 128 * 1024 * 1024


NO_HOST = (
    "{} is not offered by cluster {}, which says nothing of its hosts; allowed: with host_link, "
    "host_memory and host_memory_bandwidth"
)


class UnitCopies(NamedTuple):
    """Host times of a unit: before its gather, after its reduction, and to accumulate.

    ``accumulate_ps`` follows a reduction that is added to earlier gradients on the host.
    """

    in_ps: int = 0
    out_ps: int = 0
    accumulate_ps: int = 0


class HostSide(NamedTuple):
    """Cost model, formats and sharding from which times and bytes of offloading follow."""

    costs: CostModel
    wire: WireBytes
    state: StateBytes
    replication: Replication


def offload_refusal(
    job: TrainingJob, plan: ResolvedPlan, cluster: Cluster, stack: StackProfile
) -> str | None:
    """Return the reason why *plan* cannot offload as it says, or None."""
    offload = plan.offload
    if offload is Offload.NONE:
        return None
    if offload not in stack.offload_modes:
        modes = ", ".join(stack.offload_modes)
        return f"offload={offload} is not offered by stack {stack.name}; allowed: {modes}"
    if plan.zero_stage not in OFFLOAD_STAGES[offload]:
        stages = ", ".join(str(stage) for stage in OFFLOAD_STAGES[offload])
        return f"zero_stage={plan.zero_stage} does not go with offload={offload}; allowed: {stages}"
    num_microbatches = plan.num_microbatches(job)
    if num_microbatches > 1 and not stack.offload_accumulates:
        return (
            f"offload={offload} of stack {stack.name} does not go with {num_microbatches} "
            "microbatches; allowed: 1; raise --micro-batch or --dp"
        )
    return host_refusal(offload, cluster) or _format_refusal(job, plan, stack)


def host_refusal(offload: Offload, cluster: Cluster) -> str | None:
    """Return the reason why hosts of *cluster* cannot keep states, or None."""
    if offload is Offload.NONE or cluster.host_link is not None:
        return None
    return NO_HOST.format(f"offload={offload}", cluster.name)


def _format_refusal(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> str | None:
    """Return the reason why *plan*'s gradient format cannot be offloaded, or None.

    On the host a gradient has the format of its parameter, as PyTorch's Adam expects.
    """
    default_format = chosen_formats(stack, job.precision, STACK_FORMATS).kept
    if plan.offload is not Offload.PARAMETERS or plan.gradient_precision in (None, default_format):
        return None
    state = StateBytes.of(stack, job.precision, plan.gradient_formats)
    if state.gradient == state.sharded_parameter:
        return None
    return (
        f"gradient_precision={plan.gradient_precision} does not go with offload={plan.offload}; "
        f"allowed: the {state.sharded_parameter} bytes of a parameter on the host"
    )


def copy_cost(costs: CostModel, size_bytes: int) -> Cost:
    """Return the time of a copy between device and host while all devices copy.

    Devices share a link where the cluster says so, and all share the host's memory.
    """
    cluster = costs.cluster
    assert cluster.host_link is not None
    if size_bytes == 0:
        return Cost(0, cluster.host_link.kind)
    link = cluster.host_link
    sharers = min(cluster.devices_per_host_link, costs.world_size)
    rate = link.bandwidth_bytes_per_s * link.busbw_fraction / sharers
    # Every copy also reads or writes the memory of the host.
    rate = min(rate, _memory_share_bytes_per_s(costs))
    return Cost.from_seconds(link.latency_s + size_bytes / rate, link.kind)


def host_pass_cost(costs: CostModel, size_bytes: int) -> Cost:
    """Return the time in which the host reads or writes *size_bytes* for one device.

    Devices of a node share its memory; a stack's loops reach a fraction of its bandwidth.
    """
    rate = _memory_share_bytes_per_s(costs) * costs.stack.host_bandwidth_fraction
    return Cost.from_seconds(size_bytes / rate, Source.FITTED)


def _memory_share_bytes_per_s(costs: CostModel) -> float:
    """Return a device's share of its host's memory bandwidth."""
    cluster = costs.cluster
    assert cluster.host_memory_bandwidth_bytes_per_s is not None
    sharers = min(cluster.devices_per_node, costs.world_size)
    return cluster.host_memory_bandwidth_bytes_per_s / sharers


def host_update_cost(costs: CostModel, num_parameters: int, replication: Replication) -> Cost:
    """Return the time of Adam on the host for a rank's shard of *num_parameters*.

    It reads weight, gradient and two moments and writes all but the gradient, in fp32.
    """
    return host_pass_cost(
        costs, owned_share(num_parameters, replication) * FP32_UPDATE_TRAFFIC_BYTES
    )


def copy_back_ps(side: HostSide, num_parameters: int) -> int:
    """Return the exposed time of copying updated parameters back, beyond the update.

    Tile by tile: a tile is copied while the next one is updated (arXiv 2101.06840, section 5.1).
    """
    costs, wire, _, replication = side
    if replication.offload is not Offload.OPTIMIZER:
        return 0
    share = owned_share(num_parameters, replication)
    update_ps = host_update_cost(costs, num_parameters, replication).time_ps
    end_ps = 0
    for first in range(0, share, TILE_PARAMETERS):
        count = min(TILE_PARAMETERS, share - first)
        updated_ps = update_ps * (first + count) // share
        end_ps = max(end_ps, updated_ps) + copy_cost(costs, count * wire.gather_bytes).time_ps
    # Copies overlap with the update of later tiles: the rest is exposed.
    return max(0, end_ps - update_ps)


def unit_copies(side: HostSide, num_parameters: int) -> UnitCopies:
    """Return the host copy times of a unit of *num_parameters*."""
    costs, _, state, replication = side
    if replication.offload is Offload.NONE:
        return UnitCopies()
    share = owned_share(num_parameters, replication)
    out_ps = copy_cost(costs, share * state.gradient).time_ps
    adds = replication.reduces_each_microbatch
    if (
        replication.offload is Offload.OPTIMIZER
    ):  # the sum so far comes to the device, which adds to it
        return UnitCopies(0, out_ps, out_ps * adds)
    in_ps = copy_cost(costs, share * state.sharded_parameter).time_ps
    sum_ps = host_pass_cost(costs, 3 * share * state.gradient).time_ps  # two read, one written
    return UnitCopies(in_ps, out_ps, sum_ps * adds)


def part_copies(side: HostSide, part: StagePart) -> UnitCopies:
    """Return the host copy times of the buckets of *part*, one after the other."""
    copies = [unit_copies(side, count) for count in part.buckets]
    return UnitCopies(*map(sum, zip(*copies, strict=True)))


def owned_share(num_parameters: int, replication: Replication) -> int:
    """Return the number of parameters whose states a rank keeps on its host."""
    return -(-num_parameters // replication.span.num_ranks)


def rank_update_cost(
    costs: CostModel,
    held: ParametersByGroup,
    wire: WireBytes,
    replication: Replication,
    cast_bytes: int,
) -> PhaseCost:
    """Return the time of the optimizer on one rank's shard, on device or host.

    *cast_bytes* is the traffic of casting the rank's weights on the device after it.
    """
    if replication.offload is Offload.NONE:
        return update_cost(costs, held, wire, replication, cast_bytes)
    parts = (host_update_cost(costs, sum(held), replication), costs.memory_traffic(cast_bytes))
    return PhaseCost.total([(Category.OPTIMIZER, part) for part in parts if part.time_ps])


def rank_host_bytes(
    shape: BlockShape,
    stages: Sequence[Stage],
    state: StateBytes,
    replication: Replication,
    num_microbatches: int,
) -> int:
    """Return the host bytes of a rank that holds *stages*.

    A host that accumulates gradients holds one weight's arriving gradient beside the sum. Gradients
    that are reduced after the last microbatch alone need their memory all the same.
    """
    if replication.offload is Offload.NONE:
        return 0
    share = owned_share(sum(filled_parameters(shape, stages, replication)), replication)
    # ZeRO-Offload keeps fp32 states and the reduced gradient on the host.
    if replication.offload is Offload.OPTIMIZER:
        return share * (ADAM_STATE_BYTES + state.gradient)
    arriving = 0
    if replication.reduces_each_microbatch and num_microbatches > 1:
        shards = (unit_shards(shape, stage, replication.span.num_ranks) for stage in stages)
        arriving = max(chain.from_iterable(shards))
    gradients = share * state.gradient
    on_host = RankStates.of_share(share, state, share * state.sharded_parameter, gradients)
    return int(on_host.static_bytes) + arriving * state.gradient


def offloaded_memory(memory: RankMemory, replication: Replication, host_bytes: int) -> RankMemory:
    """Return *memory* with offloaded states moved to the host, as *host_bytes*.

    Gradients that are not reduced before the last microbatch stay whole on the device till then.
    """
    if replication.offload is Offload.NONE:
        return memory
    stays = replication.offload is not Offload.PARAMETERS, not replication.reduces_each_microbatch
    return replace(memory.staying(*stays, optimizer=0), host_bytes=host_bytes)


def unit_workspace_bytes(
    state: StateBytes, replication: Replication, units: list[int]
) -> tuple[int, int]:
    """Return the forward and backward workspaces of sharded or offloaded states.

    With offloaded parameters a shard arrives beside those that `sharded_workspace_bytes` counts.
    The whole gradient of a unit counts where it is copied out after its reduction.
    """
    offload, shards = replication.offload, replication.shards
    keeps_parameters = offload is Offload.PARAMETERS
    if offload is not Offload.NONE:  # what is on the host is away as other ranks' shards are
        shards = Shards(1 + keeps_parameters, 1 + replication.reduces_each_microbatch, 1)
    workspace = sharded_workspace_bytes(units, state, shards, reshards=replication.reshards)
    arriving = owned_share(max(units), replication) * state.sharded_parameter * keeps_parameters
    return workspace[0] + arriving, workspace[1] + arriving


def node_host_bytes(mesh: Mesh, stage_bytes: Sequence[int]) -> int:
    """Return the host bytes of the fullest node, from those of a rank of each stage.

    >>> node_host_bytes(Mesh(tp=2, dp=3, pp=2, node_size=8), [10, 1])
    62
    """
    if not any(stage_bytes):
        return 0
    size, node = mesh.stride(Axis.PP), mesh.node_size
    # The ranks of a stage are neighbours: its first and last node, and one between, show all.
    nodes = {
        number
        for first in range(0, mesh.world_size, size)
        for number in (first // node, first // node + 1, (first + size - 1) // node)
    }
    return max(_held_on_node(number * node, mesh, stage_bytes) for number in nodes)


def _held_on_node(first: int, mesh: Mesh, stage_bytes: Sequence[int]) -> int:
    """Return the host bytes of the node whose first rank is *first*."""
    size, total = mesh.stride(Axis.PP), 0
    last = min(first + mesh.node_size, mesh.world_size)
    while first < last:
        end = min(last, (first // size + 1) * size)
        total += (end - first) * stage_bytes[first // size]
        first = end
    return total
