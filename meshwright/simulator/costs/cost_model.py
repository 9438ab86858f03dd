"""Cost model of a cluster and stack, read by bounds, engine and reports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from meshwright.hwprofiles import Cluster, CollectiveOp, Precision, Source, StackProfile
from meshwright.simulator.blocks import (
    BlockOperators,
    BlockShape,
    BlockTable,
    Collective,
    FlashAttention,
    Gemm,
    HostPasses,
    ImplicitGemm,
    KernelLaunches,
    MemoryBound,
    Operator,
    RingMessages,
)
from meshwright.simulator.costs.collectives import (
    CollectiveCall,
    MessageCost,
    collective_cost,
    dispatch_cost,
    p2p_cost,
)
from meshwright.simulator.costs.compute import (
    constant_cost,
    convolution_cost,
    flash_attention_cost,
    gemm_cost,
    memory_bound_cost,
)
from meshwright.simulator.costs.cost import Category, Cost, PhaseCost
from meshwright.simulator.costs.host import host_wait_s, issue_ps
from meshwright.simulator.costs.spans import GroupSpans
from meshwright.simulator.layout import Axis, ContextAxis, ExpertAxis, GroupSpan, MeshAxis
from meshwright.simulator.model import BlockKind, LayerGroup

Table = TypeVar("Table")
COMMUNICATION_OF: dict[MeshAxis, Category] = {
    Axis.TP: Category.TP_COMM,
    Axis.CP: Category.CP_COMM,
    **dict.fromkeys(ContextAxis, Category.CP_COMM),
    **dict.fromkeys(ExpertAxis, Category.EP_COMM),
}


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Forward and backward cost of blocks for one microbatch; recompute is in backward."""

    forward: PhaseCost
    backward: PhaseCost

    def __mul__(self, count: int) -> "BlockCost":
        """Return the cost of *count* such blocks."""
        return BlockCost(self.forward * count, self.backward * count)

    @classmethod
    def total(cls, layers: "list[BlockCost]") -> "BlockCost":
        """Return the sum over *layers*; host time is exposed layer by layer."""
        forward = sum((each.forward for each in layers), PhaseCost())
        return cls(forward, sum((each.backward for each in layers), PhaseCost()))


class CostModel:
    """Times of operators for one cluster, stack and world size.

    Results are cached per operator and block shape: many plans of a search share them.
    They are pure functions of the arguments.  Tables derived from them are `kept` here, too.
    """

    def __init__(self, cluster: Cluster, stack: StackProfile, world_size: int) -> None:
        self.cluster = cluster
        self.stack = stack
        self.world_size = world_size
        self.blocks = BlockTable()
        self.spans = GroupSpans(world_size, cluster.devices_per_node)
        self._products: dict[tuple[Gemm | ImplicitGemm, Precision], Cost] = {}
        self._blocks: dict[tuple[BlockShape, BlockKind], BlockCost] = {}
        self._collectives: dict[tuple[CollectiveOp, int, GroupSpan, MeshAxis], Cost] = {}
        self._kept: dict[object, object] = {}

    def kept(self, table: Callable[[], Table]) -> Table:
        """Return the one instance of a *table* class, made on first use."""
        if table not in self._kept:
            self._kept[table] = table()
        return cast("Table", self._kept[table])

    def block_cost(self, shape: BlockShape, kind: BlockKind) -> BlockCost:
        """Return the cost of one block of *kind* for one microbatch on one rank."""
        key = (shape, kind)
        if key not in self._blocks and isinstance(kind, LayerGroup):
            self._blocks[key] = BlockCost.total(
                [self.block_cost(shape, layer) for layer in kind.layers]
            )
        elif key not in self._blocks:
            self._blocks[key] = self._block_cost(shape, self.blocks.operators(shape, kind))
        return self._blocks[key]

    def _block_cost(self, shape: BlockShape, operators: BlockOperators) -> BlockCost:
        # GEMMs or collectives, in the breakdown all of it is recomputation.
        recompute = self.phase_cost(operators.recompute, shape)
        recompute_category = Category.RECOMPUTE
        recompute_cost = PhaseCost(
            recompute.time_ps,
            tuple(recompute.time_ps if each is recompute_category else 0 for each in Category),
            recompute.by_source_ps,
        )
        backward = self.phase_cost(operators.backward, shape)
        return BlockCost(self.phase_cost(operators.forward, shape), recompute_cost + backward)

    def phase_cost(self, operators: tuple[Operator, ...], shape: BlockShape) -> PhaseCost:
        """Return the cost of running *operators* one after the other.

        Host and device run asynchronously: the phase is host-bound where launching it takes longer.
        """
        cost = PhaseCost.total(self.operator_cost(item, shape) for item in operators)
        exposed_host_ps = max(0, issue_ps(operators, self.stack, self.cluster) - cost.time_ps)
        return cost + PhaseCost.total([(Category.HOST, Cost(exposed_host_ps, Source.FITTED))])

    def operator_cost(self, operator: Operator, shape: BlockShape) -> tuple[Category, Cost]:
        """Return the category and the cost of an operator."""
        stack, device = self.stack, self.cluster.device
        match operator:
            case Gemm() | ImplicitGemm():
                is_attention = isinstance(operator, Gemm) and operator.is_attention
                category = Category.ATTENTION if is_attention else Category.MATMUL
                return category, self._product_cost(operator, shape.precision)
            case FlashAttention():
                cost = flash_attention_cost(operator, device, shape.precision, stack.flash_kernel)
                return Category.ATTENTION, cost
            case MemoryBound():
                return Category.ELEMENTWISE, memory_bound_cost(operator, device)
            case KernelLaunches():
                cost = constant_cost(operator.num_kernels, stack.kernel_gap_s)
                return Category.KERNEL_LAUNCH, cost
            case HostPasses():
                return Category.HOST, constant_cost(1, host_wait_s(operator, stack))
            case Collective() | RingMessages():
                return COMMUNICATION_OF[operator.axis], self._exposed_cost(operator, shape)

    def _product_cost(self, product: Gemm | ImplicitGemm, precision: Precision) -> Cost:
        key = (product, precision)
        if key not in self._products:
            device = self.cluster.device
            self._products[key] = (
                gemm_cost(product, device, precision, self.stack.expert_launch_s)
                if isinstance(product, Gemm)
                else convolution_cost(product, device, precision)
            )
        return self._products[key]

    def _exposed_cost(self, operator: Collective | RingMessages, shape: BlockShape) -> Cost:
        """Return the exposed part of communication."""
        span = self.spans.of_block(operator.axis, shape)
        if isinstance(operator, RingMessages):
            return self._exposed_ring_cost(operator, span, shape)
        if operator.axis is ExpertAxis.EP and shape.dispatcher.sends_once:
            experts, dispatcher = shape.model.experts, shape.dispatcher
            assert experts is not None
            return dispatch_cost(operator.size_bytes, span, self.cluster, experts, dispatcher)
        cost = self.collective(operator.op, operator.size_bytes, span, operator.axis)
        if operator.overlapped_with is None or self.stack.tp_overlap_fraction == 0:
            return cost
        # Overlap is limited by the GEMM's time.
        gemm_ps = self._product_cost(operator.overlapped_with, shape.precision).time_ps
        overlapped_ps = int(self.stack.tp_overlap_fraction * min(cost.time_ps, gemm_ps))
        return Cost(cost.time_ps - overlapped_ps, cost.source)

    def _exposed_ring_cost(
        self, messages: RingMessages, span: GroupSpan, shape: BlockShape
    ) -> Cost:
        # A ring step ends when all ranks have computed and sent: the slowest link decides.
        size_bytes = messages.size_bytes + messages.beside_bytes
        if messages.op is CollectiveOp.ALL_GATHER:
            sent, latency_ps = self.collective(messages.op, size_bytes, span, messages.axis), 0
        else:
            sent, latency = self.message(size_bytes, crosses_nodes=span.crosses_nodes)
            # A step waits for the message's arrival, not only for the port.
            latency_ps = latency.time_ps
        cover = messages.overlapped_with
        attention_ps = (
            0 if cover is None else self.operator_cost(cover, shape)[1].time_ps // cover.ranks
        )
        exposed_ps = max(0, sent.time_ps + latency_ps - attention_ps)
        return Cost(messages.steps * exposed_ps, sent.source)

    def collective(
        self, op: CollectiveOp, size_bytes: int, span: GroupSpan, axis: MeshAxis
    ) -> Cost:
        """Return the time of a collective over *axis*, without overlap."""
        key = (op, size_bytes, span, axis)
        if key not in self._collectives:
            # Within a step data-parallel collectives reach a smaller, fitted fraction of the
            # network than nccl-tests; all others reach that of the benchmark.
            network = self.cluster.inter_node
            fraction, source = network.busbw_fraction, network.kind
            if axis in {Axis.DP, ExpertAxis.EDP}:
                fraction, source = self.stack.dp_bandwidth_fraction, Source.FITTED
            call = CollectiveCall(op, size_bytes, span, self.cluster, fraction, source)
            self._collectives[key] = collective_cost(call)
        return self._collectives[key]

    def message(self, size_bytes: int, *, crosses_nodes: bool) -> MessageCost:
        """Return the time of one pipeline message between two devices."""
        share = self.stack.p2p_bandwidth_fraction
        return p2p_cost(
            size_bytes, self.cluster, crosses_nodes=crosses_nodes, network_fraction=share
        )

    def memory_traffic(self, size_bytes: int) -> Cost:
        """Return the time of *size_bytes* of element-wise traffic."""
        return memory_bound_cost(MemoryBound("traffic", size_bytes), self.cluster.device)
