"""Forward pass of a block in PyTorch's order, with reference counts of storages.

A walk yields the work of each phase, in order, and every allocation and free.  The structure of
the block alone decides it; sizes are read afterwards, as numbers or as columns of many layouts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.graph.block import Block, Discarded
from meshwright.simulator.graph.operators import Operator, Transfer, Work
from meshwright.simulator.graph.order import Node, Order, Region, Repetition, replaced_in_backward
from meshwright.simulator.graph.tensors import Dim, Tensor, several

COPIED = (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)


class Phase(StrEnum):
    """Passes through a block."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class Step(NamedTuple):
    """A kernel or collective of a phase, with its operator."""

    phase: Phase
    operator: Operator
    work: Work


class Run(NamedTuple):
    """An operator in a phase, and the number of events before it."""

    phase: Phase
    operator: Operator
    begin: int


class Marks(NamedTuple):
    """Numbers of events before forward's last operator is done, and before forward has returned."""

    ran: int
    returned: int


class Storages:
    """Reference counts of storages; ``events`` lists allocations (1) and frees (-1), in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Tensor, int]] = []
        self._counts: Counter[Tensor] = Counter()
        self._empty: set[Tensor] = set()

    def hold(self, *tensors: Tensor) -> None:
        """Take a reference to each storage; the first one allocates it, unless it was discarded."""
        for each in tensors:
            storage = each.storage
            if storage.is_weight:
                continue
            self._counts[storage] += 1
            if self._counts[storage] == 1 and storage not in self._empty:
                self.events.append((storage, 1))

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Drop a reference to each storage; the last one frees it."""
        for each in tensors:
            storage = each.storage
            if storage.is_weight:
                continue
            self._counts[storage] -= 1
            assert self._counts[storage] >= 0, f"{storage.name} is dropped too often"
            if not self._counts[storage] and storage not in self._empty:
                self.events.append((storage, -1))

    def empty(self, storage: Tensor) -> None:
        """Free *storage* despite references (``untyped_storage().resize_(0)``)."""
        self._empty.add(storage)
        self.events.append((storage, -1))

    def refill(self, storages: Sequence[Tensor]) -> None:
        """Allocate *storages* again; those without references are freed at once."""
        self._empty.difference_update(storages)
        self.events += [(each, 1) for each in storages]
        self.events += [(each, -1) for each in storages if not self._counts[each]]

    def touch(self, *tensors: Tensor) -> None:
        """Allocate *tensors* and free them: a temporary peak."""
        self.hold(*tensors)
        self.drop(tensors)


NOT_RUN = Marks(0, 0)


@dataclass(slots=True)
class Tape:
    """A pass through a block.

    Args:
        block: The block.
        repetition: Recomputed parts.
        storages: Allocations and frees.
        steps: Kernels and collectives, in order.
        runs: Operators in order; of a node's backward the first.
        marks: End of forward.
        saved: Saved tensors by node.
        order: Order of the walk.
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
        """Run all operators; *inputs* are allocated before."""
        order, storages = self.order, self.storages
        storages.hold(*inputs)
        entered: set[Region] = set()
        for node in order.nodes:
            region = self.repetition.region(node[0])
            for op in node:
                if region and region not in entered:
                    entered.add(region)
                    # A checkpoint saves the part's inputs alone; nodes inside it save nothing.
                    storages.hold(*order.inputs[region])
                self.run(op, Phase.FORWARD)
                if region and op in self.repetition.kept:
                    # Selective checkpointing caches these outputs for recomputation.
                    storages.hold(*op.outputs)
            if not region:
                self.save(node)
            for op in node:
                storages.drop(order.dies.get(op, ()))
                for each in self.discarded(op):
                    storages.empty(each.output)
        ran = len(storages.events)
        storages.drop(order.returned)
        self.marks = Marks(ran, len(storages.events))

    def discarded(self, behind: Operator) -> list[Discarded]:
        """Return the outputs discarded after an operator, as their parts are recomputed."""
        return [
            each
            for each in self.block.discarded
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
        """Record that an operator begins."""
        self.runs.append(Run(phase, op, len(self.storages.events)))

    def copy_tokens(self, one: Tensor, other: Tensor, work: Iterable[Work]) -> None:
        """Allocate the temporary copy of all tokens that DTensor's gather or scatter makes."""
        ops = {each.op for each in work if isinstance(each, Transfer)}
        if self.block.lowering.fuses_redistribute or not ops.intersection(COPIED):
            return
        # all_gather_into_tensor concatenates dim 0; DTensor copies to bring shards to dim 1.
        is_sum = CollectiveOp.REDUCE_SCATTER in ops
        whole = one if is_sum else other
        dims = whole.dims
        if len(dims) < 2:  # a loss of one kernel gathers its numbers of tokens, which lie flat
            return
        if not is_sum:  # of one sequence alone the tokens come first: PyTorch hands out a view
            dims = (*dims, Dim("more than one", several(whole.sizes[dims[1]])))
        self.storages.touch(whole.like(f"{whole.name} copied", dims=dims))

    def save(self, node: Node) -> None:
        """Hold the saved tensors of a node."""
        read = list(dict.fromkeys(each.storage for each in self.reads(node)))
        self.saved[node[0].node] = read
        self.storages.hold(*read)

    @staticmethod
    def reads(node: Node) -> list[Tensor]:
        """Return the saved tensors of a node, without those it redistributes or casts anew."""
        made = {op.outputs[0]: op.inputs[0] for op in replaced_in_backward(node)}
        placed = (made.get(each, each) for op in node for each in op.reads)
        return list(dict.fromkeys(made.get(each.storage, each) for each in placed))
