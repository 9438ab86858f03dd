"""The device mesh: coordinates of ranks, process groups and their nodes, context parallelism.

Ranks are numbered in the order of `Axis`, and nodes are filled in rank order.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import gcd, prod
from operator import mul
from typing import NamedTuple

from meshwright.hwprofiles import ContextParallel, StackProfile
from meshwright.simulator.layout.axes import (
    Axis,
    ContextAxis,
    ExpertAxis,
    MeshAxis,
)
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.plan import ResolvedPlan
from meshwright.simulator.model import ModelSpec


class GroupSpan(NamedTuple):
    """Extent of a communicator over the nodes.

    ``ranks_per_node`` is the smallest number of members that any of its nodes holds: the
    node through which a ring has the fewest network ports.
    """

    num_ranks: int
    num_nodes: int
    ranks_per_node: int

    @property
    def crosses_nodes(self) -> bool:
        """Whether members are on several nodes."""
        return self.num_nodes > 1


def pair_span(*, crosses_nodes: bool) -> GroupSpan:
    """Return the span of two ranks."""
    return GroupSpan(2, 2, 1) if crosses_nodes else GroupSpan(2, 1, 2)


def strided_span(first: int, stride: int, size: int, node_size: int) -> GroupSpan:
    """Return the span of ranks ``first, first + stride, ...`` (*size* of them).

    >>> strided_span(0, 1, 8, 8)
    GroupSpan(num_ranks=8, num_nodes=1, ranks_per_node=8)
    >>> strided_span(6, 1, 3, 8)
    GroupSpan(num_ranks=3, num_nodes=2, ranks_per_node=1)
    """
    offset = first % node_size
    if stride >= node_size:  # each member is on a node of its own
        return GroupSpan(size, size, 1)
    end = offset + (size - 1) * stride
    num_nodes = end // node_size + 1
    if num_nodes == 1:
        return GroupSpan(size, 1, size)
    in_last = (end % node_size) // stride + 1
    # Members before each later node; their pattern repeats after `stride` nodes at the latest.
    before = [
        -(-(node * node_size - offset) // stride) for node in range(1, min(num_nodes, stride + 2))
    ]
    inner = [later - earlier for earlier, later in pairwise(before)]
    return GroupSpan(size, num_nodes, min(before[0], in_last, *inner))


def _worse(span: GroupSpan) -> tuple[int, int]:
    # Fewer members on a node leave a ring fewer network ports.
    return span.num_nodes, -span.ranks_per_node


class Mesh:
    """The device mesh of a plan on nodes of *node_size* devices.

    Args:
        node_size: Devices of a node.
        experts: Expert-tensor-parallel and expert-parallel degrees.
        cp_inner: Ranks of a Ulysses group in hybrid context parallelism.
        degrees: Ranks along each axis by its name; 1 where none is given.

    >>> Mesh(tp=8, dp=6, pp=64, node_size=8).world_size
    3072
    """

    __slots__ = ("_cp_inner", "_degrees", "_experts", "_strides", "node_size")

    def __init__(
        self,
        *,
        node_size: int,
        experts: tuple[int, int] = (1, 1),
        cp_inner: int = 1,
        **degrees: int,
    ) -> None:
        assert degrees.keys() <= set(Axis), "each degree is that of an axis"
        self.node_size = node_size
        self._degrees = {axis: degrees.get(axis, 1) for axis in Axis}
        self._strides = dict(
            zip(Axis, accumulate(self._degrees.values(), mul, initial=1), strict=False)
        )
        self._experts = experts
        self._cp_inner = cp_inner

    @classmethod
    def of(cls, plan: ResolvedPlan, node_size: int = 1) -> "Mesh":
        """Return the mesh of *plan*."""
        degrees = {axis.value: plan.degree(axis) for axis in Axis}
        experts, inner = (plan.expert_tp, plan.ep), plan.cp_inner or 1
        return cls(node_size=node_size, experts=experts, cp_inner=inner, **degrees)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self._degrees.values())

    def stride(self, axis: MeshAxis) -> int:
        """Return the distance in ranks of neighbours on *axis*: the product of faster degrees.

        >>> mesh = Mesh(tp=2, dp=16, experts=(1, 8), node_size=8)
        >>> [(mesh.stride(axis), mesh.degree(axis)) for axis in (ExpertAxis.EP, ExpertAxis.EDP)]
        [(1, 8), (8, 4)]
        >>> mesh = Mesh(tp=2, cp=8, cp_inner=4, node_size=8)
        >>> [(mesh.stride(axis), mesh.degree(axis)) for axis in ContextAxis]
        [(2, 4), (8, 2)]
        """
        if isinstance(axis, ExpertAxis):
            faster_experts = {ExpertAxis.EP: self._experts[:1], ExpertAxis.EDP: self._experts}
            return prod(faster_experts.get(axis, ()))
        if isinstance(axis, ContextAxis):
            faster = self._cp_inner if axis is ContextAxis.OUTER else 1
            return self.stride(Axis.CP) * faster
        return self._strides[axis]

    def degree(self, axis: MeshAxis) -> int:
        """Return the number of ranks along *axis*."""
        if isinstance(axis, ExpertAxis):
            etp, ep = self._experts
            # Experts are divided within a pipeline stage; the quotient is data-parallel.
            if axis is ExpertAxis.EDP:
                return self.stride(Axis.PP) // (etp * ep)
            return {ExpertAxis.ETP: etp, ExpertAxis.EP: ep, ExpertAxis.ALL: etp * ep}[axis]
        if isinstance(axis, ContextAxis):
            inner = self._cp_inner
            return inner if axis is ContextAxis.INNER else self._degrees[Axis.CP] // inner
        return self._degrees[axis]

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the position of *rank* on each axis.

        >>> [*Mesh(tp=8, dp=6, pp=64, node_size=8).coordinates(3071).values()]
        [7, 0, 5, 63]
        """
        return {axis: rank // self.stride(axis) % self.degree(axis) for axis in Axis}

    def rank(self, coordinates: Mapping[Axis, int]) -> int:
        """Return the rank at *coordinates*, which are 0 on axes that are left out."""
        return sum(self.stride(axis) * index for axis, index in coordinates.items())

    def group(self, rank: int, *axes: MeshAxis) -> tuple[int, ...]:
        """Return the ranks of the communicator that *rank* belongs to, over neighbouring *axes*.

        >>> Mesh(tp=2, cp=2, dp=2, node_size=8).group(3, Axis.CP, Axis.DP)
        (1, 3, 5, 7)
        """
        stride, degree = self.stride(axes[0]), prod(map(self.degree, axes))
        # Neighbouring axes are one axis of all their ranks, at the stride of the fastest.
        first = rank - (rank // stride % degree) * stride
        return tuple(range(first, first + stride * degree, stride))

    def span(self, *axes: MeshAxis) -> GroupSpan:
        """Return the worst span of any communicator over neighbouring *axes*.

        It has the most nodes, and then the fewest members on one.
        """
        return self.span_of(self.stride(axes[0]), prod(map(self.degree, axes)))

    def span_of(self, stride: int, degree: int) -> GroupSpan:
        """Return the worst span of groups of *degree* ranks that are *stride* apart."""
        spans = [
            strided_span(first, stride, degree, self.node_size)
            for first in self._first_ranks(stride, degree)
        ]
        return max(spans, key=_worse)

    def span_of_instances(self, num_instances: int) -> GroupSpan:
        """Return the worst span of one optimizer instance (HSDP) over all pipeline stages.

        >>> Mesh(dp=8, pp=2, node_size=2).span_of_instances(2)
        GroupSpan(num_ranks=8, num_nodes=4, ranks_per_node=2)
        """
        stage = self.stride(Axis.PP)
        size, spans = stage // num_instances, []
        for first in range(0, stage, size):
            starts = range(first, self.world_size, stage)
            ranks = (rank for start in starts for rank in range(start, start + size))
            nodes = Counter(rank // self.node_size for rank in ranks)
            spans.append(GroupSpan(size * len(starts), len(nodes), min(nodes.values())))
        return max(spans, key=_worse)

    def _first_ranks(self, stride: int, degree: int) -> list[int]:
        """Return first members of enough groups to cover every alignment with the nodes."""
        block = stride * degree
        # Groups a common multiple of block and node apart lie alike, so that one period covers all.
        period = self.node_size // gcd(block, self.node_size)
        num_blocks = min(self.world_size // block, period)
        inner = range(min(stride, self.node_size))
        return [number * block + first for number in range(num_blocks) for first in inner]

    def crosses_nodes(self, pp_rank: int, next_pp_rank: int) -> bool:
        """Whether any message between two pipeline ranks leaves its node."""
        size = self.stride(Axis.PP)
        distance = (next_pp_rank - pp_rank) * size
        first = pp_rank * size
        return any(
            rank // self.node_size != (rank + distance) // self.node_size
            for rank in range(first, first + min(size, self.node_size))
        ) or (size > self.node_size and abs(distance) > 0)


def context_parallel_type(plan: ResolvedPlan, stack: StackProfile) -> ContextParallel | None:
    """Return the type of context parallelism that runs, None without context parallelism.

    By default it is the stack's, or a ring where the stack has none.  A hybrid with inner groups
    of one rank is ring attention, with a single group it is Ulysses, as in Transformer Engine
    (attn_forward_func_with_cp).

    >>> from meshwright.hwprofiles import load_stack
    >>> plan = ResolvedPlan(cp=8, cp_type=ContextParallel.HYBRID_RING, cp_inner=8)
    >>> context_parallel_type(plan, load_stack("megatron-core"))
    <ContextParallel.ALL_TO_ALL: 'all-to-all'>
    """
    if plan.cp == 1:
        return None
    if plan.cp_inner == 1:
        return ContextParallel.RING
    if plan.cp_inner == plan.cp:
        return ContextParallel.ALL_TO_ALL
    return plan.cp_type or next(iter(stack.context_parallel), ContextParallel.RING)


def context_parallel_types(model: ModelSpec, stack: StackProfile) -> tuple[ContextParallel, ...]:
    """Return the types of context parallelism of *stack* that support the head widths of *model*.

    >>> from meshwright.hwprofiles import load_stack
    >>> from meshwright.simulator import load_model
    >>> model, stack = load_model("deepseek-v3"), load_stack("megatron-core@0.16")
    >>> [str(way) for way in context_parallel_types(model, stack)]
    ['ring', 'ring+all-to-all']
    """
    latent = model.latent
    is_wide = latent is not None and latent.query_head_dim != latent.value_head_dim
    return stack.latent_context_parallel if is_wide else stack.context_parallel


def default_inner(job: TrainingJob, stack: StackProfile, tp: int, cp: int, node_size: int) -> int:
    """Return the largest Ulysses group within a node that divides the heads; 1 where none does.

    It may be all *cp* ranks only where the stack supports plain Ulysses, too.

    >>> from meshwright.simulator import load_model
    >>> from meshwright.hwprofiles import load_stack
    >>> job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=1, seq_len=8192)
    >>> [default_inner(job, load_stack("megatron-core"), tp, 16, node_size=8) for tp in (1, 2, 8)]
    [8, 4, 1]
    """
    model = job.model
    if not isinstance(model, ModelSpec):
        return 1
    heads, most = model.num_kv_heads, cp
    if ContextParallel.ALL_TO_ALL not in context_parallel_types(model, stack):
        most = cp - 1
    fits = (each for each in range(1, most + 1) if cp % each == heads % (tp * each) == 0)
    return max((each for each in fits if tp * each <= node_size), default=1)
