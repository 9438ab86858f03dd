"""Runs a block forward and backward in PyTorch's order, counting references to storages.

One walk gives everything: the work of each phase, in order, and each storage that comes and goes.
Only the structure of the block decides the walk; sizes are looked up afterwards, as numbers or as
columns of many layouts at once.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.graph.block import Block, GivenUp
from meshwright.simulator.graph.operators import Operator, Transfer, Work
from meshwright.simulator.graph.order import Node, Order, Region, Repetition, placed_again
from meshwright.simulator.graph.tensors import Dim, Tensor, several

COPIED = (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)


class Phase(StrEnum):
    """Passes through a block."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class Step(NamedTuple):
    """Work of a phase, and the operator that it belongs to."""

    phase: Phase
    operator: Operator
    work: Work


class Run(NamedTuple):
    """An operator in a phase, and after how many events it began."""

    phase: Phase
    operator: Operator
    begin: int


class Marks(NamedTuple):
    """After how many events a forward pass has run, and has returned."""

    ran: int
    returned: int


class Storages:
    """Reference counts; ``events`` has each storage that came (1) or went (-1), in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Tensor, int]] = []
        self._counts: Counter[Tensor] = Counter()
        self._empty: set[Tensor] = set()

    def hold(self, *tensors: Tensor) -> None:
        """Take a reference to each storage; the first one allocates it, unless it was given up."""
        for each in tensors:
            storage = each.storage
            if storage.is_weight:
                continue
            self._counts[storage] += 1
            if self._counts[storage] == 1 and storage not in self._empty:
                self.events.append((storage, 1))

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Give a reference back of each; the last one frees the storage."""
        for each in tensors:
            storage = each.storage
            if storage.is_weight:
                continue
            self._counts[storage] -= 1
            assert self._counts[storage] >= 0, f"{storage.name} is dropped too often"
            if not self._counts[storage] and storage not in self._empty:
                self.events.append((storage, -1))

    def empty(self, storage: Tensor) -> None:
        """Free *storage*, whoever refers to it."""
        self._empty.add(storage)
        self.events.append((storage, -1))

    def refill(self, storages: Sequence[Tensor]) -> None:
        """Allocate *storages* again for those who refer to them; what nobody does goes at once."""
        self._empty.difference_update(storages)
        self.events += [(each, 1) for each in storages]
        self.events += [(each, -1) for each in storages if not self._counts[each]]

    def touch(self, *tensors: Tensor) -> None:
        """Let *tensors* live for a moment."""
        self.hold(*tensors)
        self.drop(tensors)


NOT_RUN = Marks(0, 0)


@dataclass(slots=True)
class Tape:
    """A pass through a block.

    Args:
        block: What runs.
        repetition: What of it runs again in backward.
        storages: What came and went.
        steps: What ran, in order.
        runs: Which operators did, of a node's backward the first.
        marks: When forward was over.
        saved: What backward reads, by node.
        order: What the walk follows.
    """

    block: Block
    repetition: Repetition = field(default_factory=Repetition)
    storages: Storages = field(default_factory=Storages)
    steps: list[Step] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    marks: Marks = NOT_RUN
    saved: dict[int, list[Tensor]] = field(default_factory=dict)
    order: Order = field(init=False)

    def __post_init__(self) -> None:
        self.order = Order.of(self.block, self.repetition)

    def run_forward(self, *inputs: Tensor) -> None:
        """Run all operators; *inputs* are there before."""
        order, storages = self.order, self.storages
        storages.hold(*inputs)
        entered: set[Region] = set()
        for node in order.nodes:
            region = self.repetition.region(node[0])
            for op in node:
                if region and region not in entered:
                    entered.add(region)
                    storages.hold(*order.inputs[region])
                self.run(op, Phase.FORWARD)
                if region and op in self.repetition.kept:
                    storages.hold(*op.outputs)
            if not region:
                self.save(node)
            for op in node:
                storages.drop(order.dies.get(op, ()))
                for each in self.given_up(op):
                    storages.empty(each.output)
        ran = len(storages.events)
        storages.drop(order.returned)
        self.marks = Marks(ran, len(storages.events))

    def given_up(self, behind: Operator) -> list[GivenUp]:
        """Return what is given up behind an operator, as parts run again that make it."""
        return [
            each
            for each in self.block.given_up
            if each.behind is behind and each.part in self.repetition.parts
        ]

    def run(self, op: Operator, phase: Phase) -> None:
        """Run one operator forward."""
        self.begin(op, phase)
        self.storages.hold(*(out for out in op.outputs if out.base is None))
        self.storages.touch(*op.scratch)
        self.copy_tokens(op.inputs[0], op.outputs[0], op.work)
        self.steps += [Step(phase, op, work) for work in op.work]

    def begin(self, op: Operator, phase: Phase) -> None:
        """Note that an operator begins."""
        self.runs.append(Run(phase, op, len(self.storages.events)))

    def copy_tokens(self, one: Tensor, other: Tensor, work: Iterable[Work]) -> None:
        """Hold, for a moment, the copy of all tokens that a gather or a scatter makes."""
        ops = {each.op for each in work if isinstance(each, Transfer)}
        if self.block.lowering.fuses_places or not ops.intersection(COPIED):
            return
        is_sum = CollectiveOp.REDUCE_SCATTER in ops
        whole = one if is_sum else other
        dims = whole.dims
        if len(dims) < 2:  # a loss of one kernel gathers its numbers of tokens, which lie flat
            return
        if not is_sum:  # of one sequence alone the tokens come first: PyTorch hands out a view
            dims = (*dims, Dim("more than one", several(whole.sizes[dims[1]])))
        self.storages.touch(whole.like(f"{whole.name} copied", dims=dims))

    def save(self, node: Node) -> None:
        """Hold what backward reads."""
        read = list(dict.fromkeys(each.storage for each in self.reads(node)))
        self.saved[node[0].node] = read
        self.storages.hold(*read)

    @staticmethod
    def reads(node: Node) -> list[Tensor]:
        """Return what backward reads; what the node can place, or cast, anew it does not keep."""
        made = {op.outputs[0]: op.inputs[0] for op in placed_again(node)}
        placed = (made.get(each, each) for op in node for each in op.reads)
        return list(dict.fromkeys(made.get(each.storage, each) for each in placed))
