"""Priced operators of a block: merged GEMMs, traffic, collectives, kernel launches."""

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

# Kernels of each further step of ring attention, forward and backward.  Transformer Engine's:
# attention, corrections of output and log-sum-exp; sums of the gradients of q, k and v.
# PyTorch's: attention, two casts, five kernels for the output, three for log-sum-exp and the copy
# that is sent; three sums, copies of two halves that are summed, and of three tensors.
ENGINE_STEP_KERNELS = 3, 4
STEP_KERNELS = 12, 9


class PricedBlock(NamedTuple):
    """A walked block, whose sizes, and its operators', may be columns of many shapes.

    Args:
        shape: Its fields, and its sizes where they are no columns.
        sizes: Sizes that may be columns.
        kind: Kind of block.
        walk: Its walk.
    """

    shape: BlockShape
    sizes: Columns
    kind: BlockKind
    walk: Backward

    def operators(self) -> BlockOperators:
        """Return the operators of one microbatch on one rank."""
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
        """Return the operators, with a launch for each kernel of the walk."""
        starts = {
            phase: KernelLaunches(f"{self.kind} {phase}", _num_kernels(self.walk, phase))
            for phase in Phase
        }
        return BlockOperators(
            forward=(*forward, starts[Phase.FORWARD]),
            recompute=(*again, starts[Phase.RECOMPUTE]) if again else (),
            backward=(*backward, starts[Phase.BACKWARD]),
        )

    def _phase(self, phase: Phase) -> tuple[Operator, ...]:
        steps = [step for step in self.walk.tape.steps if step.phase is phase]
        merges = phase is not Phase.RECOMPUTE or self.shape.recompute is not Recompute.SELECTIVE_OP
        products = _gemms(self, steps, merges=merges)
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
        """Return fp8 casts, kernel launches and host time of a phase."""
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
            usual = max(usual, _num_kernels(self.walk, phase) - num_products)
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
        """Return the recomputed operators; of a layer, with the traffic and launches of all of it.

        Stacks are fitted so: early stop of checkpoints does not reduce their traffic.
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
        """Return the traffic of accumulating a microbatch's weight gradients.

        Fused, it is part of the GEMMs; an embedding's is in the traffic of its weight.
        """
        stack, listed = self.shape.stack, not isinstance(self.shape.trained, ModelSpec)
        if stack.fused_gradient_accumulation or (self.kind == EMBEDDING and not listed):
            return ()
        weights = list(self.walk.places)
        if self.kind not in LAYERS and not listed:
            weights = [each for each in weights if len(each.dims) > 1]
        count = sum(_as_int(each.numel) for each in weights)
        return (MemoryBound("gradient accumulation", count * stack.accumulation_traffic_bytes),)

    def _sums(self) -> tuple[Operator, ...]:
        """Return the all-reduces of norm gradients over tp that a stack runs in every microbatch.

        With sequence parallelism a rank's norms see its own tokens alone.
        """
        stack, width = self.shape.stack, self.shape.element_bytes
        if not stack.sums_norms_each_microbatch or self.shape.defers_norm_all_reduce:
            return ()
        return tuple(
            Collective(
                "tp norm reduce", CollectiveOp.ALL_REDUCE, _as_int(each.numel) * width, Axis.TP
            )
            for each in _partial_weights(self.walk)
        )


def _num_layers(block: PricedBlock) -> int:
    """Return the number of transformer layers in a block: one, all MTP layers, or none."""
    predicts = block.kind == PREDICTIONS
    return block.shape.model.prediction_layers if predicts else int(block.kind in LAYERS)


def _host_passes(block: PricedBlock, name: str, *, backward: bool) -> HostPasses:
    """Return the host time of a pass through a layer; backward has two GEMMs for each."""
    shape = block.shape
    kind = block.kind if block.kind in LAYERS else shape.model.layer_runs[-1].kind
    experts = shape.model.experts if kind in EXPERT_LAYERS else None
    layers = _num_layers(block)
    if experts is None:
        return HostPasses(name, (1 + backward) * layers)
    num_local, casts = _as_int(experts.num_experts // block.sizes.ep), expert_casts(shape, backward)
    return HostPasses(name, (1 + backward) * layers, num_local, num_local * layers * casts)


def expert_operators(block: PricedBlock) -> ExpertOperators:
    """Return the operators of a block between dispatch and combine of experts."""
    sent = [step for step in block.walk.tape.steps if _is_exchange(step)]
    if not sent or block.kind not in LAYERS:
        return ExpertOperators()
    forward = [step for step in sent if step.phase is Phase.FORWARD]
    backward = [step for step in sent if step.phase is Phase.BACKWARD]
    steps = [step for step in block.walk.tape.steps if step.phase is Phase.BACKWARD]
    products = _gemms(block, steps, merges=True)
    gradients = [each for (_, number), each in products.items() if number == 1]
    weights = tuple(each for each in gradients if each.rows)
    others = (each for each in gradients if not (each.rows or each.is_attention))
    inputs = (each for each in _between(block, *backward[:2]) if getattr(each, "rows", "") != "k")
    return ExpertOperators(_between(block, *forward[-2:]), tuple(inputs), weights, tuple(others))


def _between(block: PricedBlock, first: Step, last: Step) -> tuple[Operator, ...]:
    """Return GEMMs of experts, and traffic, between two steps of a walk."""
    all_steps = block.walk.tape.steps
    start, end = (place for place, step in enumerate(all_steps) if step is first or step is last)
    steps = all_steps[start + 1 : end]
    products = _gemms(block, steps, merges=True).values()
    return (*(each for each in products if each.rows), *_traffic("rows of experts", steps))


def _traffic(name: str, steps: Sequence[Step]) -> list[MemoryBound]:
    """Return the traffic of *steps*, with that of strided kernels apart."""
    moved = [step.work for step in steps if isinstance(step.work, Traffic)]
    whole = sum(_as_int(work.nbytes) for work in moved if work.strided is None)
    operators = [MemoryBound(name, whole)] if not isinstance(whole, int) or whole > 0 else []
    apart = [(work.nbytes, work.strided) for work in moved if work.strided is not None]
    sums = [sum(map(_as_int, each)) for each in zip(*apart, strict=True)]
    return [*operators, *([MemoryBound(f"{name} over slices", *sums)] if apart else [])]


def _is_exchange(step: Step) -> bool:
    """Return True if a step is dispatch or combine of experts."""
    work = step.work
    return isinstance(work, Transfer) and work[:2] == (CollectiveOp.ALL_TO_ALL, ExpertAxis.EP)


def _partial_weights(backward: Backward) -> list[Tensor]:
    """Return the weights whose gradients are partial sums over tensor-parallel ranks."""
    return [each for each, at in backward.places.items() if at.get(Axis.TP) is PARTIAL]


def _as_int(size: Size) -> int:
    """Return a size typed as int, although it may be a column: see `BlockTable`."""
    return cast("int", size)


def _gemms(
    block: PricedBlock, steps: Sequence[Step], *, merges: bool
) -> dict[tuple[int, int], Gemm]:
    """Return the GEMMs of a phase; those of one input are priced as one.

    The key is the number of the operators that are priced together, and the index of an operator's
    GEMM: in backward 0 is dgrad, 1 wgrad.
    """
    gemms: dict[tuple[int, int], Gemm] = {}
    seen: Counter[Written] = Counter()
    for step in steps:
        # GEMMs of kind OTHER have hardly more than one row: they are priced by their traffic.
        if not isinstance(step.work, Product) or step.operator.kind is Kind.OTHER:
            continue
        op, number = step.operator, seen[step.operator]
        seen[op] += 1
        m, n, k, batch = (_as_int(size) for size in step.work)
        apart = len(gemms) if not merges or op.kind is Kind.ATTENTION else 0
        key = (op.price if not apart else -apart, number)
        if key in gemms:
            gemms[key] = _merged(gemms[key], (m, n, k), step.phase, number)
            continue
        is_attention = op.kind is Kind.ATTENTION
        made = Gemm(op.name, m, n, k, batch, is_attention, in_eight_bits=op.eight_bits)
        is_grouped = op.kind is Kind.GROUPED
        gemms[key] = _with_weight_traffic(made, block, step.phase, number) if is_grouped else made
    return gemms


def _with_weight_traffic(product: Gemm, block: PricedBlock, phase: Phase, number: int) -> Gemm:
    """Return a grouped GEMM of *block* with the traffic of the experts' weights.

    In backward 0 is dgrad, 1 wgrad, which accumulates into the kept gradient.
    """
    m, n, k, batch = product.m, product.n, product.k, product.batch
    if phase is Phase.BACKWARD and number == 1:
        accumulated = _as_int(block.sizes.accumulated_bytes)
        return product._replace(rows="k", weight_bytes=accumulated * batch * m * n)
    width = 1 if product.in_eight_bits else block.shape.element_bytes
    return product._replace(rows="m", weight_bytes=width * batch * n * k)


def _merged(one: Gemm, sizes: tuple[int, int, int], phase: Phase, number: int) -> Gemm:
    """Return two GEMMs of one input as one: n adds up, in dgrad k, in wgrad m."""
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
        batch_heads=_as_int(work.scores * work.ranks) // (seq_len * seen),
        seq_len=seq_len,
        head_dim=model.query_head_dim,
        backward=phase is Phase.BACKWARD,
        causal=model.causal,
        window=seen if seen < seq_len else 0,
        ranks=_as_int(work.ranks),
        value_dim=model.value_head_dim,
    )


def _ring_messages(
    steps: Sequence[Step], attention: Sequence[FlashAttention]
) -> Iterator[RingMessages]:
    """Yield the ring messages of a phase, overlapped with the steps of the layer's attention."""
    for step in steps:
        work = step.work
        if isinstance(work, Exchange):
            sizes = (_as_int(each) for each in (work.nbytes, work.steps, work.beside))
            size_bytes, count, beside_bytes = sizes
            cover = None if work.waits else attention[0]
            place = work.axis, count, beside_bytes, cover
            yield RingMessages("keys and values", work.op, size_bytes, *place)


def _ring_launches(shape: BlockShape, attention: FlashAttention) -> KernelLaunches:
    """Return the launches of a ring's steps beyond the first."""
    of_step = ENGINE_STEP_KERNELS if shape.stack.transformer_engine else STEP_KERNELS
    return KernelLaunches("steps of a ring", of_step[attention.backward] * (attention.ranks - 1))


def _convolutions(steps: Sequence[Step]) -> list[ImplicitGemm]:
    return [
        ImplicitGemm(step.operator.name, *(_as_int(size) for size in step.work))
        for step in steps
        if isinstance(step.work, Convolution)
    ]


def _num_kernels(walk: Backward, phase: Phase) -> int:
    """Return the number of kernels of a phase: one for each work item, and each copy both ways."""
    steps = (step for step in walk.tape.steps if step.phase is phase)
    count = sum(not isinstance(step.work, Transfer | Exchange) for step in steps)
    copies = [op for op in walk.tape.block.operators if not op.work and op.outputs[0].base is None]
    return count + (len(copies) if phase is not Phase.RECOMPUTE else 0)


def _collectives(
    block: PricedBlock, steps: Sequence[Step], products: dict[tuple[int, int], Gemm]
) -> Iterator[Collective]:
    """Yield the collectives of a phase, with the GEMMs that overlap them.

    In backward of a column-parallel layer the input's all-gather overlaps dgrad, the reduction of
    its gradient wgrad (Megatron-LM's LinearWithGradAccumulationAndAsyncCommunication). Chunked
    (tp-comm-overlap), each collective overlaps its own GEMM.
    """
    first = {each.price: each.kind for each in reversed(block.walk.tape.block.operators)}
    for phase, op, work in steps:
        if not isinstance(work, Transfer):
            continue
        is_backward = phase is Phase.BACKWARD
        number = int(is_backward and work.op is not CollectiveOp.ALL_GATHER)
        cover = products.get((op.price, number)) if op.kind is Kind.PLACE else None
        again = is_backward and block.shape.stack.megatron_layers and first[op.price] is Kind.PLACE
        if cover and not (again or moves_in_pieces(block.shape, block.kind, op.region)):
            cover = None
        yield Collective(work.axis.value, work.op, _as_int(work.nbytes), work.axis, cover)
