"""Spans of communicators over the nodes of a cluster, cached."""

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Axis, ContextAxis, ExpertAxis, GroupSpan, Mesh, MeshAxis


class GroupSpans:
    """Worst-case spans of groups, with equally many ranks on each node.

    They do not depend on the degrees of slower axes.
    """

    def __init__(self, world_size: int, node_size: int) -> None:
        self._world_size = world_size
        self._node_size = node_size
        self._spans: dict[tuple[MeshAxis, int, int], GroupSpan] = {}

    def of_block(self, axis: MeshAxis, shape: BlockShape) -> GroupSpan:
        """Return the span of the group of a collective within a block."""
        if isinstance(axis, ExpertAxis):
            return self.of_experts(axis, shape.expert_tp, shape.ep)
        if isinstance(axis, ContextAxis):
            return self.in_hybrid_ring(axis, shape)
        return self.in_step(axis, shape.tp, shape.cp if axis is Axis.CP else 1)

    def in_hybrid_ring(self, axis: ContextAxis, shape: BlockShape) -> GroupSpan:
        """Return the span of a hybrid ring's all-to-all groups, or of the ring of these groups."""
        stride, degree = shape.tp, shape.cp_inner
        if axis is ContextAxis.OUTER:
            stride, degree = stride * degree, shape.cp // degree
        key = axis, stride, degree
        if key not in self._spans:
            mesh = Mesh(node_size=self._node_size, dp=self._world_size)
            self._spans[key] = mesh.span_of(stride, degree)
        return self._spans[key]

    def in_step(self, axis: Axis, tp: int, cp: int) -> GroupSpan:
        """Return the span of a tp or cp group."""
        key = axis, tp, cp
        if key not in self._spans:
            dp = self._world_size // (tp * cp)
            self._spans[key] = Mesh(tp=tp, cp=cp, dp=dp, node_size=self._node_size).span(axis)
        return self._spans[key]

    def of_experts(self, axis: MeshAxis, etp: int, ep: int) -> GroupSpan:
        """Return the span of an expert-parallel or expert-tp group."""
        key = axis, etp, ep
        if key not in self._spans:
            mesh = Mesh(node_size=self._node_size, experts=(etp, ep), dp=self._world_size)
            self._spans[key] = mesh.span(axis)
        return self._spans[key]
