"""The operators of a block as they are priced: merged products, traffic, collectives, launches."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from meshwright.hwprofiles import CollectiveOp, Kernels, Recompute
from meshwright.simulator.blocks.dims import Columns
from meshwright.simulator.blocks.fp8_casts import backward_casts, expert_casts, forward_casts
from meshwright.simulator.blocks.operators import (
    KERNELS,
    BlockOperators,
    Collective,
    ExpertOperators,
    FlashAttention,
    Gemm,
    HostPasses,
    ImplicitGemm,
    KernelLaunches,
    MemoryBound,
    Operator,
    RingMessages,
    end_launches,
)
from meshwright.simulator.blocks.parts import chunk_tokens
from meshwright.simulator.blocks.shape import BlockShape, moves_in_pieces
from meshwright.simulator.graph import (
    PARTIAL,
    Backward,
    Convolution,
    Exchange,
    FusedAttention,
    Kind,
    Phase,
    Product,
    Size,
    Step,
    Tensor,
    Traffic,
    Transfer,
)
from meshwright.simulator.graph import Operator as Written
from meshwright.simulator.layout import Axis, ExpertAxis
from meshwright.simulator.model import (
    EMBEDDING,
    EXPERT_LAYERS,
    LAYERS,
    PREDICTIONS,
    BlockKind,
    ModelSpec,
)

# Kernels of each further step of a ring, forward and backward.  Transformer Engine's: attention,
# corrections of its output and its numbers; sums of the gradients of queries, keys and values.
# PyTorch's: attention, two casts, five kernels for the output, three for its numbers and the copy
# that is sent; three sums, copies of two halves that are summed, and of three tensors.
ENGINE_STEP_KERNELS = 3, 4
STEP_KERNELS = 12, 9


class PricedBlock(NamedTuple):
    """A block that was walked, whose sizes may be columns of many shapes; so are its operators'.

    Args:
        shape: Its switches, and its sizes where they are no columns.
        sizes: Those that may be columns.
        kind: Which block.
        found: Its walk.
    """

    shape: BlockShape
    sizes: Columns
    kind: BlockKind
    found: Backward

    def operators(self) -> BlockOperators:
        """Return what one microbatch runs on one rank."""
        forward, again, backward = (self._phase(phase) for phase in Phase)
        if not isinstance(self.shape.trained, ModelSpec):
            return self._listed_operators(forward, again, (*backward, *self._accumulation()))
        linears = [each for each in forward if isinstance(each, Gemm) and each.in_eight_bits]
        extra = self._launches(forward, linears, backward=False)
        return BlockOperators(
            forward=(*forward, *extra),
            recompute=self._recompute(again, forward, extra) if again else (),
            backward=(
                *backward,
                *self._launches(backward, linears, backward=True),
                *self._accumulation(),
                *self._sums(),
            ),
        )

    def _listed_operators(
        self,
        forward: tuple[Operator, ...],
        again: tuple[Operator, ...],
        backward: tuple[Operator, ...],
    ) -> BlockOperators:
        """Return the operators with a launch for each kernel of the walk."""
        starts = {
            phase: KernelLaunches(f"{self.kind} {phase}", _num_kernels(self.found, phase))
            for phase in Phase
        }
        return BlockOperators(
            forward=(*forward, starts[Phase.FORWARD]),
            recompute=(*again, starts[Phase.RECOMPUTE]) if again else (),
            backward=(*backward, starts[Phase.BACKWARD]),
        )

    def _phase(self, phase: Phase) -> tuple[Operator, ...]:
        steps = [step for step in self.found.tape.steps if step.phase is phase]
        merges = phase is not Phase.RECOMPUTE or self.shape.recompute is not Recompute.SELECTIVE_OP
        products = _products(self, steps, merges=merges)
        calls = _collectives(self, steps, products)
        flash = [
            _flash(self.shape, self.kind, step.work, phase)
            for step in steps
            if isinstance(step.work, FusedAttention)
        ]
        traffic = _traffic("element-wise kernels", steps)
        rings = list(_ring_messages(steps, flash))
        turns = any(step.operator.gradients for step in steps if isinstance(step.work, Exchange))
        extra = [_ring_launches(self.shape, each) for each in flash if turns]
        return (*products.values(), *_convolutions(steps), *flash, *traffic, *calls, *rings, *extra)

    def _launches(
        self, operators: Sequence[Operator], linears: Sequence[Gemm], *, backward: bool
    ) -> tuple[Operator, ...]:
        """Return casts for fp8, starts of kernels and host time of a phase."""
        stack = self.shape.stack
        if self.kind in KERNELS:
            return (KernelLaunches(self.kind, KERNELS[self.kind][backward]),)
        layers, ends = _num_layers(self), end_launches(self.kind, self.shape.model)
        casts = backward_casts if backward else forward_casts
        if not layers:
            return (*ends, *(casts(self.shape, linears) if linears else ()))
        usual = stack.backward_kernels_per_layer if backward else stack.forward_kernels_per_layer
        num_products = sum(isinstance(each, Gemm) for each in operators)
        if stack.kernels is Kernels.EAGER:
            phase = Phase.BACKWARD if backward else Phase.FORWARD
            usual = max(usual, _num_kernels(self.found, phase) - num_products)
        return (
            *ends,
            *casts(self.shape, linears),
            KernelLaunches("layer", layers * usual + num_products),
            _host_passes(self, "layer", backward=backward),
        )

    def _recompute(
        self,
        again: tuple[Operator, ...],
        forward: tuple[Operator, ...],
        extra: tuple[Operator, ...],
    ) -> tuple[Operator, ...]:
        """Return what runs again; of a layer, with the traffic and the launches of all of it.

        Stacks are fitted so: what recomputation that stops early leaves out is not their traffic.
        """
        if self.shape.recompute is Recompute.SELECTIVE or self.kind not in LAYERS:
            return (*again, KernelLaunches("attention again", len(again)))
        work = (
            *(each for each in again if not isinstance(each, MemoryBound)),
            *(each for each in forward if isinstance(each, MemoryBound)),
        )
        if self.shape.recompute is Recompute.FULL:
            return (*work, *extra)
        products = [each for each in again if isinstance(each, Gemm)]
        kernels = self.shape.stack.forward_kernels_per_layer + len(products)
        return (
            *work,
            *forward_casts(self.shape, products),
            KernelLaunches("layer again", kernels),
            _host_passes(self, "layer again", backward=False),
        )

    def _accumulation(self) -> tuple[Operator, ...]:
        """Return the traffic of adding a microbatch's weight gradients to what is kept of them.

        Fused, it is part of the products; an embedding's is in the traffic of its table.
        """
        stack, listed = self.shape.stack, not isinstance(self.shape.trained, ModelSpec)
        if stack.fused_gradient_accumulation or (self.kind == EMBEDDING and not listed):
            return ()
        weights = list(self.found.places)
        if self.kind not in LAYERS and not listed:
            weights = [each for each in weights if len(each.dims) > 1]
        count = sum(_number(each.numel) for each in weights)
        return (MemoryBound("gradient accumulation", count * stack.accumulation_traffic_bytes),)

    def _sums(self) -> tuple[Operator, ...]:
        """Return the sums of gradients over tensor ranks that a stack makes in every microbatch.

        With sequence parallelism a rank's norms see its own tokens alone.
        """
        stack, width = self.shape.stack, self.shape.element_bytes
        if not stack.sums_norms_each_microbatch or self.shape.defers_sums:
            return ()
        return tuple(
            Collective(
                "tp norm reduce", CollectiveOp.ALL_REDUCE, _number(each.numel) * width, Axis.TP
            )
            for each in _partial_weights(self.found)
        )


def _num_layers(block: PricedBlock) -> int:
    """Return the layers of a block: one, those that predict further tokens, or none."""
    predicts = block.kind == PREDICTIONS
    return block.shape.model.prediction_layers if predicts else int(block.kind in LAYERS)


def _host_passes(block: PricedBlock, name: str, *, backward: bool) -> HostPasses:
    """Return the host time of a pass through a layer; backward has two products of each."""
    shape = block.shape
    kind = block.kind if block.kind in LAYERS else shape.model.layer_runs[-1].kind
    experts = shape.model.experts if kind in EXPERT_LAYERS else None
    layers = _num_layers(block)
    if experts is None:
        return HostPasses(name, (1 + backward) * layers)
    own, casts = _number(experts.num_experts // block.sizes.ep), expert_casts(shape, backward)
    return HostPasses(name, (1 + backward) * layers, own, own * layers * casts)


def expert_operators(block: PricedBlock) -> ExpertOperators:
    """Return what of a block runs while a microbatch's tokens are with the ranks of experts."""
    sent = [step for step in block.found.tape.steps if _is_exchange(step)]
    if not sent or block.kind not in LAYERS:
        return ExpertOperators()
    forward = [step for step in sent if step.phase is Phase.FORWARD]
    backward = [step for step in sent if step.phase is Phase.BACKWARD]
    steps = [step for step in block.found.tape.steps if step.phase is Phase.BACKWARD]
    products = _products(block, steps, merges=True)
    gradients = [each for (_, number), each in products.items() if number == 1]
    weights = tuple(each for each in gradients if each.rows)
    others = (each for each in gradients if not (each.rows or each.is_attention))
    inputs = (each for each in _between(block, *backward[:2]) if getattr(each, "rows", "") != "k")
    return ExpertOperators(_between(block, *forward[-2:]), tuple(inputs), weights, tuple(others))


def _between(block: PricedBlock, first: Step, last: Step) -> tuple[Operator, ...]:
    """Return products of experts, and traffic, from one step of a walk to another."""
    known = block.found.tape.steps
    start, end = (place for place, step in enumerate(known) if step is first or step is last)
    steps = known[start + 1 : end]
    products = _products(block, steps, merges=True).values()
    return (*(each for each in products if each.rows), *_traffic("rows of experts", steps))


def _traffic(name: str, steps: Sequence[Step]) -> list[MemoryBound]:
    """Return the traffic of *steps*, that of kernels which make elements one by one by itself."""
    moved = [step.work for step in steps if isinstance(step.work, Traffic)]
    whole = sum(_number(work.nbytes) for work in moved if work.strided is None)
    found = [MemoryBound(name, whole)] if not isinstance(whole, int) or whole > 0 else []
    apart = [(work.nbytes, work.strided) for work in moved if work.strided is not None]
    sums = [sum(map(_number, each)) for each in zip(*apart, strict=True)]
    return [*found, *([MemoryBound(f"{name} over slices", *sums)] if apart else [])]


def _is_exchange(step: Step) -> bool:
    """Return whether tokens go to the ranks of experts, or back, in a step."""
    work = step.work
    return isinstance(work, Transfer) and work[:2] == (CollectiveOp.ALL_TO_ALL, ExpertAxis.EP)


def _partial_weights(found: Backward) -> list[Tensor]:
    """Return the weights whose gradients are parts of a sum over the tensor-parallel ranks."""
    return [each for each, at in found.places.items() if at.get(Axis.TP) is PARTIAL]


def _number(size: Size) -> int:
    """Return a size, as a number of an operator also where it is a column: see `BlockTable`."""
    return cast("int", size)


def _products(
    block: PricedBlock, steps: Sequence[Step], *, merges: bool
) -> dict[tuple[int, int], Gemm]:
    """Return the products of a phase; those of one input are priced as one.

    The key is the number of the operators that are priced together, and which of an operator's
    products it is: in backward first that of the input's gradient, then that of the weight's.
    """
    found: dict[tuple[int, int], Gemm] = {}
    seen: Counter[Written] = Counter()
    for step in steps:
        # Products of no kind, which have hardly more than one row, are priced by their traffic.
        if not isinstance(step.work, Product) or step.operator.kind is Kind.OTHER:
            continue
        op, number = step.operator, seen[step.operator]
        seen[op] += 1
        m, n, k, batch = (_number(size) for size in step.work)
        apart = len(found) if not merges or op.kind is Kind.ATTENTION else 0
        key = (op.price if not apart else -apart, number)
        if key in found:
            found[key] = _side_by_side(found[key], (m, n, k), step.phase, number)
            continue
        is_attention = op.kind is Kind.ATTENTION
        made = Gemm(op.name, m, n, k, batch, is_attention, in_eight_bits=op.eight_bits)
        is_grouped = op.kind is Kind.GROUPED
        found[key] = _weighed(made, block, step.phase, number) if is_grouped else made
    return found


def _weighed(product: Gemm, block: PricedBlock, phase: Phase, number: int) -> Gemm:
    """Return a product of experts of *block* with the traffic of their weights.

    Backward first makes the input's gradient, then adds the weight's to what is kept of it.
    """
    m, n, k, batch = product.m, product.n, product.k, product.batch
    if phase is Phase.BACKWARD and number == 1:
        accumulated = _number(block.sizes.accumulated_bytes)
        return product._replace(rows="k", weight_bytes=accumulated * batch * m * n)
    width = 1 if product.in_eight_bits else block.shape.element_bytes
    return product._replace(rows="m", weight_bytes=width * batch * n * k)


def _side_by_side(one: Gemm, sizes: tuple[int, int, int], phase: Phase, number: int) -> Gemm:
    """Return two products of one input as one: their outputs add up."""
    m, n, k = sizes
    if phase is not Phase.BACKWARD:
        return one._replace(n=one.n + n)
    return one._replace(k=one.k + k) if number == 0 else one._replace(m=one.m + m)


def _flash(
    shape: BlockShape, kind: BlockKind, work: FusedAttention, phase: Phase
) -> FlashAttention:
    model = shape.model
    seen = model.seen_tokens(kind, shape.seq_len)
    seq_len = chunk_tokens(model, kind, shape.seq_len) or shape.seq_len
    return FlashAttention(
        "attention",
        batch_heads=_number(work.scores * work.ranks) // (seq_len * seen),
        seq_len=seq_len,
        head_dim=model.query_head_dim,
        backward=phase is Phase.BACKWARD,
        causal=model.causal,
        window=seen if seen < seq_len else 0,
        ranks=_number(work.ranks),
        value_dim=model.value_head_dim,
    )


def _ring_messages(
    steps: Sequence[Step], attention: Sequence[FlashAttention]
) -> Iterator[RingMessages]:
    """Yield the messages of a phase; a layer has one attention, beside whose steps they go."""
    for step in steps:
        work = step.work
        if isinstance(work, Exchange):
            sizes = (_number(each) for each in (work.nbytes, work.steps, work.beside))
            size_bytes, count, beside_bytes = sizes
            cover = None if work.waits else attention[0]
            place = work.axis, count, beside_bytes, cover
            yield RingMessages("keys and values", work.op, size_bytes, *place)


def _ring_launches(shape: BlockShape, attention: FlashAttention) -> KernelLaunches:
    """Return the kernels that a ring of one step would not have."""
    of_step = ENGINE_STEP_KERNELS if shape.stack.transformer_engine else STEP_KERNELS
    return KernelLaunches("steps of a ring", of_step[attention.backward] * (attention.ranks - 1))


def _convolutions(steps: Sequence[Step]) -> list[ImplicitGemm]:
    return [
        ImplicitGemm(step.operator.name, *(_number(size) for size in step.work))
        for step in steps
        if isinstance(step.work, Convolution)
    ]


def _num_kernels(found: Backward, phase: Phase) -> int:
    """Return the kernels of a phase: one for each piece of work, and for each copy both ways."""
    steps = (step for step in found.tape.steps if step.phase is phase)
    count = sum(not isinstance(step.work, Transfer | Exchange) for step in steps)
    copies = [op for op in found.tape.block.operators if not op.work and op.outputs[0].base is None]
    return count + (len(copies) if phase is not Phase.RECOMPUTE else 0)


def _collectives(
    block: PricedBlock, steps: Sequence[Step], products: dict[tuple[int, int], Gemm]
) -> Iterator[Collective]:
    """Yield the collectives of a phase, with the products that they may run beside.

    A column-parallel layer's input may be gathered again under the product of its gradient, the
    sum of that gradient under the product of the weight's (Megatron-LM's asynchronous layer). Piece
    by piece, each gather goes beside the product it is for, each scattered sum beside its own.
    """
    first = {each.price: each.kind for each in reversed(block.found.tape.block.operators)}
    for phase, op, work in steps:
        if not isinstance(work, Transfer):
            continue
        is_backward = phase is Phase.BACKWARD
        number = int(is_backward and work.op is not CollectiveOp.ALL_GATHER)
        cover = products.get((op.price, number)) if op.kind is Kind.PLACE else None
        again = is_backward and block.shape.stack.megatron_layers and first[op.price] is Kind.PLACE
        if cover and not (again or moves_in_pieces(block.shape, block.kind, op.region)):
            cover = None
        yield Collective(work.axis.value, work.op, _number(work.nbytes), work.axis, cover)
