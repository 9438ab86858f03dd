"""Boxing: the cost of redistributing a tensor from one placement to another on a cluster.

The name is OneFlow's (arXiv:2110.15032); DTensor calls it redistribute.  On one mesh axis it is one
collective; on a mesh of several axes a sequence of collectives, each on one axis.
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
    """A mesh of devices; ranks vary fastest along the last axis.

    Args:
        sizes: Ranks of each axis, outermost first.
        cluster: Nodes are filled in rank order.

    Raises:
        PlanError: If there is no axis, one is empty, or the cluster has fewer devices.
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
        """Return the worst-case span of *axis*'s communicators over the nodes.

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
    """Global shape of a tensor, and bytes of an element."""

    shape: tuple[int, ...]
    element_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * self.element_bytes


class BoxingStep(NamedTuple):
    """A redistribution on one axis, with ``sent_bytes`` of each rank and the collective's cost."""

    axis: int
    change: Redistribution
    sent_bytes: Fraction
    cost: Cost


class Boxing(NamedTuple):
    """A redistribution as steps in order; empty if nothing changes."""

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
        """Names of the collectives in order, without free steps."""
        return tuple(step.change.op.value for step in self.steps if step.change.op is not None)


def redistribute_cost(change: Redistribution, size_bytes: int, mesh: DeviceMesh, axis: int) -> Cost:
    """Return the cost of a redistribution on one axis: that of its collective.

    Across nodes a collective reaches the fraction of the line rate that nccl-tests measures.

    Args:
        change: The redistribution.
        size_bytes: Bytes of the tensor on one communicator of the axis: the full tensor divided
            by the ranks of the other axes that split it.
        mesh: Device mesh.
        axis: Axis of the redistribution.

    Raises:
        ValueError: If slices are not whole bytes.
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
    """Return the redistributions that move a tensor from *source* to *target*, in order.

    It is the sequence of the fewest steps; of several, of the least time, then of the fewest bytes.
    Where two axes split the same dim, the later one holds slices of the earlier one's slices, so
    the earlier one may change only while the later one does not split that dim.

    Args:
        tensor: The full tensor.
        source: Placement on each axis before.
        target: Placement on each axis after.
        mesh: Device mesh.

    Raises:
        PlanError: If a dim is not divisible by the ranks that split it.
    """
    shard_shape(tensor.shape, target, mesh.sizes)
    return boxings_from(tensor, source, mesh)[target]


def boxings_from(
    tensor: TensorSize, source: Placements, mesh: DeviceMesh
) -> dict[Placements, Boxing]:
    """Return the best redistribution from *source* to every placement on the mesh.

    Shortest paths by Dijkstra's algorithm, with `boxing`'s order of preference.

    Raises:
        PlanError: If a dim is not divisible by the ranks that split it in *source*.
    """
    shard_shape(tensor.shape, source, mesh.sizes)
    candidates = _axis_placements(tensor)
    # Steps, time, bytes and, to break ties, the path itself: axis and index of the new placement.
    start: tuple[int, int, Fraction, tuple[tuple[int, int], ...]] = (0, 0, Fraction(0), ())
    queue = [(start, source, Boxing(()))]
    boxings: dict[Placements, Boxing] = {}
    while queue:
        (count, time_ps, sent_bytes, path), current, steps_so_far = heappop(queue)
        # A shorter path to it was popped before.
        if current in boxings:
            continue
        boxings[current] = steps_so_far
        for axis, number, following in _neighbours(tensor, current, mesh, candidates):
            if following in boxings:
                continue
            step = _step(tensor, current, following, mesh, axis)
            rank = (
                count + 1,
                time_ps + step.cost.time_ps,
                sent_bytes + step.sent_bytes,
                (*path, (axis, number)),
            )
            heappush(queue, (rank, following, Boxing((*steps_so_far.steps, step))))
    return boxings


def _axis_placements(tensor: TensorSize) -> tuple[Placement, ...]:
    return (Replicate(), Partial(), *(Split(dim) for dim in range(len(tensor.shape))))


def _neighbours(
    tensor: TensorSize, current: Placements, mesh: DeviceMesh, candidates: tuple[Placement, ...]
) -> list[tuple[int, int, Placements]]:
    """Return the results of one step: its axis, index of the new placement, and all placements."""
    neighbours = []
    for axis, now in enumerate(current):
        inner = current[axis + 1 :]
        for number, new in enumerate(candidates):
            # A dim split by a later axis, too, is nested: the later axis holds slices of these
            # slices.
            nests_deeper = any(isinstance(each, Split) and each in inner for each in (now, new))
            if new == now or nests_deeper:
                continue
            following = (*current[:axis], new, *inner)
            if _divides(tensor, following, mesh):
                neighbours.append((axis, number, following))
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
    tensor: TensorSize, current: Placements, following: Placements, mesh: DeviceMesh, axis: int
) -> BoxingStep:
    change = redistribute(current[axis], following[axis])
    assert change is not None, "a neighbour differs on its axis"
    others = (size for each, size in enumerate(mesh.sizes) if each != axis)
    elsewhere = (placement for each, placement in enumerate(current) if each != axis)
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
        redistribute_cost(change, size_bytes, mesh, axis),
    )
