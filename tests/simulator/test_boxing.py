"""Changes of placement: their order on a mesh against NumPy, their time against the cost model."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import Cluster, CollectiveOp, Source, load_cluster
from meshwright.simulator.costs import Cost
from meshwright.simulator.costs.collectives import CollectiveCall, collective_cost
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.mesh import GroupSpan
from meshwright.simulator.layout.placement import (
    Partial,
    Placement,
    Placements,
    Redistribution,
    Replicate,
    Split,
    redistribute,
    shard_shape,
)
from meshwright.simulator.matmul.boxing import (
    Boxing,
    BoxingStep,
    DeviceMesh,
    TensorSize,
    boxing,
    boxings_from,
    redistribute_cost,
)

Tensor = npt.NDArray[np.int64]
Grid = dict[tuple[int, ...], Tensor]  # what each rank of a mesh holds, by its coordinates

S0, S1, R, P = Split(0), Split(1), Replicate(), Partial()
SPOTS: tuple[Placement, ...] = (S0, S1, R, P)
CHANGES = [(source, target) for source, target in product(SPOTS, repeat=2) if source != target]
RELAXED = settings(deadline=None, max_examples=30)  # shared machines stall now and then


def dgx() -> Cluster:
    return load_cluster("dgx-a100")


# --- one axis ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "jean-zay-a100", "dgx-1v"])
@pytest.mark.parametrize(("source", "target"), CHANGES)
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 16, 24])
def test_one_axis_takes_the_time_of_its_collective(
    source: Placement, target: Placement, num_ranks: int, name: str
) -> None:
    cluster = load_cluster(name)
    tensor = TensorSize((24 * num_ranks, 48 * num_ranks), 2)
    (step,) = boxing(tensor, (source,), (target,), DeviceMesh((num_ranks,), cluster)).steps
    change = redistribute(source, target)
    assert change is not None
    assert step.change == change
    assert step.sent_bytes == change.sent_bytes(tensor.size_bytes, num_ranks)
    if change.op is None:
        assert step.cost.time_ps == 0
        return
    local = cluster.devices_per_node
    span = GroupSpan(num_ranks, -(-num_ranks // local), min(num_ranks, local))
    size_bytes = change.buffer_bytes(tensor.size_bytes, num_ranks)
    network = cluster.inter_node
    call = CollectiveCall(
        change.op, int(size_bytes), span, cluster, network.busbw_fraction, network.kind
    )
    assert step.cost == collective_cost(call)


@RELAXED
@given(num_ranks=st.integers(1, 64), rows=st.integers(1, 99), columns=st.integers(1, 99))
def test_an_all_reduce_sends_as_much_as_a_reduce_scatter_and_an_all_gather(
    num_ranks: int, rows: int, columns: int
) -> None:
    tensor, mesh = TensorSize((rows * num_ranks, columns), 4), DeviceMesh((num_ranks,), dgx())
    whole = boxing(tensor, (P,), (R,), mesh)
    halves = boxing(tensor, (P,), (S0,), mesh), boxing(tensor, (S0,), (R,), mesh)
    assert whole.op_names == ("all_reduce",)
    assert [each.op_names for each in halves] == [("reduce_scatter",), ("all_gather",)]
    assert whole.sent_bytes == sum(each.sent_bytes for each in halves)
    assert whole.sent_bytes == Fraction(2 * (num_ranks - 1) * tensor.size_bytes, num_ranks)


def test_the_fp32_textbook_product_sends_128_bytes_to_add_up_its_halves() -> None:
    mesh = DeviceMesh((2,), dgx())
    assert boxing(TensorSize((4, 8), 4), (P,), (R,), mesh).sent_bytes == 128
    assert boxing(TensorSize((4, 8), 4), (S0,), (R,), mesh).sent_bytes == 64
    assert boxing(TensorSize((4, 8), 4), (S1,), (R,), mesh).sent_bytes == 64


def test_staying_in_place_is_no_boxing() -> None:
    nothing = boxing(TensorSize((4, 8), 4), (S0, R), (S0, R), DeviceMesh((2, 2), dgx()))
    assert nothing == Boxing(())
    assert nothing.time_ps == nothing.sent_bytes == 0


# --- several axes -----------------------------------------------------------------------------


def spread(tensor: Tensor, placements: Placements, sizes: tuple[int, ...]) -> Grid:
    """Return what the ranks hold: an axis cuts what the axes before it have left.

    Equal parts get equal summands, so that replicas stay replicas.
    """
    grid: Grid = {(): tensor}
    for placement, n in zip(placements, sizes, strict=True):
        parts = {rank: scatter(part, placement, n) for rank, part in grid.items()}
        grid = {(*rank, r): each[r] for rank, each in parts.items() for r in range(n)}
    return grid


def scatter(tensor: Tensor, placement: Placement, n: int) -> list[Tensor]:
    match placement:
        case Split(dim):
            return np.split(tensor, n, axis=dim)
        case Replicate():
            return [tensor.copy() for _ in range(n)]
        case Partial():
            rng = np.random.default_rng(n)
            summands = [rng.integers(-9, 10, tensor.shape) for _ in range(n - 1)]
            return [tensor - sum(summands, np.zeros_like(tensor)), *summands]


def assemble(parts: list[Tensor], placement: Placement) -> Tensor | None:
    match placement:
        case Split(dim):
            return np.concatenate(parts, axis=dim)
        case Replicate():
            same = all(np.array_equal(one, other) for one, other in pairwise(parts))
            return parts[0] if same else None
        case Partial():
            return sum(parts, np.zeros_like(parts[0]))


def gather(grid: Grid, placements: Placements, sizes: tuple[int, ...]) -> Tensor | None:
    """Return the tensor that a mesh holds, None where replicas differ: the inverse of spread."""
    whole: dict[tuple[int, ...], Tensor] = grid
    for placement, n in reversed(list(zip(placements, sizes, strict=True))):
        fewer: dict[tuple[int, ...], Tensor] = {}
        for rank in dict.fromkeys(each[:-1] for each in whole):
            together = assemble([whole[(*rank, r)] for r in range(n)], placement)
            if together is None:
                return None
            fewer[rank] = together
        whole = fewer
    return whole[()]


def groups(grid: Grid, axis: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield the communicators of an axis, each with its ranks in order."""
    for start in grid:
        if start[axis] == 0:
            n = 1 + max(rank[axis] for rank in grid)
            yield [(*start[:axis], r, *start[axis + 1 :]) for r in range(n)]


def change_axis(grid: Grid, axis: int, change: Redistribution) -> tuple[Grid, set[int]]:
    """Return the mesh after one collective an axis, and the bytes each communicator changed."""
    after, sizes_bytes = {}, set()
    for ranks in groups(grid, axis):
        parts = [grid[rank] for rank in ranks]
        whole = assemble(parts, change.source)
        assert whole is not None
        sizes_bytes.add(whole.nbytes)
        for r, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
            after[rank] = new_part(whole, part, r, len(ranks), change)
    return after, sizes_bytes


def new_part(whole: Tensor, part: Tensor, r: int, n: int, change: Redistribution) -> Tensor:
    match change.source, change.target:
        case _, Split(dim):
            return np.split(whole, n, axis=dim)[r]
        case _, Replicate():
            return whole
        case Split(dim), Partial():
            padded = [np.zeros_like(part)] * n
            padded[r] = part
            return np.concatenate(padded, axis=dim)
        case _:
            return part if r == 0 else np.zeros_like(part)


SIZES = [(2, 2), (2, 3), (3, 1), (2, 2, 2)]


def tensor_for(sizes: tuple[int, ...]) -> Tensor:
    n = int(np.prod(sizes))
    return np.arange(2 * n * n, dtype=np.int64).reshape(2 * n, n) ** 2 % 97


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_boxing_of_a_mesh_moves_the_tensor_there(sizes: tuple[int, ...]) -> None:
    tensor = tensor_for(sizes)
    size, mesh = TensorSize(tensor.shape, 8), DeviceMesh(sizes, dgx())
    sources = list(product(SPOTS, repeat=len(sizes)))
    for source in sources[:: 1 if len(sizes) == 2 else 5]:
        routes = boxings_from(size, source, mesh)
        assert set(routes) == set(sources)
        for target, route in routes.items():
            grid = spread(tensor, source, sizes)
            for step in route.steps:
                grid, group_bytes = change_axis(grid, step.axis, step.change)
                (held,) = group_bytes
                assert step.sent_bytes == step.change.sent_bytes(held, sizes[step.axis])
                assert step.cost == redistribute_cost(step.change, held, mesh, step.axis)
            together = gather(grid, target, sizes)
            assert together is not None, (source, target)
            assert np.array_equal(together, tensor), (source, target)
            assert {each.shape for each in grid.values()} == {
                shard_shape(tensor.shape, target, sizes)
            }


def fewest_changes(sizes: tuple[int, ...]) -> dict[tuple[Placements, Placements], int]:
    """Return how many single-axis changes NumPy needs from each placement to each other."""
    tensor = tensor_for(sizes)
    spots = list(product(SPOTS, repeat=len(sizes)))
    works: dict[Placements, list[Placements]] = {spot: [] for spot in spots}
    for source, axis, new in product(spots, range(len(sizes)), SPOTS):
        change = redistribute(source[axis], new)
        if change is None:
            continue
        target = (*source[:axis], new, *source[axis + 1 :])
        grid, _ = change_axis(spread(tensor, source, sizes), axis, change)
        together = gather(grid, target, sizes)
        if together is not None and np.array_equal(together, tensor):
            works[source].append(target)
    counts = {}
    for source in spots:
        level, seen, depth = [source], {source}, 0
        while level:
            counts.update({(source, each): depth for each in level})
            level = list(dict.fromkeys(n for each in level for n in works[each] if n not in seen))
            seen.update(level)
            depth += 1
    return counts


def test_no_sequence_with_fewer_changes_moves_the_tensor() -> None:
    size, mesh = TensorSize(tensor_for((2, 2)).shape, 8), DeviceMesh((2, 2), dgx())
    for (source, target), count in fewest_changes((2, 2)).items():
        assert len(boxings_from(size, source, mesh)[target].steps) == count, (source, target)


def test_a_dim_split_twice_is_gathered_from_the_inside() -> None:
    mesh, tensor = DeviceMesh((2, 4), dgx()), TensorSize((16, 8), 2)
    route = boxing(tensor, (S0, S0), (R, R), mesh)
    assert [step.axis for step in route.steps] == [1, 0]
    assert route.op_names == ("all_gather", "all_gather")
    assert route.sent_bytes == Fraction(3, 4) * 128 + Fraction(1, 2) * 256
    detour = boxing(tensor, (S0, S0), (S1, S0), mesh)
    assert [(step.axis, step.change.op) for step in detour.steps] == [
        (1, CollectiveOp.ALL_GATHER),
        (0, CollectiveOp.ALL_TO_ALL),
        (1, None),
    ]


def test_of_two_orders_the_faster_one_is_taken() -> None:
    # Gathering over the network first moves slices; gathering inside the node first, whole rows.
    mesh, tensor = DeviceMesh((2, 8), dgx()), TensorSize((4096, 8192), 2)
    route = boxing(tensor, (S0, S1), (R, R), mesh)
    assert [step.axis for step in route.steps] == [0, 1]
    network_last = [(1, S1, tensor.size_bytes // 2), (0, S0, tensor.size_bytes)]
    other_ps = 0
    for axis, split, held in network_last:
        change = redistribute(split, R)
        assert change is not None
        other_ps += redistribute_cost(change, held, mesh, axis).time_ps
    assert route.time_ps < other_ps


def test_axes_span_nodes_as_their_ranks_do() -> None:
    mesh = DeviceMesh((3, 2, 8), dgx())
    assert mesh.num_devices == 48
    assert [mesh.span(axis) for axis in range(3)] == [
        GroupSpan(3, 3, 1),
        GroupSpan(2, 2, 1),
        GroupSpan(8, 1, 8),
    ]


def test_the_same_boxing_twice_is_the_same() -> None:
    mesh, tensor = DeviceMesh((2, 2, 2), dgx()), TensorSize((8, 8), 2)
    routes = [boxings_from(tensor, (S0, P, S0), mesh) for _ in range(2)]
    assert list(routes[0].items()) == list(routes[1].items())


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(), (0,), (2, -1)], ids=str)
def test_a_mesh_without_devices_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="allowed are one or more sizes from 1"):
        DeviceMesh(sizes, dgx())


def test_a_mesh_larger_than_its_cluster_is_refused() -> None:
    small = dgx().model_copy(update={"num_nodes": 2})
    assert DeviceMesh((2, 8), small).num_devices == 16
    with pytest.raises(PlanError, match=r"^mesh of 24 devices: dgx-a100 has 16 devices$"):
        DeviceMesh((3, 8), small)


def test_a_tensor_that_does_not_divide_is_refused() -> None:
    mesh = DeviceMesh((2,), dgx())
    with pytest.raises(PlanError, match="dim 1 of shape"):
        boxing(TensorSize((4, 5), 2), (R,), (S1,), mesh)
    with pytest.raises(PlanError, match="dim 1 of shape"):
        boxing(TensorSize((4, 5), 2), (S1,), (R,), mesh)
    change = redistribute(S0, S1)
    assert change is not None
    with pytest.raises(ValueError, match="not whole bytes"):
        redistribute_cost(change, 5, mesh, 0)


def test_a_free_change_costs_nothing() -> None:
    (step,) = boxing(TensorSize((4, 8), 2), (R,), (S0,), DeviceMesh((2,), dgx())).steps
    free = Redistribution(None, R, S0)
    assert step == BoxingStep(0, free, Fraction(0), Cost(0, Source.DATASHEET))
