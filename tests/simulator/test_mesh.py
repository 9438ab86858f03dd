"""Where ranks and groups lie, against enumeration of every rank."""

from collections import Counter
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator.layout.mesh import Axis, GroupSpan, Mesh, strided_span

RELAXED = settings(deadline=None, max_examples=200)
SMALL_MESHES = [
    Mesh(tp=tp, dp=dp, pp=pp, node_size=node_size)
    for tp, dp, pp, node_size in product(
        (1, 2, 3, 4, 6), (1, 2, 3, 5, 8), (1, 2, 3, 4), range(1, 9)
    )
    if tp * dp * pp <= 48
]


def enumerated_span(ranks: Iterable[int], node_size: int) -> GroupSpan:
    members = Counter(rank // node_size for rank in ranks)
    return GroupSpan(members.total(), len(members), min(members.values()))


def enumerated_groups(mesh: Mesh, axis: Axis) -> set[tuple[int, ...]]:
    """Return the ranks that share all coordinates but the one of *axis*."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        coordinates = mesh.coordinates(rank)
        del coordinates[axis]
        groups.setdefault(tuple(coordinates.values()), []).append(rank)
    return {tuple(group) for group in groups.values()}


@pytest.mark.parametrize("node_size", range(1, 13))
def test_a_strided_span_counts_the_members_on_each_node(node_size: int) -> None:
    for first, stride, size in product(range(node_size), range(1, 14), range(1, 16)):
        ranks = range(first, first + stride * size, stride)
        assert strided_span(first, stride, size, node_size) == enumerated_span(ranks, node_size)


@RELAXED
@given(
    first=st.integers(0, 200),
    stride=st.integers(1, 40),
    size=st.integers(1, 300),
    node_size=st.integers(1, 40),
)
def test_a_strided_span_is_exact_for_any_sizes(
    first: int, stride: int, size: int, node_size: int
) -> None:
    ranks = range(first, first + stride * size, stride)
    assert strided_span(first, stride, size, node_size) == enumerated_span(ranks, node_size)


@pytest.mark.parametrize("axis", Axis)
def test_the_span_of_an_axis_is_the_worst_of_its_groups(axis: Axis) -> None:
    for mesh in SMALL_MESHES:
        spans = [enumerated_span(group, mesh.node_size) for group in enumerated_groups(mesh, axis)]
        worst = max(spans, key=lambda span: (span.num_nodes, -span.ranks_per_node))
        assert mesh.span(axis) == worst, mesh


@pytest.mark.parametrize(
    ("tp", "dp", "pp", "axis", "span"),
    [
        (3, 4, 1, Axis.TP, GroupSpan(3, 2, 1)),  # ranks 6, 7 | 8
        (3, 4, 1, Axis.DP, GroupSpan(4, 2, 1)),  # 2, 5 | 8, 11 and 0, 3, 6 | 9
        (6, 2, 1, Axis.TP, GroupSpan(6, 2, 2)),  # 6, 7 | 8, 9, 10, 11
        (6, 2, 1, Axis.DP, GroupSpan(2, 2, 1)),
        (6, 1, 2, Axis.PP, GroupSpan(2, 2, 1)),
        (12, 1, 1, Axis.TP, GroupSpan(12, 2, 4)),
        (4, 3, 1, Axis.TP, GroupSpan(4, 1, 4)),
        (1, 12, 1, Axis.DP, GroupSpan(12, 2, 4)),
    ],
)
def test_twelve_devices_on_nodes_of_eight_leave_a_partial_node(
    tp: int, dp: int, pp: int, axis: Axis, span: GroupSpan
) -> None:
    assert Mesh(tp=tp, dp=dp, pp=pp, node_size=8).span(axis) == span


def test_message_crosses_nodes_where_some_pair_of_ranks_does() -> None:
    for mesh in SMALL_MESHES:
        size = mesh.stride(Axis.PP)
        for sender, receiver in product(range(mesh.degree(Axis.PP)), repeat=2):
            pairs = [(sender * size + i, receiver * size + i) for i in range(size)]
            crossing = [one // mesh.node_size != two // mesh.node_size for one, two in pairs]
            assert mesh.crosses_nodes(sender, receiver) == any(crossing), mesh


def test_groups_of_an_axis_share_all_other_coordinates() -> None:
    for mesh, axis in product(SMALL_MESHES, Axis):
        groups = {mesh.group(rank, axis) for rank in range(mesh.world_size)}
        assert groups == enumerated_groups(mesh, axis)
        assert all(rank in mesh.group(rank, axis) for rank in range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.degree(axis)}


def test_ranks_and_coordinates_are_each_others_inverse() -> None:
    for mesh in SMALL_MESHES:
        for rank in range(mesh.world_size):
            assert mesh.rank(mesh.coordinates(rank)) == rank


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_are_farthest() -> None:
    mesh = Mesh(tp=8, dp=6, pp=64, node_size=8)
    assert [mesh.stride(axis) for axis in (Axis.TP, Axis.DP, Axis.PP)] == [1, 8, 48]
    assert mesh.span(Axis.TP) == GroupSpan(8, 1, 8)
    assert mesh.span(Axis.DP) == GroupSpan(6, 6, 1)
    assert mesh.span(Axis.PP) == GroupSpan(64, 64, 1)


def test_a_million_ranks_cost_no_enumeration() -> None:
    mesh = Mesh(tp=8, dp=10**6, pp=1, node_size=8)
    assert mesh.span(Axis.DP) == GroupSpan(10**6, 10**6, 1)
    assert Mesh(tp=1, dp=10**7, pp=1, node_size=8).span(Axis.DP) == GroupSpan(10**7, 1250000, 8)
