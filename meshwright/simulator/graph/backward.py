"""Backward pass of a block, in autograd's order of running nodes and freeing tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.graph.block import Block, Discarded
from meshwright.simulator.graph.lowering import WeightGradients
from meshwright.simulator.graph.operators import (
    FP8_BYTES,
    Gradient,
    Kind,
    Operator,
    Product,
    Transfer,
    Work,
    redistribute_work,
)
from meshwright.simulator.graph.order import Node, Region, replaced_in_backward
from meshwright.simulator.graph.tape import Phase, Step, Tape
from meshwright.simulator.graph.tensors import Placement, Tensor, redistribute_collectives
from meshwright.simulator.layout import MeshAxis


class PendingGradient(NamedTuple):
    """A gradient that waits for its node: storage *token*, placement, and whether it is a slice."""

    token: Tensor
    at: Placement
    is_slice: bool = False


@dataclass(slots=True)
class Backward:
    """Backward pass of a tape's block.

    Args:
        tape: Tape after its forward pass.
        weight_gradients: Fused into the GEMM, accumulated, or kept.
        arrivals: Numbers of events by which a weight's gradient is ready and its inputs freed.
        places: Placement of each weight's gradient, before any all-reduce.
        arriving: Gradient of the block's output.
        summed_into_output_gradient: Number of events before anything is added to it in place.
    """

    tape: Tape
    weight_gradients: WeightGradients
    arrivals: list[int] = field(default_factory=list)
    places: dict[Tensor, Placement] = field(default_factory=dict)
    arriving: Tensor = field(init=False)
    summed_into_output_gradient: int | None = None
    _pending: dict[Tensor, PendingGradient] = field(default_factory=dict)
    _summed: list[Tensor] = field(default_factory=list)
    _sums: list[Tensor] = field(default_factory=list)
    _referenced: set[Tensor] = field(default_factory=set)
    _new_sums: list[Tensor] = field(default_factory=list)
    _recomputed: dict[Region, list[Tensor]] = field(default_factory=dict)
    _uses: "_Uses" = field(init=False)
    _redistributed: frozenset[Tensor] = field(init=False)
    _adds_to_output_gradient: bool = False

    def __post_init__(self) -> None:
        places = (op for op in self.tape.block.operators if op.kind is Kind.PLACE)
        self._redistributed = frozenset(op.outputs[0] for op in places)
        self._uses = _Uses(self.tape)

    def run(self, arriving: Tensor | None = None) -> None:
        """Run the backward of all nodes, last first; *arriving* is the gradient of the output."""
        output = self.tape.block.operators[-1].outputs[0]
        token = output.like(f"{output.name} gradient") if arriving is None else arriving
        self.arriving = token
        self.tape.storages.hold(token)
        self._store(output, PendingGradient(token, output.at))
        for node in reversed(self.tape.order.nodes):
            self._run_node(node)

    def _run_node(self, node: Node) -> None:
        tape, storages = self.tape, self.tape.storages
        discarded_here = [each for op in node for each in tape.discarded(op)]
        self._recomputed |= _recompute_discarded(tape, discarded_here)
        # A checkpoint recomputes its part when backward reaches the part's last node.
        region = _recompute_region(tape, node, self._pending, self._referenced)
        if discarded := self._recomputed.pop(region, []):
            for of, each in self._pending.items():
                if of.storage in discarded:
                    self._referenced.add(_keep_output_gradient(tape, region, each.token))
        recomputed = replaced_in_backward(node)
        tape.begin(node[0], Phase.BACKWARD)
        for op in recomputed:
            tape.run(op, Phase.BACKWARD)
        scratch = [each for op in node for each in op.backward_scratch]
        storages.hold(*scratch)
        done: list[Tensor] = []
        weights: list[tuple[Gradient, Operator]] = []
        for op in reversed(node):
            arrived = [self._pending.pop(out) for out in op.outputs if out in self._pending]
            done += [each.token for each in arrived]
            if arrived:
                weights += self._inputs(op, arrived[0])
        # Weight gradients last: autograd reaches AccumulateGrad after the node that made them.
        late = [token for each, op in weights for token in self._weight(op, each)]
        storages.drop((*tape.saved.pop(node[0].node, []), *done, *scratch))
        self._accumulate([op.outputs[0] for op in recomputed])
        if any(len(each.of.dims) > 1 for each, _ in weights):
            self.arrivals.append(len(storages.events))
        storages.drop(late)
        if region and tape.order.repeated[region][0] is node:
            storages.drop(tape.order.inputs[region])

    def _accumulate(self, done: Sequence[Tensor]) -> None:
        """Accumulate gradients of tensors with several uses; free the summands and *done*."""
        storages = self.tape.storages
        storages.hold(*self._new_sums)
        storages.touch(*self._sums)
        storages.drop((*done, *self._summed))
        if self._adds_to_output_gradient and self.summed_into_output_gradient is None:
            self.summed_into_output_gradient = len(storages.events)
        for each in (self._summed, self._sums, self._new_sums):
            each.clear()

    def _inputs(self, op: Operator, arrived: PendingGradient) -> list[tuple[Gradient, Operator]]:
        """Make the gradients of an operator's inputs; return those of its weights, still to do."""
        left = []
        for gradient in op.gradients:
            if gradient.of.is_weight:
                left.append((gradient, op))
            else:
                self._input(op, gradient, arrived)
        return left

    def _input(self, op: Operator, gradient: Gradient, arrived: PendingGradient) -> None:
        of, at = gradient.of, arrived.at if gradient.at is None else gradient.at
        work, passes_through = gradient.work, gradient.passes_through
        if op.kind is Kind.PLACE:
            collectives = redistribute_collectives(arrived.at, at)
            work, passes_through = _redistribute_gradient(self.tape.block, op, of, collectives)
        elif gradient.at is None and of.at != op.outputs[0].at:
            at = of.at
        self.tape.steps += [Step(Phase.BACKWARD, op, each) for each in work]
        token = arrived.token if gradient.overwrites is None else gradient.overwrites.storage
        if passes_through or gradient.overwrites is not None:
            self.tape.storages.hold(token)
        else:
            width = FP8_BYTES if _is_gathered_in_fp8(op, work) else None
            token = _token(self.tape, of, width)
            self.tape.copy_tokens(arrived.token, token, work)
            self._summed += _unconverted(self.tape, op, gradient)
        self._store(of, PendingGradient(token, at, gradient.is_slice))

    def _store(self, of: Tensor, arrived: PendingGradient) -> None:
        """Store a gradient; a second one is accumulated in place once its node is done.

        Out of place are sums of DTensors, and into a slice or what something else refers to
        (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp).
        """
        if of in self._pending:
            self._summed.append(arrived.token)
            first = self._pending[of]
            is_in_place = not (first.is_slice or first.token in self._referenced)
            self._adds_to_output_gradient |= first.token is self.arriving and is_in_place
            if not is_in_place:
                self._summed.append(first.token)
                self._new_sums.append(
                    of.like(f"sum of {of.name} gradients", width=first.token.width)
                )
                self._pending[of] = PendingGradient(self._new_sums[-1], first.at)
            elif of in self._redistributed and not self.tape.block.lowering.fuses_redistribute:
                # DTensor adds out of place: for a moment the sum is a third tensor.
                self._sums.append(arrived.token.like("sum of gradients"))
        else:
            self._pending[of] = arrived

    def _weight(self, op: Operator, gradient: Gradient) -> list[Tensor]:
        """Make a weight's gradient; return the tensors freed once it is accumulated."""
        of, policy = gradient.of, self.weight_gradients
        self.tape.steps += [Step(Phase.BACKWARD, op, each) for each in gradient.work]
        self.places[of] = gradient.at or {}
        # The GEMM adds to main_grad itself (gradient_accumulation_fusion): no tensor of its own.
        if policy is WeightGradients.FUSED and _is_gemm(gradient):
            return []
        token = _token(self.tape, of if gradient.makes is None else gradient.makes)
        return self._uses.add(op, of, token, is_kept=policy is WeightGradients.KEPT)


class _Uses:
    """Uses of weights: autograd sums the gradients of all uses before AccumulateGrad.

    The first gradient waits, the others are added to it in place.  Uses in a recomputed part are
    summed apart, since a reentrant checkpoint runs autograd by itself.
    """

    def __init__(self, tape: Tape) -> None:
        self._region = tape.repetition.region
        operators = tape.block.operators
        uses = ((self._region(op), each.of) for op in operators for each in op.gradients)
        self._left = Counter(use for use in uses if use[1].is_weight)
        self._first: dict[tuple[Region, Tensor], Tensor] = {}

    def add(self, op: Operator, of: Tensor, token: Tensor, *, is_kept: bool) -> list[Tensor]:
        """Add a use's gradient; return the freed tensors: after the last use also the sum."""
        use = self._region(op), of
        self._left[use] -= 1
        first = self._first.setdefault(use, token)
        gone = [] if first is token else [token]
        return gone if self._left[use] or is_kept else [*gone, first]


def _recompute_region(
    tape: Tape, node: Node, arrived: Mapping[Tensor, PendingGradient], referenced: set[Tensor]
) -> Region:
    """Recompute the checkpointed part of *node*, if not done yet; return the part.

    The checkpoint then refers to the gradient of the part's output.
    """
    region = tape.repetition.region(node[0])
    holds = bool(region) and region[-1].partition(":")[0] in tape.repetition.held
    if region and node[0].node not in tape.saved and (holds or any(op.reads for op in node)):
        if holds:
            output = tape.order.repeated[region][-1][-1].outputs[0]
            referenced.add(_keep_output_gradient(tape, region, arrived[output].token))
        _recompute(tape, region, holds_output=holds)
    return region


def _token(tape: Tape, of: Tensor, width: int | None = None) -> Tensor:
    """Allocate a gradient of a tensor and return it."""
    # The gradient of an operand in fp8 is that of what it was cast from.
    scaled = tape.block.lowering.scaled if width else 0
    width = width or max(of.width, tape.block.width)
    token = of.like(f"{of.name} gradient", width=width, scaled=scaled)
    tape.storages.hold(token)
    return token


def _redistribute_gradient(
    block: Block, op: Operator, of: Tensor, collectives: list[tuple[CollectiveOp, MeshAxis]]
) -> tuple[tuple[Work, ...], bool]:
    """Return the collectives that redistribute a gradient, and whether its storage stays.

    A block-scaled (MXFP8) row-wise copy, which dgrad reads, cannot be transposed into the
    column-wise copy that wgrad reads: both are gathered
    (``_all_gather_mxfp8`` of Transformer Engine's pytorch/distributed.py, 2.0 and later).
    """
    width, scaled = (block.width, block.lowering.scaled) if op.eight_bits else (None, 0)
    copies = 2 if scaled else 1
    work = redistribute_work(
        collectives, op.outputs[0], of, cast_from=width, scaled=scaled, copies=copies
    )
    is_sum = {each for each, _ in collectives} == {CollectiveOp.ALL_REDUCE}
    return work, not collectives or (block.lowering.fuses_redistribute and is_sum)


def _unconverted(tape: Tape, op: Operator, gradient: Gradient) -> list[Tensor]:
    """Allocate a gradient in its original dtype, until autograd converts it behind its node.

    By then the node's recomputed tensors are freed, as checkpoint hands each out once (`unpack`
    of torch/utils/checkpoint.py, PyTorch 2.13): at most the wider gradient is there.
    """
    if gradient.makes is None:
        return []
    recomputed = bool(tape.repetition.region(op))
    width = gradient.makes.width - recomputed * gradient.of.width
    wider = gradient.makes.like("unconverted gradient", width=width)
    tape.storages.hold(wider)
    return [wider]


def _is_gathered_in_fp8(op: Operator, work: tuple[Work, ...]) -> bool:
    gathers = any(
        isinstance(each, Transfer) and each.op is CollectiveOp.ALL_GATHER for each in work
    )
    return op.eight_bits and op.kind is Kind.PLACE and gathers


def _is_gemm(gradient: Gradient) -> bool:
    return all(isinstance(each, Product) for each in gradient.work)


def _keep_output_gradient(tape: Tape, region: Region, token: Tensor) -> Tensor:
    """Keep the gradient of *region*'s output until the whole region's backward is done.

    It is an argument of the reentrant checkpoint's backward, which runs autograd inside
    (CheckpointFunction of megatron/core/tensor_parallel/random.py, core 0.16).
    """
    tape.storages.hold(token)
    tape.order.inputs[region].append(token)
    return token


def _recompute_discarded(tape: Tape, discarded: list[Discarded]) -> dict[Region, list[Tensor]]:
    """Recompute outputs that forward discarded, and copy them into the discarded storages.

    A part runs once for all its outputs, which are returned by part.  The recomputed tensors stay
    until the part's backward is done (CheckpointWithoutOutput of
    megatron/core/tensor_parallel/random.py, core 0.16).
    """
    parts: dict[Region, list[tuple[Tensor, Operator]]] = {}
    for each in discarded:
        made = next(op for op in tape.block.operators if each.output in op.outputs)
        parts.setdefault(tape.repetition.region(made), []).append((each.output, made))
    for region, discarded_outputs in parts.items():
        recomputed = [output.like(f"{output.name} again") for output, _ in discarded_outputs]
        tape.storages.hold(*recomputed)
        _recompute(tape, region, holds_output=False)
        tape.storages.refill([output for output, _ in discarded_outputs])
        for output, made in discarded_outputs:
            copied = tape.block.traffic(output, output)
            tape.steps.append(Step(Phase.RECOMPUTE, made, copied))
        tape.order.inputs[region].extend(recomputed)
    return {region: [output for output, _ in outputs] for region, outputs in parts.items()}


def _recompute(tape: Tape, region: Region, *, holds_output: bool) -> None:
    """Recompute *region* on *tape*; unread outputs it keeps are freed with its inputs."""
    nodes = tape.order.repeated[region]
    end = _last_recomputed_node(tape, nodes)
    references: dict[Tensor, None] = {}
    reached: set[Operator] = set()
    for index, node in enumerate(nodes[: end + 1]):
        # torch's checkpoint raises once the last saved tensor is recomputed.
        stops = tape.repetition.stops_early and index == end
        for op in node:
            if not (stops and _stops_before(op)):
                reached.add(op)
                _recompute_operator(tape, op)
                references |= dict.fromkeys(out for out in op.outputs if out.base is None)
        tape.save(node)
        for op in node:
            gone = [each for each in tape.order.dies.get(op, ()) if each in references]
            tape.storages.drop(gone)
            for each in gone:
                del references[each]
    output = nodes[-1][-1].outputs[0].storage
    if holds_output and output in references:
        del references[output]
        tape.order.inputs[region].append(output)
    tape.storages.drop(references)
    for node in nodes[end + 1 :]:
        # Nodes behind an early stop are not recomputed, and save nothing.
        tape.saved[node[0].node] = []
    unread = [op for node in nodes for op in node if op in tape.repetition.kept - reached]
    tape.order.inputs[region].extend(out for op in unread for out in op.outputs)


def _last_recomputed_node(tape: Tape, nodes: list[Node]) -> int:
    """Return the index of the last node that is recomputed (early stop of torch checkpoint)."""
    if not tape.repetition.stops_early:
        return len(nodes) - 1
    return max(index for index, node in enumerate(nodes) if any(op.reads for op in node))


def _stops_before(op: Operator) -> bool:
    """Return True if *op* has saved its backward's inputs before it would run."""
    return op.saves_first and not any(out in op.reads for out in op.outputs)


def _recompute_operator(tape: Tape, op: Operator) -> None:
    """Recompute *op*, unless its output was kept (selective checkpointing per operator)."""
    if op in tape.repetition.kept:
        tape.copy_tokens(op.inputs[0], op.outputs[0], op.work)
    else:
        tape.run(op, Phase.RECOMPUTE)
