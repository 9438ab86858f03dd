"""The backward pass of a block, node by node, as PyTorch's autograd runs and frees."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.graph.block import Block, GivenUp
from meshwright.simulator.graph.lowering import WeightGradients
from meshwright.simulator.graph.operators import (
    FP8_BYTES,
    Gradient,
    Kind,
    Operator,
    Product,
    Transfer,
    Work,
    place_work,
)
from meshwright.simulator.graph.order import Node, Region, placed_again
from meshwright.simulator.graph.tape import Phase, Step, Tape
from meshwright.simulator.graph.tensors import Placement, Tensor, changes
from meshwright.simulator.layout import MeshAxis


class Arrived(NamedTuple):
    """The gradient of a tensor, which the storage *token* stands for, and where it lies.

    It may be a part of that storage.
    """

    token: Tensor
    at: Placement
    is_part: bool = False


@dataclass(slots=True)
class Backward:
    """The backward pass of what a tape has run forward.

    Args:
        tape: After its forward pass.
        weight_gradients: What becomes of the gradients of weights.
        arrivals: Numbers of events after which a weight's gradient is there, and what it was made
            of is gone.
        places: Where the gradient of each weight lies, as a pass makes it.
        arriving: The gradient of what the block returns.
        summed_into_arriving: Number of events before which nothing is added to it in place.
    """

    tape: Tape
    weight_gradients: WeightGradients
    arrivals: list[int] = field(default_factory=list)
    places: dict[Tensor, Placement] = field(default_factory=dict)
    arriving: Tensor = field(init=False)
    summed_into_arriving: int | None = None
    _arrived: dict[Tensor, Arrived] = field(default_factory=dict)
    _summed: list[Tensor] = field(default_factory=list)
    _sums: list[Tensor] = field(default_factory=list)
    _named: set[Tensor] = field(default_factory=set)
    _apart: list[Tensor] = field(default_factory=list)
    _remade: dict[Region, list[Tensor]] = field(default_factory=dict)
    _uses: "_Uses" = field(init=False)
    _redistributed: frozenset[Tensor] = field(init=False)
    _adds_to_arriving: bool = False

    def __post_init__(self) -> None:
        places = (op for op in self.tape.block.operators if op.kind is Kind.PLACE)
        self._redistributed = frozenset(op.outputs[0] for op in places)
        self._uses = _Uses(self.tape)

    def run(self, arriving: Tensor | None = None) -> None:
        """Run the backward of all nodes, the last one first.

        Args:
            arriving: The gradient of what the block returns; by default one of that size.
        """
        output = self.tape.block.operators[-1].outputs[0]
        token = output.like(f"{output.name} gradient") if arriving is None else arriving
        self.arriving = token
        self.tape.storages.hold(token)
        self._arrive(output, Arrived(token, output.at))
        for node in reversed(self.tape.order.nodes):
            self._node(node)

    def _node(self, node: Node) -> None:
        tape, storages = self.tape, self.tape.storages
        self._remade |= _make_again(tape, [found for op in node for found in tape.given_up(op)])
        region = _run_again(tape, node, self._arrived, self._named)
        if given_up := self._remade.pop(region, []):
            for of, each in self._arrived.items():
                if of.storage in given_up:
                    self._named.add(_name(tape, region, each.token))
        again = placed_again(node)
        tape.begin(node[0], Phase.BACKWARD)
        for op in again:
            tape.run(op, Phase.BACKWARD)
        scratch = [each for op in node for each in op.backward_scratch]
        storages.hold(*scratch)
        done: list[Tensor] = []
        weights: list[tuple[Gradient, Operator]] = []
        for op in reversed(node):
            arrived = [self._arrived.pop(out) for out in op.outputs if out in self._arrived]
            done += [each.token for each in arrived]
            if arrived:
                weights += self._inputs(op, arrived[0])
        late = [token for each, op in weights for token in self._weight(op, each)]
        storages.drop((*tape.saved.pop(node[0].node, []), *done, *scratch))
        self._sum_up([op.outputs[0] for op in again])
        if any(len(each.of.dims) > 1 for each, _ in weights):
            self.arrivals.append(len(storages.events))
        storages.drop(late)
        if region and tape.order.repeated[region][0] is node:
            storages.drop(tape.order.inputs[region])

    def _sum_up(self, done: Sequence[Tensor]) -> None:
        """Add up what came for one tensor more than once; what is *done* goes with the summands."""
        storages = self.tape.storages
        storages.hold(*self._apart)
        storages.touch(*self._sums)
        storages.drop((*done, *self._summed))
        if self._adds_to_arriving and self.summed_into_arriving is None:
            self.summed_into_arriving = len(storages.events)
        for each in (self._summed, self._sums, self._apart):
            each.clear()

    def _inputs(self, op: Operator, arrived: Arrived) -> list[tuple[Gradient, Operator]]:
        """Make the gradients of an operator's inputs; return what is left, those of its weights."""
        left = []
        for gradient in op.gradients:
            if gradient.of.is_weight:
                left.append((gradient, op))
            else:
                self._input(op, gradient, arrived)
        return left

    def _input(self, op: Operator, gradient: Gradient, arrived: Arrived) -> None:
        of, at = gradient.of, arrived.at if gradient.at is None else gradient.at
        work, hands_on = gradient.work, gradient.hands_on
        if op.kind is Kind.PLACE:
            work, hands_on = _placed_back(self.tape.block, op, of, changes(arrived.at, at))
        elif gradient.at is None and of.at != op.outputs[0].at:
            at = of.at
        self.tape.steps += [Step(Phase.BACKWARD, op, each) for each in work]
        token = arrived.token if gradient.overwrites is None else gradient.overwrites.storage
        if hands_on or gradient.overwrites is not None:
            self.tape.storages.hold(token)
        else:
            width = FP8_BYTES if _is_gathered_in_fp8(op, work) else None
            token = _token(self.tape, of, width)
            self.tape.copy_tokens(arrived.token, token, work)
            self._summed += _unconverted(self.tape, op, gradient)
        self._arrive(of, Arrived(token, at, gradient.is_part))

    def _arrive(self, of: Tensor, arrived: Arrived) -> None:
        """Take a gradient; a second one is added to the first, in place, once its node is done.

        Gradients of a DTensor are summed into a third tensor, and so is one that has a name, or is
        a part of a storage (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp).
        """
        if of in self._arrived:
            self._summed.append(arrived.token)
            first = self._arrived[of]
            is_in_place = not (first.is_part or first.token in self._named)
            self._adds_to_arriving |= first.token is self.arriving and is_in_place
            if not is_in_place:
                self._summed.append(first.token)
                self._apart.append(of.like(f"sum of {of.name} gradients", width=first.token.width))
                self._arrived[of] = Arrived(self._apart[-1], first.at)
            elif of in self._redistributed and not self.tape.block.lowering.fuses_places:
                self._sums.append(arrived.token.like("sum of gradients"))
        else:
            self._arrived[of] = arrived

    def _weight(self, op: Operator, gradient: Gradient) -> list[Tensor]:
        """Make a weight's gradient; return what goes once it is added."""
        of, policy = gradient.of, self.weight_gradients
        self.tape.steps += [Step(Phase.BACKWARD, op, each) for each in gradient.work]
        self.places[of] = gradient.at or {}
        fused = policy is WeightGradients.FUSED
        if fused and _is_product(gradient):
            return []
        token = _token(self.tape, of if gradient.makes is None else gradient.makes)
        return self._uses.add(op, of, token, stays=policy is WeightGradients.KEPT)


class _Uses:
    """The uses of weights, whose gradients autograd adds up before it adds them to what is kept.

    The first waits for those of all other uses, which are added to it in place.  Those of a part
    that runs again are apart, since a checkpoint runs autograd by itself.
    """

    def __init__(self, tape: Tape) -> None:
        self._region = tape.repetition.region
        operators = tape.block.operators
        found = ((self._region(op), each.of) for op in operators for each in op.gradients)
        self._left = Counter(use for use in found if use[1].is_weight)
        self._first: dict[tuple[Region, Tensor], Tensor] = {}

    def add(self, op: Operator, of: Tensor, token: Tensor, *, stays: bool) -> list[Tensor]:
        """Take the gradient of a use; return what goes: with the last the sum, unless it stays."""
        use = self._region(op), of
        self._left[use] -= 1
        first = self._first.setdefault(use, token)
        gone = [] if first is token else [token]
        return gone if self._left[use] or stays else [*gone, first]


def _run_again(
    tape: Tape, node: Node, arrived: Mapping[Tensor, Arrived], named: set[Tensor]
) -> Region:
    """Run the part of *node* again, if it has one that has not yet; return which one.

    The gradient of what is held has a name from then on.
    """
    region = tape.repetition.region(node[0])
    holds = bool(region) and region[-1].partition(":")[0] in tape.repetition.held
    if region and node[0].node not in tape.saved and (holds or any(op.reads for op in node)):
        if holds:
            output = tape.order.repeated[region][-1][-1].outputs[0]
            named.add(_name(tape, region, arrived[output].token))
        _repeat(tape, region, holds_output=holds)
    return region


def _token(tape: Tape, of: Tensor, width: int | None = None) -> Tensor:
    """Hold a gradient of a tensor and return it."""
    # The gradient of an operand in fp8 is that of what it was cast from.
    scaled = tape.block.lowering.scaled if width else 0
    width = width or max(of.width, tape.block.width)
    token = of.like(f"{of.name} gradient", width=width, scaled=scaled)
    tape.storages.hold(token)
    return token


def _placed_back(
    block: Block, op: Operator, of: Tensor, found: list[tuple[CollectiveOp, MeshAxis]]
) -> tuple[tuple[Work, ...], bool]:
    """Return the collectives that move a gradient back, and whether its storage stays.

    With a scale for each few elements of a row the copy that the input's gradient reads cannot be
    turned into the one along columns, which the weight's reads: both are gathered
    (``_all_gather_mxfp8`` of Transformer Engine's pytorch/distributed.py, 2.0 and later).
    """
    width, scaled = (block.width, block.lowering.scaled) if op.eight_bits else (None, 0)
    copies = 2 if scaled else 1
    work = place_work(found, op.outputs[0], of, cast_from=width, scaled=scaled, copies=copies)
    is_sum = {each for each, _ in found} == {CollectiveOp.ALL_REDUCE}
    return work, not found or (block.lowering.fuses_places and is_sum)


def _unconverted(tape: Tape, op: Operator, gradient: Gradient) -> list[Tensor]:
    """Hold what a gradient is made as, until autograd has converted it behind its node.

    By then what was made again for the node is gone, as checkpoint hands it over once (`unpack`
    of torch/utils/checkpoint.py, PyTorch 2.13): then at most the wider gradient is there.
    """
    if gradient.makes is None:
        return []
    again = bool(tape.repetition.region(op))
    width = gradient.makes.width - again * gradient.of.width
    wider = gradient.makes.like("unconverted gradient", width=width)
    tape.storages.hold(wider)
    return [wider]


def _is_gathered_in_fp8(op: Operator, work: tuple[Work, ...]) -> bool:
    gathers = any(
        isinstance(each, Transfer) and each.op is CollectiveOp.ALL_GATHER for each in work
    )
    return op.eight_bits and op.kind is Kind.PLACE and gathers


def _is_product(gradient: Gradient) -> bool:
    return all(isinstance(each, Product) for each in gradient.work)


def _name(tape: Tape, region: Region, token: Tensor) -> Tensor:
    """Keep the gradient of what *region* gave out until all gradients of the region are there.

    It is an argument of the checkpoint's backward pass, which runs autograd once more inside
    (CheckpointFunction of megatron/core/tensor_parallel/random.py, core 0.16).
    """
    tape.storages.hold(token)
    tape.order.inputs[region].append(token)
    return token


def _make_again(tape: Tape, given_up: list[GivenUp]) -> dict[Region, list[Tensor]]:
    """Run the parts again that make what forward gave up, and copy it to where it is looked for.

    A part runs once for all that it made, which is returned by part.  What was made again stays
    until the part's gradients are there (CheckpointWithoutOutput of
    megatron/core/tensor_parallel/random.py, core 0.16).
    """
    parts: dict[Region, list[tuple[Tensor, Operator]]] = {}
    for each in given_up:
        made = next(op for op in tape.block.operators if each.output in op.outputs)
        parts.setdefault(tape.repetition.region(made), []).append((each.output, made))
    for region, found in parts.items():
        again = [output.like(f"{output.name} again") for output, _ in found]
        tape.storages.hold(*again)
        _repeat(tape, region, holds_output=False)
        tape.storages.refill([output for output, _ in found])
        for output, made in found:
            copied = tape.block.traffic(output, output)
            tape.steps.append(Step(Phase.RECOMPUTE, made, copied))
        tape.order.inputs[region].extend(again)
    return {region: [output for output, _ in found] for region, found in parts.items()}


def _repeat(tape: Tape, region: Region, *, holds_output: bool) -> None:
    """Run *region* again on *tape*; what is kept of it beyond need goes with its inputs."""
    nodes = tape.order.repeated[region]
    end = _last(tape, nodes)
    own: dict[Tensor, None] = {}  # references of the repetition's own
    reached: set[Operator] = set()
    for index, node in enumerate(nodes[: end + 1]):
        stops = tape.repetition.stops_early and index == end
        for op in node:
            if not (stops and _ends_before(op)):
                reached.add(op)
                _run_operator(tape, op)
                own |= dict.fromkeys(out for out in op.outputs if out.base is None)
        tape.save(node)
        for op in node:
            gone = [each for each in tape.order.dies.get(op, ()) if each in own]
            tape.storages.drop(gone)
            for each in gone:
                del own[each]
    output = nodes[-1][-1].outputs[0].storage
    if holds_output and output in own:
        del own[output]
        tape.order.inputs[region].append(output)
    tape.storages.drop(own)
    for node in nodes[end + 1 :]:
        tape.saved[node[0].node] = []
    unread = [op for node in nodes for op in node if op in tape.repetition.kept - reached]
    tape.order.inputs[region].extend(out for op in unread for out in op.outputs)


def _last(tape: Tape, nodes: list[Node]) -> int:
    """Return the number of the last node that runs again."""
    if not tape.repetition.stops_early:
        return len(nodes) - 1
    return max(index for index, node in enumerate(nodes) if any(op.reads for op in node))


def _ends_before(op: Operator) -> bool:
    """Return whether *op* has kept what it reads before it would run."""
    return op.saves_first and not any(out in op.reads for out in op.outputs)


def _run_operator(tape: Tape, op: Operator) -> None:
    """Run *op* again, unless what it made was kept."""
    if op in tape.repetition.kept:
        tape.copy_tokens(op.inputs[0], op.outputs[0], op.work)
    else:
        tape.run(op, Phase.RECOMPUTE)
