"""Bandwidth and latency of communicators on intra-node links and the network."""

from fractions import Fraction
from typing import NamedTuple

from meshwright.hwprofiles import Cluster, CollectiveFact, CollectiveOp, Link, Source
from meshwright.simulator.layout import GroupSpan


class Performance(NamedTuple):
    """Bus bandwidth and start-up time of one operation on one kind of link."""

    busbw_bytes_per_s: float
    latency_s: float
    source: Source


def _bus_ratio_parts(op: CollectiveOp, num_ranks: int) -> tuple[int, int]:
    """Return the ratio, as two integers, of bytes on a link to bytes of the buffer."""
    match op:
        case CollectiveOp.ALL_REDUCE:
            return 2 * (num_ranks - 1), num_ranks
        case CollectiveOp.ALL_GATHER | CollectiveOp.REDUCE_SCATTER | CollectiveOp.ALL_TO_ALL:
            return num_ranks - 1, num_ranks
        case CollectiveOp.BROADCAST | CollectiveOp.REDUCE | CollectiveOp.P2P:
            # The busiest link carries the whole buffer.
            return 1, 1


def bus_ratio(op: CollectiveOp, num_ranks: int) -> Fraction:
    """Return the bytes on a link per byte of the buffer (nccl-tests, doc/PERFORMANCE.md).

    >>> bus_ratio(CollectiveOp.ALL_REDUCE, 8)
    Fraction(7, 4)
    """
    return Fraction(*_bus_ratio_parts(op, num_ranks))


def sent_ratio(op: CollectiveOp, num_ranks: int) -> Fraction:
    """Return the bytes a rank sends per byte of the buffer, in a ring.

    The busiest link of a broadcast or a reduce carries the whole buffer (`bus_ratio`), but one of
    the N ranks, the last or the first of the chain, sends nothing: (N - 1) / N on average, which
    is each rank's exactly where all own as much.

    >>> sent_ratio(CollectiveOp.BROADCAST, 8), bus_ratio(CollectiveOp.BROADCAST, 8)
    (Fraction(7, 8), Fraction(1, 1))
    """
    if op in {CollectiveOp.BROADCAST, CollectiveOp.REDUCE}:
        return Fraction(num_ranks - 1, num_ranks)
    return bus_ratio(op, num_ranks)


def bus_factor(op: CollectiveOp, num_ranks: int) -> float:
    """Return `bus_ratio` as a float.

    >>> bus_factor(CollectiveOp.ALL_REDUCE, 8)
    1.75
    """
    carried, whole = _bus_ratio_parts(op, num_ranks)
    return carried / whole  # rounded once, as the fraction is


def ring_steps(op: CollectiveOp, num_ranks: int) -> int:
    """Return the number of steps of a ring algorithm, one hop each."""
    match op:
        case CollectiveOp.ALL_REDUCE:
            return 2 * (num_ranks - 1)
        case CollectiveOp.P2P:
            return 1
        case _:
            return num_ranks - 1


def intra_node_performance(link: Link, op: CollectiveOp, num_ranks: int) -> Performance:
    """Return the performance of *op* over *num_ranks* devices of one node.

    A measurement for that operation and size is used as it stands; that of the nearest size is
    extrapolated; without any, it is the line rate times the link's fraction, and a hop a step.
    """
    facts = [fact for fact in link.collectives if fact.op is op]
    if not facts:
        rate = link.bandwidth_bytes_per_s * link.busbw_fraction
        return Performance(rate, ring_steps(op, num_ranks) * link.latency_s, link.kind)
    # A tie goes to the smaller, whatever the order in the file.
    nearest = min(facts, key=lambda fact: (abs(fact.num_ranks - num_ranks), fact.num_ranks))
    if nearest.num_ranks == num_ranks:
        return Performance(nearest.busbw_bytes_per_s, nearest.latency_s, nearest.kind)
    # Bus bandwidth does not depend on the number of ranks by definition; the ring's steps do.
    return Performance(
        nearest.busbw_bytes_per_s, _scaled_latency_s(nearest, num_ranks), Source.EXTRAPOLATED
    )


def _scaled_latency_s(fact: CollectiveFact, num_ranks: int) -> float:
    """Return the measured start-up time, scaled by the steps of a ring."""
    return fact.latency_s * ring_steps(fact.op, num_ranks) / ring_steps(fact.op, fact.num_ranks)


def nic_share_bytes_per_s(cluster: Cluster) -> float:
    """Return one device's share of its node's NICs, in bytes per second and direction.

    In every layout all devices of a node communicate at the same time, so each gets its share;
    above the leaf switches a fat tree may carry less (``oversubscription``).
    """
    ports = cluster.nics_per_node * cluster.inter_node.bandwidth_bytes_per_s
    return ports / cluster.devices_per_node / cluster.oversubscription


def ports_per_node(cluster: Cluster) -> int:
    """Return the NICs of a node that can be used independently, at most one a device."""
    return min(cluster.nics_per_node, cluster.devices_per_node)


def port_bytes_per_s(cluster: Cluster) -> float:
    """Return the bytes per second and direction of one of `ports_per_node`, oversubscribed."""
    cards = cluster.nics_per_node * cluster.inter_node.bandwidth_bytes_per_s
    return cards / ports_per_node(cluster) / cluster.oversubscription


def network_rate_bytes_per_s(cluster: Cluster, span: GroupSpan, fraction: float) -> float:
    """Return the bytes per second of a ring through all nodes of *span*: its ranks' NIC shares."""
    return span.ranks_per_node * nic_share_bytes_per_s(cluster) * fraction
