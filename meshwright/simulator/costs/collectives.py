"""Times of collectives: one function an algorithm, and the registry that the choice is made from.

A communicator inside one node uses the node's link.  Across nodes the fastest of the
algorithms that offer the operation is taken, as NCCL's tuner does.
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

    ``size_bytes`` is the larger of a rank's two buffers; ``network_fraction`` is the share of
    the network's line rate that this stack reaches with it, ``network_source`` what that
    share rests on.
    """

    op: CollectiveOp
    size_bytes: int
    span: GroupSpan
    cluster: Cluster
    network_fraction: float
    network_source: Source


def collective_cost(call: CollectiveCall) -> Cost:
    """Return the time of a collective; a communicator of one rank costs nothing."""
    if call.span.num_ranks == 1:
        return Cost(0, Source.DATASHEET)  # of no time, so no share of any evidence
    if not call.span.crosses_nodes:
        return _intra_node(call)
    offers = [
        algorithm(call) for algorithm, operations in ALGORITHMS.values() if call.op in operations
    ]
    return Cost.from_seconds(min(offers), call.network_source)


def _intra_node(call: CollectiveCall) -> Cost:
    performance = _inside(call, call.span.num_ranks)
    return Cost.from_seconds(
        _linear_s(call.op, call.size_bytes, call.span.num_ranks, performance), performance.source
    )


def _inside(call: CollectiveCall, num_ranks: int, op: CollectiveOp | None = None) -> Performance:
    return intra_node_performance(call.cluster.intra_node, op or call.op, num_ranks)


def _linear_s(
    op: CollectiveOp, size_bytes: float, num_ranks: int, performance: Performance
) -> float:
    factor = bus_factor(op, num_ranks)
    return performance.latency_s + factor * size_bytes / performance.busbw_bytes_per_s


def ring_s(call: CollectiveCall) -> float:
    """Return the seconds of one ring through all members.

    The slowest link carries ``bus_factor`` times the buffer; the ring passes between nodes
    once a node and round.
    """
    path = _whole_path(call, call.span.num_nodes - 1)
    carried_bytes = bus_factor(call.op, call.span.num_ranks) * call.size_bytes
    return path.latency_s + carried_bytes / path.busbw_bytes_per_s


def _whole_path(call: CollectiveCall, hops: int) -> Performance:
    """Return what passes through all members reach, *hops* of them between nodes."""
    span = call.span
    rate = network_rate_bytes_per_s(call.cluster, span, call.network_fraction)
    latency_s = _network_latency_s(call, hops)
    if span.ranks_per_node > 1:
        # The same bytes pass every link, inside the node and between nodes: the slowest decides.
        inside = _inside(call, span.ranks_per_node)
        rate = min(rate, inside.busbw_bytes_per_s)
        latency_s += inside.latency_s
    return Performance(rate, latency_s, call.network_source)


def _rounds(op: CollectiveOp) -> int:
    # An all-reduce is a reduce-scatter and an all-gather, or goes up a tree and down again.
    return 2 if op is CollectiveOp.ALL_REDUCE else 1


def _network_latency_s(call: CollectiveCall, hops: int) -> float:
    """Return start-up time across nodes: a collective's own, and *hops* between nodes a round."""
    network = call.cluster.inter_node
    return _rounds(call.op) * (network.collective_latency_s + hops * network.latency_s)


def tree_s(call: CollectiveCall) -> float:
    """Return the seconds of a double binary tree: the buffer goes up and down once.

    Sanders, Speck and Traeff 2009; latency grows with the logarithm of the nodes.
    """
    path = _whole_path(call, ceil(log2(call.span.num_nodes)))
    return path.latency_s + _rounds(call.op) * call.size_bytes / path.busbw_bytes_per_s


def pairwise_s(call: CollectiveCall) -> float:
    """Return the seconds of an all-to-all: each member sends its part to every other one.

    NCCL sends all at once: what leaves a node goes through the member's share of the ports, the
    rest over the link of the node, and the slower of both decides.
    """
    span, part = call.span, call.size_bytes / call.span.num_ranks
    rate = nic_share_bytes_per_s(call.cluster) * call.network_fraction
    latency_s = _network_latency_s(call, ceil(log2(span.num_nodes)))
    across_s = latency_s + (span.num_ranks - span.ranks_per_node) * part / rate
    if span.ranks_per_node == 1:
        return across_s
    local_bytes = span.ranks_per_node * part
    inside = _inside(call, span.ranks_per_node)
    return max(across_s, _linear_s(call.op, local_bytes, span.ranks_per_node, inside))


def dispatch_cost(
    size_bytes: int,
    span: GroupSpan,
    cluster: Cluster,
    experts: Experts,
    dispatcher: Dispatcher,
) -> Cost:
    """Return the time of an all-to-all that sends a token once to each node, and to each rank.

    Of a token's rows one leaves for each other node that has any of its experts; there and in its
    own node it goes once to each rank.  The network and the links inside carry these at the same
    time (HybridEP, arXiv 2603.07685; `sent_once` says how many).

    Args:
        size_bytes: Rows of all experts of a rank's tokens.
        span: The ranks that have the experts.
        cluster: Where these are.
        experts: Of which tokens choose.
        dispatcher: Which software; of HybridEP there are published times.
    """
    network, num_rows = cluster.inter_node, experts.experts_per_token
    share, kind = network.busbw_fraction, network.kind
    call = CollectiveCall(CollectiveOp.ALL_TO_ALL, size_bytes, span, cluster, share, kind)
    if span.num_ranks == 1:
        return Cost(0, Source.DATASHEET)
    local = span.ranks_per_node if span.crosses_nodes else span.num_ranks
    inside_bytes = call.size_bytes * sent_once(experts, span.num_ranks) / num_rows
    inside = _inside(call, local)
    seconds = _linear_s(call.op, inside_bytes, local, inside) if local > 1 else 0.0
    source = inside.source
    if span.crosses_nodes:
        num_nodes = -(-span.num_ranks // span.ranks_per_node)
        part = sent_once(experts, num_nodes) / num_rows * (num_nodes - 1) / num_nodes
        rate = nic_share_bytes_per_s(call.cluster) * call.network_fraction
        latency_s = _network_latency_s(call, ceil(log2(span.num_nodes)))
        across_s = latency_s + part * call.size_bytes / rate
        seconds, source = max(seconds, across_s), call.network_source
    is_known = dispatcher is Dispatcher.HYBRIDEP
    return Cost.from_seconds(seconds, source if is_known else Source.EXTRAPOLATED)


def sent_once(experts: Experts, num_parts: int) -> float:
    """Return in how many of *num_parts* equal parts of all experts a token has any, on average.

    A token chooses some groups of experts, and its experts among those of these groups, all with
    the same probability.

    >>> from meshwright.simulator.model import Experts
    >>> sent_once(Experts(num_experts=4, experts_per_token=2, hidden_size=8), 2)  # 2 of 6 pairs: 1
    1.6666666666666667
    """
    groups, chosen = experts.num_groups, experts.groups_per_token
    in_group, k = experts.num_experts // groups, experts.experts_per_token
    open_to = chosen * in_group if chosen < groups else experts.num_experts
    chosen = min(chosen, groups) if open_to < experts.num_experts else groups
    whole = comb(open_to, k)
    per_part = experts.num_experts / num_parts
    groups_per_part = max(1, round(per_part / in_group))
    hit = 0.0
    for number in range(1, min(groups_per_part, chosen) + 1):
        ways = comb(groups_per_part, number) * comb(groups - groups_per_part, chosen - number)
        inside = min(per_part, number * in_group)
        missed = comb(round(open_to - inside), k) / whole
        hit += ways / comb(groups, chosen) * (1 - missed)
    return num_parts * hit


def hierarchical_s(call: CollectiveCall) -> float:
    """Return the seconds of work in the node first, then of equal ranks over the nodes.

    All-reduce: reduce-scatter inside, all-reduce of a slice over the nodes, all-gather inside.
    All-gather and reduce-scatter: a slice over the nodes, the whole inside.
    """
    span = call.span
    local = span.ranks_per_node
    # Not the rate of a ring through the node: its members run one ring each, over equal ranks of
    # the nodes and all at once, so each has a device's share of the ports for its slice.
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
        _linear_s(op, call.size_bytes, local, _inside(call, local, op)) for op in inside
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
    """A message's time on the sender's port and its latency on the way."""

    transfer: Cost
    latency: Cost


def p2p_cost(
    size_bytes: int, cluster: Cluster, *, crosses_nodes: bool, network_fraction: float
) -> MessageCost:
    """Return the time of one message between two devices."""
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
