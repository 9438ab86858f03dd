"""Times of collectives and messages: closed forms, and what a network shared by devices gives."""

from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    Cluster,
    CollectiveOp,
    Dispatcher,
    Link,
    Source,
    load_cluster,
    to_ps,
)
from meshwright.simulator.costs.collectives import (
    ALGORITHMS,
    CollectiveCall,
    collective_cost,
    dispatch_cost,
    hierarchical_s,
    p2p_cost,
    pairwise_s,
    ring_s,
    tree_s,
)
from meshwright.simulator.costs.links import (
    bus_factor,
    intra_node_performance,
    network_rate_bytes_per_s,
    nic_share_bytes_per_s,
    port_bytes_per_s,
    ports_per_node,
    ring_steps,
)
from meshwright.simulator.layout.mesh import GroupSpan
from meshwright.simulator.layout.placement import Partial, Replicate, Split, redistribute
from meshwright.simulator.model import Experts

RELAXED = settings(deadline=None, max_examples=100)
COLLECTIVES = [op for op in CollectiveOp if op is not CollectiveOp.P2P]
SIZES = st.integers(1, 10**12)
DGX = load_cluster("dgx-a100")
LATENCY_S, START_S = DGX.inter_node.latency_s, DGX.inter_node.collective_latency_s
# Sums of a few floats in another order.
ROUNDING = 1e-12


def spans() -> st.SearchStrategy[GroupSpan]:
    return st.builds(
        lambda nodes, local: GroupSpan(nodes * local, nodes, local),
        st.integers(2, 2000),
        st.integers(1, 8),
    )


def call(
    op: CollectiveOp,
    size_bytes: int,
    span: GroupSpan,
    *,
    cluster: Cluster = DGX,
    fraction: float = 1.0,
) -> CollectiveCall:
    return CollectiveCall(op, size_bytes, span, cluster, fraction, Source.FITTED)


def bare_link(link: Link) -> Link:
    """Return *link* without measured collectives: line rate and hops alone."""
    return link.model_copy(update={"collectives": ()})


@RELAXED
@given(size_bytes=SIZES, num_ranks=st.integers(2, 10**5))
def test_a_ring_carries_what_the_placement_algebra_says(size_bytes: int, num_ranks: int) -> None:
    changes = {
        CollectiveOp.ALL_REDUCE: redistribute(Partial(), Replicate()),
        CollectiveOp.ALL_GATHER: redistribute(Split(0), Replicate()),
        CollectiveOp.REDUCE_SCATTER: redistribute(Partial(), Split(0)),
    }
    for op, change in changes.items():
        assert change is not None
        assert change.op is op
        sent = float(change.sent_bytes(size_bytes, num_ranks))
        assert bus_factor(op, num_ranks) * size_bytes == pytest.approx(sent, rel=ROUNDING)


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(CollectiveOp.ALL_REDUCE, n) for n in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]
    for op in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_TO_ALL):
        assert [bus_factor(op, n) for n in (1, 2, 4, 8)] == [0, 0.5, 0.75, 0.875]
    assert bus_factor(CollectiveOp.BROADCAST, 8) == bus_factor(CollectiveOp.P2P, 2) == 1


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_communicator_of_one_rank_costs_nothing(op: CollectiveOp) -> None:
    assert collective_cost(call(op, 10**9, GroupSpan(1, 1, 1))).time_ps == 0


@RELAXED
@given(size_bytes=SIZES, num_ranks=st.integers(2, 8))
def test_inside_a_node_without_facts_a_ring_of_hops_is_taken(
    size_bytes: int, num_ranks: int
) -> None:
    link = bare_link(DGX.intra_node)
    cluster = DGX.model_copy(update={"intra_node": link})
    cost = collective_cost(
        call(
            CollectiveOp.ALL_REDUCE, size_bytes, GroupSpan(num_ranks, 1, num_ranks), cluster=cluster
        )
    )
    steps = 2 * (num_ranks - 1)
    rate = link.bandwidth_bytes_per_s * link.busbw_fraction
    expected_s = steps * link.latency_s + steps / num_ranks * size_bytes / rate
    assert cost.time_ps == pytest.approx(to_ps(expected_s), rel=ROUNDING, abs=1)
    assert cost.source is link.kind


def test_inside_a_node_a_fact_is_used_as_it_stands() -> None:
    fact = next(
        each
        for each in DGX.intra_node.collectives
        if each.op is CollectiveOp.ALL_REDUCE and each.num_ranks == 8
    )
    cost = collective_cost(call(CollectiveOp.ALL_REDUCE, 10**9, GroupSpan(8, 1, 8)))
    assert cost.time_ps == to_ps(fact.latency_s + 1.75 * 10**9 / fact.busbw_bytes_per_s)
    assert cost.source is fact.kind


def test_a_fact_of_another_size_is_extrapolated_with_the_steps_of_a_ring() -> None:
    link = DGX.intra_node
    facts = {f.num_ranks: f for f in link.collectives if f.op is CollectiveOp.ALL_REDUCE}
    six, five = (intra_node_performance(link, CollectiveOp.ALL_REDUCE, n) for n in (6, 5))
    # 4 and 8 are equally near to 6: the smaller is taken.
    assert six.busbw_bytes_per_s == five.busbw_bytes_per_s == facts[4].busbw_bytes_per_s
    assert six.latency_s == facts[4].latency_s * 10 / 6
    assert five.latency_s == facts[4].latency_s * 8 / 6
    assert six.source is five.source is Source.EXTRAPOLATED


def test_ring_steps_count_hops() -> None:
    assert ring_steps(CollectiveOp.ALL_REDUCE, 8) == 14
    assert ring_steps(CollectiveOp.REDUCE_SCATTER, 8) == ring_steps(CollectiveOp.BROADCAST, 8) == 7
    assert ring_steps(CollectiveOp.P2P, 2) == 1


@RELAXED
@given(size_bytes=SIZES, num_nodes=st.integers(2, 1000), fraction=st.floats(0.1, 1))
def test_a_ring_of_one_rank_a_node_is_the_closed_form(
    size_bytes: int, num_nodes: int, fraction: float
) -> None:
    span = GroupSpan(num_nodes, num_nodes, 1)
    rate = 25_000_000_000 * fraction  # a 200 Gb/s card for each device
    volume = 2 * (num_nodes - 1) / num_nodes * size_bytes
    latency_s = 2 * (START_S + (num_nodes - 1) * LATENCY_S)
    ring = ring_s(call(CollectiveOp.ALL_REDUCE, size_bytes, span, fraction=fraction))
    assert ring == pytest.approx(latency_s + volume / rate, rel=ROUNDING)
    half = ring_s(call(CollectiveOp.ALL_GATHER, size_bytes, span, fraction=fraction))
    assert ring == pytest.approx(2 * half, rel=ROUNDING)


@RELAXED
@given(span=spans(), size_bytes=SIZES)
def test_a_ring_over_full_nodes_runs_at_the_slower_of_network_and_node(
    span: GroupSpan, size_bytes: int
) -> None:
    inside_s, rate = 0.0, span.ranks_per_node * 25_000_000_000.0
    if span.ranks_per_node > 1:
        local = intra_node_performance(
            DGX.intra_node, CollectiveOp.REDUCE_SCATTER, span.ranks_per_node
        )
        rate, inside_s = min(rate, local.busbw_bytes_per_s), local.latency_s
    volume = (span.num_ranks - 1) / span.num_ranks * size_bytes
    expected_s = inside_s + START_S + (span.num_nodes - 1) * LATENCY_S + volume / rate
    got_s = ring_s(call(CollectiveOp.REDUCE_SCATTER, size_bytes, span))
    assert got_s == pytest.approx(expected_s, rel=ROUNDING)


def test_latency_of_a_tree_grows_with_the_logarithm_of_the_nodes() -> None:
    def latency_s(num_nodes: int, op: CollectiveOp = CollectiveOp.ALL_REDUCE) -> float:
        return tree_s(call(op, 0, GroupSpan(num_nodes, num_nodes, 1)))

    hops = {2: 1, 3: 2, 4: 2, 5: 3, 8: 3, 64: 6, 1000: 10, 1024: 10, 1025: 11}
    for num_nodes, depth in hops.items():
        round_s = START_S + depth * LATENCY_S
        assert latency_s(num_nodes) == 2 * round_s
        assert latency_s(num_nodes, CollectiveOp.BROADCAST) == round_s


@RELAXED
@given(num_nodes=st.integers(2, 2000), size_bytes=SIZES)
def test_a_tree_sends_the_buffer_up_and_down_once(num_nodes: int, size_bytes: int) -> None:
    span = GroupSpan(num_nodes, num_nodes, 1)
    round_s = START_S + ceil(log2(num_nodes)) * LATENCY_S + size_bytes / 25_000_000_000
    got_s = tree_s(call(CollectiveOp.ALL_REDUCE, size_bytes, span))
    assert got_s == pytest.approx(2 * round_s, rel=ROUNDING)


@RELAXED
@given(num_nodes=st.integers(2, 2000), size_bytes=SIZES)
def test_the_hierarchy_is_local_work_and_slices_over_the_nodes(
    num_nodes: int, size_bytes: int
) -> None:
    span = GroupSpan(8 * num_nodes, num_nodes, 8)
    scatter, gather = (
        intra_node_performance(DGX.intra_node, op, 8)
        for op in (CollectiveOp.REDUCE_SCATTER, CollectiveOp.ALL_GATHER)
    )
    start_s = START_S + ceil(log2(num_nodes)) * LATENCY_S
    slices_s = start_s + (num_nodes - 1) / num_nodes * size_bytes / 8 / 25_000_000_000
    gather_s = gather.latency_s + 7 / 8 * size_bytes / gather.busbw_bytes_per_s
    scatter_s = scatter.latency_s + 7 / 8 * size_bytes / scatter.busbw_bytes_per_s
    all_gather_s = hierarchical_s(call(CollectiveOp.ALL_GATHER, size_bytes, span))
    all_reduce_s = hierarchical_s(call(CollectiveOp.ALL_REDUCE, size_bytes, span))
    assert all_gather_s == pytest.approx(slices_s + gather_s, rel=ROUNDING)
    assert all_reduce_s == pytest.approx(2 * slices_s + gather_s + scatter_s, rel=ROUNDING)


@pytest.mark.parametrize("faster", [1, 1000])
@pytest.mark.parametrize("num_nodes", [2, 5])
def test_an_all_to_all_takes_as_long_as_the_slower_of_network_and_node(
    num_nodes: int, faster: int
) -> None:
    """Each rank has a part for each other one: 7 on its node, the rest behind a port of 25 GB/s."""
    part, span = 10**6, GroupSpan(8 * num_nodes, num_nodes, 8)
    inside = intra_node_performance(DGX.intra_node, CollectiveOp.ALL_TO_ALL, 8)
    inside_s = inside.latency_s + 7 * part / inside.busbw_bytes_per_s
    hops = {2: 1, 5: 3}[num_nodes]
    rows = 8 * (num_nodes - 1) * part
    across_s = START_S + hops * LATENCY_S + rows / (25_000_000_000 * faster)
    asked = call(CollectiveOp.ALL_TO_ALL, span.num_ranks * part, span, fraction=faster)
    assert pairwise_s(asked) == pytest.approx(max(across_s, inside_s), rel=ROUNDING)
    # A token of one expert leaves its node as often as that is elsewhere, and never twice.
    quick = DGX.inter_node.model_copy(
        update={"bandwidth_bytes_per_s": 25_000_000_000 * faster, "busbw_fraction": 1.0}
    )
    experts = Experts(num_experts=8 * num_nodes, experts_per_token=1, hidden_size=8)
    size_bytes = span.num_ranks * part
    whole_s = inside.latency_s + 7 / 8 * size_bytes / inside.busbw_bytes_per_s
    cluster = DGX.model_copy(update={"inter_node": quick})
    for dispatcher, source in (
        (Dispatcher.HYBRIDEP, quick.kind),
        (Dispatcher.DEEPEP, Source.EXTRAPOLATED),  # no times of it are published
    ):
        cost = dispatch_cost(size_bytes, span, cluster, experts, dispatcher)
        assert cost.time_ps == pytest.approx(to_ps(max(across_s, whole_s)), rel=1e-9)
        assert cost.source is source


@RELAXED
@given(op=st.sampled_from(COLLECTIVES), span=spans(), size_bytes=SIZES)
def test_the_fastest_algorithm_that_offers_the_operation_is_taken(
    op: CollectiveOp, span: GroupSpan, size_bytes: int
) -> None:
    asked = call(op, size_bytes, span)
    offers = {name: run(asked) for name, (run, ops) in ALGORITHMS.items() if op in ops}
    assert collective_cost(asked).time_ps == to_ps(min(offers.values()))
    assert collective_cost(asked).source is Source.FITTED


def test_small_buffers_take_the_tree_and_large_ones_the_ring() -> None:
    span = GroupSpan(64, 64, 1)
    small, large = (call(CollectiveOp.ALL_REDUCE, size, span) for size in (10**3, 10**11))
    assert tree_s(small) < ring_s(small)
    assert ring_s(large) < tree_s(large)


@RELAXED
@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    data=st.data(),
    span=spans(),
    size_bytes=SIZES,
    more_bytes=SIZES,
)
def test_no_algorithm_is_faster_for_more_bytes(
    name: str, data: st.DataObject, span: GroupSpan, size_bytes: int, more_bytes: int
) -> None:
    run, operations = ALGORITHMS[name]
    op = data.draw(st.sampled_from(sorted(operations)))
    assert run(call(op, size_bytes, span)) < run(call(op, size_bytes + more_bytes, span))


@RELAXED
@given(
    op=st.sampled_from(COLLECTIVES),
    num_ranks=st.integers(2, 8),
    size_bytes=SIZES,
    more_bytes=SIZES,
)
def test_inside_a_node_more_bytes_never_take_less(
    op: CollectiveOp, num_ranks: int, size_bytes: int, more_bytes: int
) -> None:
    span = GroupSpan(num_ranks, 1, num_ranks)
    less, more = (call(op, size, span) for size in (size_bytes, size_bytes + more_bytes))
    assert collective_cost(less).time_ps <= collective_cost(more).time_ps


def test_four_cards_give_each_of_eight_devices_half_of_what_eight_cards_do() -> None:
    half, full = load_cluster("a100-4xhdr200"), load_cluster("dgx-a100")
    assert nic_share_bytes_per_s(full) == 25_000_000_000
    assert nic_share_bytes_per_s(half) == 12_500_000_000
    span = GroupSpan(32, 4, 8)
    assert network_rate_bytes_per_s(full, span, 0.5) == 100_000_000_000
    assert network_rate_bytes_per_s(half, span, 0.5) == 50_000_000_000


@pytest.mark.parametrize(("cards", "ports", "rate"), [(4, 4, 25), (8, 8, 25), (16, 8, 50)])
def test_a_port_is_a_card_or_what_a_device_has_of_more_cards(
    cards: int, ports: int, rate: int
) -> None:
    cluster = DGX.model_copy(update={"nics_per_node": cards})
    assert ports_per_node(cluster) == ports
    assert port_bytes_per_s(cluster) == rate * 10**9
    thin = cluster.model_copy(update={"oversubscription": 2.0})
    assert port_bytes_per_s(thin) == rate * 10**9 / 2


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 7.5])
def test_oversubscription_divides_the_share_of_the_network(factor: float) -> None:
    thin = DGX.model_copy(update={"oversubscription": factor})
    assert nic_share_bytes_per_s(thin) == pytest.approx(25_000_000_000 / factor, rel=ROUNDING)
    transfer = p2p_cost(10**9, thin, crosses_nodes=True, network_fraction=1.0).transfer
    assert transfer.time_ps == pytest.approx(40_000_000_000 * factor, rel=ROUNDING)


def test_a_message_between_nodes_takes_its_share_of_the_network() -> None:
    cost = p2p_cost(10**8, DGX, crosses_nodes=True, network_fraction=0.5)
    assert cost.transfer.time_ps == 8_000_000_000  # 0.1 GB at 12.5 GB/s: 8 ms
    assert cost.latency.time_ps == to_ps(LATENCY_S)
    assert (cost.transfer.source, cost.latency.source) == (Source.FITTED, DGX.inter_node.kind)


def test_a_message_inside_a_node_takes_the_measured_link() -> None:
    fact = next(f for f in DGX.intra_node.collectives if f.op is CollectiveOp.P2P)
    cost = p2p_cost(10**8, DGX, crosses_nodes=False, network_fraction=0.5)
    assert cost.transfer.time_ps == to_ps(10**8 / fact.busbw_bytes_per_s)
    assert cost.latency.time_ps == to_ps(fact.latency_s)
    assert cost.transfer.source is fact.kind
