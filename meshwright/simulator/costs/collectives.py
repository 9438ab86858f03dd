"""Times of collectives: one function per algorithm, and their registry.

A communicator inside one node uses the node's link.  Across nodes the fastest algorithm that has
the operation is taken, as NCCL's tuner does.
"""

from collections.abc import Callable
from math import ceil, comb, log2
from typing import NamedTuple

from meshwright.hwprofiles import Cluster, CollectiveOp, Dispatcher, Source
from meshwright.simulator.costs.cost import Cost
from meshwright.simulator.costs.links import (
    Performance,
    bus_factor,
    intra_node_performance,
    network_rate_bytes_per_s,
    nic_share_bytes_per_s,
)
from meshwright.simulator.layout import GroupSpan
from meshwright.simulator.model import Experts


class CollectiveCall(NamedTuple):
    """A collective on a cluster.

    ``size_bytes`` is the larger of a rank's two buffers; ``network_fraction`` is the reached share
    of the network's line rate, ``network_source`` the evidence for it.
    """

    op: CollectiveOp
    size_bytes: int
    span: GroupSpan
    cluster: Cluster
    network_fraction: float
    network_source: Source


def collective_cost(call: CollectiveCall) -> Cost:
    """Return the time of a collective; 0 on one rank."""
    if call.span.num_ranks == 1:
        return Cost(0, Source.DATASHEET)  # of no time, so no share of any evidence
    if not call.span.crosses_nodes:
        return _intra_node(call)
    times_s = [
        algorithm(call) for algorithm, operations in ALGORITHMS.values() if call.op in operations
    ]
    return Cost.from_seconds(min(times_s), call.network_source)


def _intra_node(call: CollectiveCall) -> Cost:
    performance = _intra_node_performance(call, call.span.num_ranks)
    return Cost.from_seconds(
        _latency_bandwidth_s(call.op, call.size_bytes, call.span.num_ranks, performance),
        performance.source,
    )


def _intra_node_performance(
    call: CollectiveCall, num_ranks: int, op: CollectiveOp | None = None
) -> Performance:
    return intra_node_performance(call.cluster.intra_node, op or call.op, num_ranks)


def _latency_bandwidth_s(
    op: CollectiveOp, size_bytes: float, num_ranks: int, performance: Performance
) -> float:
    factor = bus_factor(op, num_ranks)
    return performance.latency_s + factor * size_bytes / performance.busbw_bytes_per_s


def ring_s(call: CollectiveCall) -> float:
    """Return the seconds of a ring through all ranks.

    The slowest link carries ``bus_factor`` times the buffer; each round crosses every node once.
    """
    path = _whole_path(call, call.span.num_nodes - 1)
    carried_bytes = bus_factor(call.op, call.span.num_ranks) * call.size_bytes
    return path.latency_s + carried_bytes / path.busbw_bytes_per_s


def _whole_path(call: CollectiveCall, hops: int) -> Performance:
    """Return bandwidth and latency of a path through all ranks, with *hops* between nodes."""
    span = call.span
    rate = network_rate_bytes_per_s(call.cluster, span, call.network_fraction)
    latency_s = _network_latency_s(call, hops)
    if span.ranks_per_node > 1:
        # The same bytes pass every link, inside the node and between nodes: the slowest decides.
        inside = _intra_node_performance(call, span.ranks_per_node)
        rate = min(rate, inside.busbw_bytes_per_s)
        latency_s += inside.latency_s
    return Performance(rate, latency_s, call.network_source)


def _rounds(op: CollectiveOp) -> int:
    # An all-reduce is a reduce-scatter and an all-gather, or goes up a tree and down again.
    return 2 if op is CollectiveOp.ALL_REDUCE else 1


def _network_latency_s(call: CollectiveCall, hops: int) -> float:
    """Return the start-up time across nodes: the collective's own and *hops* a round."""
    network = call.cluster.inter_node
    return _rounds(call.op) * (network.collective_latency_s + hops * network.latency_s)


def tree_s(call: CollectiveCall) -> float:
    """Return the seconds of a double binary tree: reduce up, broadcast down.

    Sanders, Speck and Traeff 2009; latency grows with the logarithm of the nodes.
    """
    path = _whole_path(call, ceil(log2(call.span.num_nodes)))
    return path.latency_s + _rounds(call.op) * call.size_bytes / path.busbw_bytes_per_s


def pairwise_s(call: CollectiveCall) -> float:
    """Return the seconds of an all-to-all by pairwise sends.

    NCCL sends all at once: inter-node parts share the rank's part of the NICs, the rest the
    intra-node link, and the slower of both decides.
    """
    span, part = call.span, call.size_bytes / call.span.num_ranks
    rate = nic_share_bytes_per_s(call.cluster) * call.network_fraction
    latency_s = _network_latency_s(call, ceil(log2(span.num_nodes)))
    across_s = latency_s + (span.num_ranks - span.ranks_per_node) * part / rate
    if span.ranks_per_node == 1:
        return across_s
    local_bytes = span.ranks_per_node * part
    inside = _intra_node_performance(call, span.ranks_per_node)
    return max(across_s, _latency_bandwidth_s(call.op, local_bytes, span.ranks_per_node, inside))


def dispatch_cost(
    size_bytes: int,
    span: GroupSpan,
    cluster: Cluster,
    experts: Experts,
    dispatcher: Dispatcher,
) -> Cost:
    """Return the time of a deduplicated all-to-all: a token is sent once to each node and rank.

    One copy of a token goes to each other node that has any of its experts; inside a node one to
    each rank.  Network and intra-node links work at the same time (HybridEP, arXiv 2603.07685;
    `mean_destinations` says how many).

    Args:
        size_bytes: Bytes of a rank's tokens, repeated for each of their experts (top-k).
        span: Expert-parallel group.
        cluster: Its cluster.
        experts: Experts and groups that the router chooses from.
        dispatcher: Software; HybridEP has published times.
    """
    network, num_rows = cluster.inter_node, experts.experts_per_token
    share, kind = network.busbw_fraction, network.kind
    call = CollectiveCall(CollectiveOp.ALL_TO_ALL, size_bytes, span, cluster, share, kind)
    if span.num_ranks == 1:
        return Cost(0, Source.DATASHEET)
    local = span.ranks_per_node if span.crosses_nodes else span.num_ranks
    # size_bytes has a row for each expert: here one for each rank that has any of them.
    inside_bytes = call.size_bytes * mean_destinations(experts, span.num_ranks) / num_rows
    inside = _intra_node_performance(call, local)
    seconds = _latency_bandwidth_s(call.op, inside_bytes, local, inside) if local > 1 else 0.0
    source = inside.source
    if span.crosses_nodes:
        num_nodes = -(-span.num_ranks // span.ranks_per_node)
        # One of the nodes is the token's own.
        part = mean_destinations(experts, num_nodes) / num_rows * (num_nodes - 1) / num_nodes
        rate = nic_share_bytes_per_s(call.cluster) * call.network_fraction
        latency_s = _network_latency_s(call, ceil(log2(span.num_nodes)))
        across_s = latency_s + part * call.size_bytes / rate
        seconds, source = max(seconds, across_s), call.network_source
    is_known = dispatcher is Dispatcher.HYBRIDEP
    return Cost.from_seconds(seconds, source if is_known else Source.EXTRAPOLATED)


def mean_destinations(experts: Experts, num_parts: int) -> float:
    """Return the mean number of *num_parts* equal parts of the experts that a token is sent to.

    The router chooses groups, then experts within them, all with the same probability.

    >>> from meshwright.simulator.model import Experts
    >>> mean_destinations(Experts(num_experts=4, experts_per_token=2, hidden_size=8), 2)  # 2 of 6
    1.6666666666666667
    """
    groups, chosen = experts.num_groups, experts.groups_per_token
    in_group, k = experts.num_experts // groups, experts.experts_per_token
    # Group-limited routing (DeepSeek-V2): experts outside of the chosen groups are masked.
    num_candidates = chosen * in_group if chosen < groups else experts.num_experts
    chosen = min(chosen, groups) if num_candidates < experts.num_experts else groups
    num_choices = comb(num_candidates, k)
    per_part = experts.num_experts / num_parts
    groups_per_part = max(1, round(per_part / in_group))
    expected_hits = 0.0
    for number in range(1, min(groups_per_part, chosen) + 1):
        num_ways = comb(groups_per_part, number) * comb(groups - groups_per_part, chosen - number)
        inside = min(per_part, number * in_group)
        # Hypergeometric: the chance that all k experts lie outside of the part.
        missed = comb(round(num_candidates - inside), k) / num_choices
        expected_hits += num_ways / comb(groups, chosen) * (1 - missed)
    return num_parts * expected_hits


def hierarchical_s(call: CollectiveCall) -> float:
    """Return the seconds of a hierarchical collective: intra-node and inter-node stages.

    All-reduce: reduce-scatter in the node, all-reduce of a slice across nodes, all-gather in the
    node.  All-gather and reduce-scatter: a slice across nodes, the whole in the node.
    """
    span = call.span
    local = span.ranks_per_node
    # Not the rate of one ring through the node: each local rank runs a ring across nodes, all at
    # once, so each has a device's share of the NICs for its slice.
    rate = nic_share_bytes_per_s(call.cluster) * call.network_fraction
    latency_s = _network_latency_s(call, ceil(log2(span.num_nodes)))
    slice_bytes = call.size_bytes / local
    across_s = latency_s + bus_factor(call.op, span.num_nodes) * slice_bytes / rate
    if local == 1:
        return across_s
    inside = (
        (CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_GATHER)
        if call.op is CollectiveOp.ALL_REDUCE
        else (call.op,)
    )
    return across_s + sum(
        _latency_bandwidth_s(op, call.size_bytes, local, _intra_node_performance(call, local, op))
        for op in inside
    )


Algorithm = Callable[[CollectiveCall], float]

_GATHERING = frozenset({CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER})
_ROOTED = frozenset({CollectiveOp.BROADCAST, CollectiveOp.REDUCE})
ALGORITHMS: dict[str, tuple[Algorithm, frozenset[CollectiveOp]]] = {
    "ring": (ring_s, _GATHERING | _ROOTED | {CollectiveOp.ALL_REDUCE}),
    "pairwise": (pairwise_s, frozenset({CollectiveOp.ALL_TO_ALL})),
    "tree": (tree_s, _ROOTED | {CollectiveOp.ALL_REDUCE}),
    "hierarchical": (hierarchical_s, _GATHERING | {CollectiveOp.ALL_REDUCE}),
}


class MessageCost(NamedTuple):
    """Time of a message on the sender's port, and its latency."""

    transfer: Cost
    latency: Cost


def p2p_cost(
    size_bytes: int, cluster: Cluster, *, crosses_nodes: bool, network_fraction: float
) -> MessageCost:
    """Return the time of one p2p message between two devices."""
    # Apart, as the port is free for the next message while this one is still on the way.
    if not crosses_nodes:
        inside = intra_node_performance(cluster.intra_node, CollectiveOp.P2P, 2)
        return MessageCost(
            Cost.from_seconds(size_bytes / inside.busbw_bytes_per_s, inside.source),
            Cost.from_seconds(inside.latency_s, inside.source),
        )
    rate = nic_share_bytes_per_s(cluster) * network_fraction
    return MessageCost(
        Cost.from_seconds(size_bytes / rate, Source.FITTED),
        Cost.from_seconds(cluster.inter_node.latency_s, cluster.inter_node.kind),
    )
