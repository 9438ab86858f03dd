"""How communicators lie over the nodes of a world, each kind found once."""

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Axis, ContextAxis, ExpertAxis, GroupSpan, Mesh, MeshAxis


class GroupSpans:
    """Worst spans of groups among ranks of which nodes hold equally many.

    How slower axes are cut is no matter to them.
    """

    def __init__(self, world_size: int, node_size: int) -> None:
        self._world_size = world_size
        self._node_size = node_size
        self._known: dict[tuple[MeshAxis, int, int], GroupSpan] = {}

    def of_block(self, axis: MeshAxis, shape: BlockShape) -> GroupSpan:
        """Return the span of a group that communicates within a block."""
        if isinstance(axis, ExpertAxis):
            return self.of_experts(axis, shape.expert_tp, shape.ep)
        if isinstance(axis, ContextAxis):
            return self.in_ring_of_swaps(axis, shape)
        return self.in_step(axis, shape.tp, shape.cp if axis is Axis.CP else 1)

    def in_ring_of_swaps(self, axis: ContextAxis, shape: BlockShape) -> GroupSpan:
        """Return the span of ranks that swap tokens for heads, or of a ring of such groups."""
        stride, degree = shape.tp, shape.cp_inner
        if axis is ContextAxis.OUTER:
            stride, degree = stride * degree, shape.cp // degree
        key = axis, stride, degree
        if key not in self._known:
            mesh = Mesh(node_size=self._node_size, dp=self._world_size)
            self._known[key] = mesh.span_of(stride, degree)
        return self._known[key]

    def in_step(self, axis: Axis, tp: int, cp: int) -> GroupSpan:
        """Return the span of a group of ranks that work on one microbatch."""
        key = axis, tp, cp
        if key not in self._known:
            dp = self._world_size // (tp * cp)
            self._known[key] = Mesh(tp=tp, cp=cp, dp=dp, node_size=self._node_size).span(axis)
        return self._known[key]

    def of_experts(self, axis: MeshAxis, etp: int, ep: int) -> GroupSpan:
        """Return the span of a group of ranks that share the experts of a layer."""
        key = axis, etp, ep
        if key not in self._known:
            mesh = Mesh(node_size=self._node_size, experts=(etp, ep), dp=self._world_size)
            self._known[key] = mesh.span(axis)
        return self._known[key]
