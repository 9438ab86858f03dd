"""What is in a layer's slice of a trace: its collectives, and what runs between them."""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from meshwright.simulator.blocks import BlockShape, Collective, Operator, RingMessages
from meshwright.simulator.costs import Category, CostModel, PhaseCost
from meshwright.simulator.model import BlockKind
from meshwright.simulator.schedules import Phase
from meshwright.simulator.trace_events import PS_PER_US, EventArguments, microseconds

BETWEEN = "kernels"
LATE_HOST = "host"


class Part(NamedTuple):
    """A collective of a layer, or what runs between two of them."""

    name: str
    time_ps: int
    args: EventArguments


class Block(NamedTuple):
    """A layer or an end of the model in a pass, and what is in it."""

    name: str
    time_ps: int
    args: EventArguments
    parts: tuple[Part, ...]


def layer_parts(
    costs: CostModel, shape: BlockShape, kind: BlockKind, phase: Phase
) -> tuple[Part, ...]:
    """Return the collectives of a pass through a block, and what runs between them, in order.

    What another operator hides of a collective is in that one's time; what the host takes longer
    than all of them comes last.
    """
    operators = costs.blocks.operators(shape, kind)
    is_forward = phase is Phase.FORWARD
    redone = () if is_forward else operators.recompute
    run = operators.forward if is_forward else operators.backward
    kinds = [(each, True) for each in redone] + [(each, False) for each in run]
    parts: list[Part] = []
    for sent, group in groupby(kinds, key=lambda each: _sent(each[0])):
        priced = [(costs.operator_cost(each, shape), again) for each, again in group]
        found = PhaseCost.total(
            (Category.RECOMPUTE if again else category, cost) for (category, cost), again in priced
        )
        if found.time_ps:
            args = EventArguments(category_us=spent_us(found))
            if sent is not None:
                args["size_bytes"] = sent.size_bytes
            name = BETWEEN if sent is None else f"{sent.axis} {sent.op}"
            parts.append(Part(name, found.time_ps, args))
    if all(each.name == BETWEEN for each in parts):
        return ()
    block = costs.block_cost(shape, kind)
    whole = block.forward if is_forward else block.backward
    lacking_ps = whole.time_ps - sum(each.time_ps for each in parts)
    if lacking_ps > 0:
        late = {Category.HOST.value: microseconds(lacking_ps)}
        parts.append(Part(LATE_HOST, lacking_ps, EventArguments(category_us=late)))
    return tuple(parts)


def _sent(operator: Operator) -> Collective | RingMessages | None:
    """Return *operator* if it is what ranks send each other."""
    return operator if isinstance(operator, Collective | RingMessages) else None


def spent_us(cost: PhaseCost) -> dict[str, float]:
    """Return the microseconds of a cost by category."""
    return {
        category.value: microseconds(cost.category_ps(category))
        for category in Category
        if cost.category_ps(category)
    }


def shortened(blocks: "Sequence[Block]", hidden_ps: int) -> "list[Block]":
    """Return *blocks* without what another microbatch hides of their exchanges, of each its share.

    >>> found = Block("layer 0", 3 * 10**6, EventArguments(category_us={"ep_comm": 2.0}), ())
    >>> [each.time_ps for each in shortened([found, found], 10**6)]
    [2500000, 2500000]
    """
    cut = _cuts([_exchange_ps(block.args) for block in blocks], hidden_ps)
    return [_without(block, each_ps) for block, each_ps in zip(blocks, cut, strict=True)]


def _without(block: Block, hidden_ps: int) -> Block:
    cut = _cuts([_exchange_ps(part.args) for part in block.parts], hidden_ps)
    parts = (
        part._replace(time_ps=part.time_ps - each_ps, args=_less(part.args, each_ps))
        for part, each_ps in zip(block.parts, cut, strict=True)
    )
    args = _less(block.args, hidden_ps)
    return Block(block.name, block.time_ps - hidden_ps, args, tuple(parts))


def _cuts(sizes_ps: Sequence[int], hidden_ps: int) -> list[int]:
    """Return the share of each in what is hidden; together they are all of it."""
    total_ps, done_ps, cuts = sum(sizes_ps), 0, list[int]()
    for end_ps in accumulate(sizes_ps):
        cuts.append(hidden_ps * end_ps // max(total_ps, 1) - done_ps)
        done_ps += cuts[-1]
    return cuts


def _exchange_ps(args: EventArguments) -> int:
    return round(args["category_us"].get(Category.EP_COMM, 0.0) * PS_PER_US)


def _less(args: EventArguments, hidden_ps: int) -> EventArguments:
    if not hidden_ps:
        return args
    left_ps = _exchange_ps(args) - hidden_ps
    spent = {**args["category_us"], Category.EP_COMM.value: microseconds(left_ps)}
    return EventArguments(**{**args, "category_us": spent})
