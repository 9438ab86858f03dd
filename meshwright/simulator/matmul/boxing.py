"""What it costs to move a tensor from one placement to another on the links of a cluster.

OneFlow calls the operation boxing (arXiv:2110.15032).  On one mesh axis it is one collective;
on a mesh of several axes it is a sequence of collectives, each on one axis.
"""

from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from meshwright.hwprofiles import Cluster, Source
from meshwright.simulator.costs import CollectiveCall, Cost, collective_cost
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import (
    Axis,
    GroupSpan,
    Mesh,
    Partial,
    Placement,
    Placements,
    Redistribution,
    Replicate,
    Split,
    redistribute,
    shard_shape,
)

_FREE = Cost(0, Source.DATASHEET)


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """Devices of a cluster in rows and columns; ranks vary fastest along the last axis.

    Args:
        sizes: Ranks of each axis, outermost first.
        cluster: Nodes are filled in rank order.

    Raises:
        PlanError: If an axis is empty, there is none, or the cluster has fewer devices.
    """

    sizes: tuple[int, ...]
    cluster: Cluster

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise PlanError(f"mesh sizes {self.sizes}: allowed are one or more sizes from 1")
        if self.cluster.num_nodes is None:
            return
        have = self.cluster.num_nodes * self.cluster.devices_per_node
        if self.num_devices > have:
            raise PlanError(
                f"mesh of {self.num_devices} devices: {self.cluster.name} has {have} devices"
            )

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return prod(self.sizes)

    def span(self, axis: int) -> GroupSpan:
        """Return how the communicators of *axis* lie over the nodes, the worst of them.

        Args:
            axis: Position in ``sizes``.
        """
        inner, outer = prod(self.sizes[axis + 1 :]), prod(self.sizes[:axis])
        # The middle axis of the three that a training mesh has is one between two others.
        mesh = Mesh(
            tp=inner, dp=self.sizes[axis], pp=outer, node_size=self.cluster.devices_per_node
        )
        return mesh.span(Axis.DP)


class TensorSize(NamedTuple):
    """A full tensor and the bytes of its elements."""

    shape: tuple[int, ...]
    element_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * self.element_bytes


class BoxingStep(NamedTuple):
    """A change on one axis: ``sent_bytes`` by each rank, in the time of its collective."""

    axis: int
    change: Redistribution
    sent_bytes: Fraction
    cost: Cost


class Boxing(NamedTuple):
    """A change of placement as steps in order; no steps where nothing changes."""

    steps: tuple[BoxingStep, ...]

    @property
    def time_ps(self) -> int:
        """Time of all steps."""
        return sum(step.cost.time_ps for step in self.steps)

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes one rank sends in all steps."""
        return sum((step.sent_bytes for step in self.steps), start=Fraction(0))

    @property
    def op_names(self) -> tuple[str, ...]:
        """Collectives in order, without the steps that are free."""
        return tuple(step.change.op.value for step in self.steps if step.change.op is not None)


def change_cost(change: Redistribution, size_bytes: int, mesh: DeviceMesh, axis: int) -> Cost:
    """Return the time of a change on one axis: that of its collective over the axis.

    Across nodes a collective reaches the network's benchmark share of the line rate.

    Args:
        change: From where to where.
        size_bytes: The tensor that one communicator of the axis holds: the full tensor divided
            by the ranks of the other axes that split it.
        mesh: The devices.
        axis: The axis on which the placement changes.

    Raises:
        ValueError: If slices are no whole bytes.
    """
    if change.op is None:
        return _FREE
    buffer_bytes = change.buffer_bytes(size_bytes, mesh.sizes[axis])
    if buffer_bytes.denominator != 1:
        raise ValueError(f"{size_bytes} bytes in {mesh.sizes[axis]} slices: not whole bytes")
    network = mesh.cluster.inter_node
    return collective_cost(
        CollectiveCall(
            op=change.op,
            size_bytes=int(buffer_bytes),
            span=mesh.span(axis),
            cluster=mesh.cluster,
            network_fraction=network.busbw_fraction,
            network_source=network.kind,
        )
    )


def boxing(tensor: TensorSize, source: Placements, target: Placements, mesh: DeviceMesh) -> Boxing:
    """Return the changes that move a tensor from *source* to *target*, in order.

    The sequence with the fewest changes; of several, the one of the least time, then of the
    fewest bytes.  Where two axes split the same dim, the later one holds slices of the earlier
    one's slices, so the earlier one may change only while the later one does not split that dim.

    Args:
        tensor: The full tensor.
        source: Its placement on each axis before.
        target: Its placement on each axis after.
        mesh: The devices.

    Raises:
        PlanError: If a dim of the tensor is not divisible as the placements want it.
    """
    shard_shape(tensor.shape, target, mesh.sizes)
    return boxings_from(tensor, source, mesh)[target]


def boxings_from(
    tensor: TensorSize, source: Placements, mesh: DeviceMesh
) -> dict[Placements, Boxing]:
    """Return how to move a tensor from *source* to every placement it can have on the mesh.

    The shortest ways from one placement, after Dijkstra, with `boxing`'s order of preference.

    Raises:
        PlanError: If the tensor cannot lie as *source* says.
    """
    shard_shape(tensor.shape, source, mesh.sizes)
    spots = _spots(tensor)
    # Changes, time, bytes and, to break ties, the way itself: axis and number of the new spot.
    start: tuple[int, int, Fraction, tuple[tuple[int, int], ...]] = (0, 0, Fraction(0), ())
    queue = [(start, source, Boxing(()))]
    found: dict[Placements, Boxing] = {}
    while queue:
        (count, time_ps, sent_bytes, way), here, route = heappop(queue)
        if here in found:
            continue
        found[here] = route
        for axis, number, there in _neighbours(tensor, here, mesh, spots):
            if there in found:
                continue
            step = _step(tensor, here, there, mesh, axis)
            rank = (
                count + 1,
                time_ps + step.cost.time_ps,
                sent_bytes + step.sent_bytes,
                (*way, (axis, number)),
            )
            heappush(queue, (rank, there, Boxing((*route.steps, step))))
    return found


def _spots(tensor: TensorSize) -> tuple[Placement, ...]:
    return (Replicate(), Partial(), *(Split(dim) for dim in range(len(tensor.shape))))


def _neighbours(
    tensor: TensorSize, here: Placements, mesh: DeviceMesh, spots: tuple[Placement, ...]
) -> list[tuple[int, int, Placements]]:
    """Return what one change leads to: axis, number of the new spot, and all placements then."""
    neighbours = []
    for axis, now in enumerate(here):
        inner = here[axis + 1 :]
        for number, new in enumerate(spots):
            nests_deeper = any(isinstance(each, Split) and each in inner for each in (now, new))
            if new == now or nests_deeper:
                continue
            there = (*here[:axis], new, *inner)
            if _divides(tensor, there, mesh):
                neighbours.append((axis, number, there))
    return neighbours


def _divides(tensor: TensorSize, placements: Placements, mesh: DeviceMesh) -> bool:
    shape = list(tensor.shape)
    for placement, num_ranks in zip(placements, mesh.sizes, strict=True):
        if isinstance(placement, Split):
            if shape[placement.dim] % num_ranks:
                return False
            shape[placement.dim] //= num_ranks
    return True


def _step(
    tensor: TensorSize, here: Placements, there: Placements, mesh: DeviceMesh, axis: int
) -> BoxingStep:
    change = redistribute(here[axis], there[axis])
    assert change is not None, "a neighbour differs on its axis"
    others = (size for each, size in enumerate(mesh.sizes) if each != axis)
    elsewhere = (placement for each, placement in enumerate(here) if each != axis)
    num_slices = prod(
        size
        for size, placement in zip(others, elsewhere, strict=True)
        if isinstance(placement, Split)
    )
    size_bytes = tensor.size_bytes // num_slices
    return BoxingStep(
        axis,
        change,
        change.sent_bytes(size_bytes, mesh.sizes[axis]),
        change_cost(change, size_bytes, mesh, axis),
    )
