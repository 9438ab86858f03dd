"""Order of a block: autograd nodes, recomputed parts, and last uses of storages."""

from collections import defaultdict
from itertools import groupby
from typing import NamedTuple, TypeAlias

from meshwright.simulator.graph.block import Block
from meshwright.simulator.graph.operators import Kind, Operator
from meshwright.simulator.graph.tensors import Tensor

Region: TypeAlias = tuple[str, ...]
Node: TypeAlias = list[Operator]


class Repetition(NamedTuple):
    """Recomputed parts of a block.

    Args:
        parts: Parts of the block, such as "layer"; numbers behind a colon tell those of one kind
            apart.
        stops_early: Recomputation ends once it has all saved tensors.
        kept: Operators of these parts whose outputs are saved all the same.
        held: Parts whose recomputed output stays alive until their backward is done.
    """

    parts: frozenset[str] = frozenset()
    stops_early: bool = False
    kept: frozenset[Operator] = frozenset()
    held: frozenset[str] = frozenset()

    def region(self, operator: Operator) -> Region:
        """Return the outermost recomputed part of *operator*; empty if there is none."""
        for index, name in enumerate(operator.region):
            if name.partition(":")[0] in self.parts:
                return operator.region[: index + 1]
        return ()


class Order(NamedTuple):
    """Order of a block's walk.

    Args:
        nodes: In the order in which they run forward.
        repeated: Nodes of each recomputed part.
        inputs: Storages that a recomputed part reads from outside: the checkpoint's arguments.
        dies: Storages by the operator of their last use in forward.
        returned: Tensors that live until the forward pass is over.
    """

    nodes: list[Node]
    repeated: dict[Region, list[Node]]
    inputs: dict[Region, list[Tensor]]
    dies: dict[Operator, list[Tensor]]
    returned: tuple[Tensor, ...]

    @classmethod
    def of(cls, block: Block, repetition: Repetition) -> "Order":
        """Return the order of *block*."""
        nodes = [list(each) for _, each in groupby(block.operators, key=lambda op: op.node)]
        repeated: dict[Region, list[Node]] = defaultdict(list)
        for node in nodes:
            region = repetition.region(node[0])
            if region:
                repeated[region].append(node)
        inputs = {region: _inputs(inside) for region, inside in repeated.items()}
        returned = (block.operators[-1].outputs[0], *block.cached)
        return cls(nodes, repeated, inputs, _last_uses(block, returned), returned)


def _inputs(nodes: list[Node]) -> list[Tensor]:
    operators = [each for node in nodes for each in node]
    made = {out for each in operators for out in each.outputs if out.base is None}
    read = dict.fromkeys(x.storage for each in operators for x in each.inputs if not x.is_weight)
    return [each for each in read if each not in made]


def _last_uses(block: Block, returned: tuple[Tensor, ...]) -> dict[Operator, list[Tensor]]:
    last: dict[Tensor, int] = {}
    for index, op in enumerate(block.operators):
        for each in (*op.inputs, *op.outputs):
            last[each.storage] = index
    for each in returned:
        last.pop(each.storage, None)
    for end, each in block.held:
        if each in last:
            # A Python variable may outlive the last operator that reads the tensor.
            last[each] = max(last[each], end - 1)
    dies: dict[Operator, list[Tensor]] = defaultdict(list)
    for each, index in last.items():
        dies[block.operators[index]].append(each)
    return dies


def replaced_in_backward(node: Node) -> list[Operator]:
    """Return redistributions and casts that a fused node redoes in backward from saved inputs."""
    if len(node) == 1:
        return []
    read = {each for op in node for each in op.reads}
    redistributions = (op for op in node if op.kind is Kind.PLACE and op.outputs[0] in read)
    redone = [op for op in redistributions if op.outputs[0].storage is not op.inputs[0].storage]
    sources = {each.storage for each in (*read, *(op.inputs[0] for op in redone))}
    return [op for op in node if op.kind is Kind.NARROWED and op.outputs[0] in sources] + redone
