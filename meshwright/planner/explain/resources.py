"""The resources of a cluster, and the facts that a tenth more of one changes."""

from collections.abc import Callable, Iterator
from enum import StrEnum

from meshwright.hwprofiles import Cluster, Link, StackProfile
from meshwright.simulator import TrainingJob

INCREASE = 1.1


class Resource(StrEnum):
    """Resources that limit a step."""

    MATRIX_RATE = "matrix rate"
    MEMORY_BANDWIDTH = "memory bandwidth"
    MEMORY_CAPACITY = "memory capacity"
    LINKS_IN_A_NODE = "links in a node"
    LINKS_BETWEEN_NODES = "links between nodes"
    HOST = "host"


Facts = Iterator[tuple[str, str]]


def resource_changes(
    resource: Resource, job: TrainingJob, cluster: Cluster, stack: StackProfile
) -> tuple[str, ...]:
    """Return the facts that a tenth more of *resource* changes, each as ``--set`` takes it.

    >>> from meshwright.hwprofiles import load_cluster, load_stack
    >>> from meshwright.simulator import load_model
    >>> job = TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024)
    >>> parts = job, load_cluster("dgx-a100"), load_stack("megatron-core")
    >>> resource_changes(Resource.MATRIX_RATE, *parts)
    ('device.peak.bf16=343200000000000.0 FLOP/s',)
    """
    return tuple(f"{key}={value}" for key, value in RESOURCES[resource](job, cluster, stack))


def _matrix_rate(job: TrainingJob, cluster: Cluster, _stack: StackProfile) -> Facts:
    # Of a step in 8 bits some products run in the storage format: both rates grow.
    for precision in dict.fromkeys((job.precision, job.precision.storage)):
        rate = cluster.device.peak_flops_per_s[precision] * INCREASE
        yield f"device.peak.{precision}", f"{rate!r} FLOP/s"


def _memory_bandwidth(_job: TrainingJob, cluster: Cluster, _stack: StackProfile) -> Facts:
    rate = cluster.device.memory_bandwidth_bytes_per_s * INCREASE
    yield "device.memory_bandwidth", f"{rate!r} B/s"


def _memory_capacity(_job: TrainingJob, cluster: Cluster, _stack: StackProfile) -> Facts:
    device = cluster.device
    yield "device.memory_capacity", f"{int(device.memory_capacity_bytes * INCREASE)} B"
    # Where a cluster says what processes may use, that is what plans are checked against.
    if device.overheads is not None:
        yield "device.overheads.usable", f"{int(device.usable_bytes * INCREASE)} B"


def _link(key: str, link: Link) -> Facts:
    """Yield the bandwidth of a link, and what collectives are measured to reach on it."""
    yield f"{key}.bandwidth", f"{link.bandwidth_bytes_per_s * INCREASE!r} B/s per direction"
    # Measured bus bandwidths go before the link's own: both grow.
    for number, each in enumerate(link.collectives, 1):
        yield f"{key}.collectives.{number}.busbw", f"{each.busbw_bytes_per_s * INCREASE!r} B/s"


def _host(_job: TrainingJob, cluster: Cluster, stack: StackProfile) -> Facts:
    """Yield what the host does for a device: launches, its own time, and copies."""
    times = {
        "kernel_gap": stack.kernel_gap_s,
        "host_per_layer_pass": stack.host_per_layer_pass_s,
        "host_per_expert_pass": stack.host_per_expert_pass_s,
        "host_per_own_expert": stack.host_per_own_expert_s,
        "host_issue_pass": stack.host_issue_pass_s,
        "host_issue_expert": stack.host_issue_expert_s,
        "host_issue_cast": stack.host_issue_cast_s,
        "expert_launch": stack.expert_launch_s,
        "host_per_launch": stack.host_per_launch_s,
    }
    for name, time_s in times.items():
        if time_s:
            # A faster host takes less time.
            yield f"fitted.{name}", f"{time_s / INCREASE!r} s"
    if cluster.host_link is not None:
        yield from _link("host_link", cluster.host_link)
    if cluster.host_memory_bandwidth_bytes_per_s is not None:
        rate = cluster.host_memory_bandwidth_bytes_per_s * INCREASE
        yield "host_memory_bandwidth", f"{rate!r} B/s"


RESOURCES: dict[Resource, Callable[[TrainingJob, Cluster, StackProfile], Facts]] = {
    Resource.MATRIX_RATE: _matrix_rate,
    Resource.MEMORY_BANDWIDTH: _memory_bandwidth,
    Resource.MEMORY_CAPACITY: _memory_capacity,
    Resource.LINKS_IN_A_NODE: lambda _job, cluster, _stack: _link("intra_node", cluster.intra_node),
    Resource.LINKS_BETWEEN_NODES: lambda _job, cluster, _stack: _link(
        "inter_node", cluster.inter_node
    ),
    Resource.HOST: _host,
}
