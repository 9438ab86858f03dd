"""Slices inside a layer of a trace: its collectives, and the kernels between them."""

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
    """A collective of a layer, or the kernels between two of them."""

    name: str
    time_ps: int
    args: EventArguments


class Block(NamedTuple):
    """A layer, embedding or head in a pass, with its parts."""

    name: str
    time_ps: int
    args: EventArguments
    parts: tuple[Part, ...]


def layer_parts(
    costs: CostModel, shape: BlockShape, kind: BlockKind, phase: Phase
) -> tuple[Part, ...]:
    """Return the collectives of a pass through a block, and the kernels between them, in order.

    A collective that overlaps with an operator counts within that operator's time; host time beyond
    the kernels comes last.
    """
    operators = costs.blocks.operators(shape, kind)
    is_forward = phase is Phase.FORWARD
    recomputed = () if is_forward else operators.recompute
    run = operators.forward if is_forward else operators.backward
    operators_run = [(each, True) for each in recomputed] + [(each, False) for each in run]
    parts: list[Part] = []
    for sent, group in groupby(operators_run, key=lambda each: _communication(each[0])):
        priced = [(costs.operator_cost(each, shape), again) for each, again in group]
        phase_cost = PhaseCost.total(
            (Category.RECOMPUTE if again else category, cost) for (category, cost), again in priced
        )
        if phase_cost.time_ps:
            args = EventArguments(category_us=spent_us(phase_cost))
            if sent is not None:
                args["size_bytes"] = sent.size_bytes
            name = BETWEEN if sent is None else f"{sent.axis} {sent.op}"
            parts.append(Part(name, phase_cost.time_ps, args))
    # A block without collectives has nothing to tell apart: its own slice says all.
    if all(each.name == BETWEEN for each in parts):
        return ()
    block = costs.block_cost(shape, kind)
    whole = block.forward if is_forward else block.backward
    # Time of a block beyond its kernels is that of a host that launches them too slowly.
    lacking_ps = whole.time_ps - sum(each.time_ps for each in parts)
    if lacking_ps > 0:
        late = {Category.HOST.value: microseconds(lacking_ps)}
        parts.append(Part(LATE_HOST, lacking_ps, EventArguments(category_us=late)))
    return tuple(parts)


def _communication(operator: Operator) -> Collective | RingMessages | None:
    """Return *operator* if it is communication."""
    return operator if isinstance(operator, Collective | RingMessages) else None


def spent_us(cost: PhaseCost) -> dict[str, float]:
    """Return the microseconds of a cost by category."""
    return {
        category.value: microseconds(cost.category_ps(category))
        for category in Category
        if cost.category_ps(category)
    }


def shortened(blocks: "Sequence[Block]", overlapped_ps: int) -> "list[Block]":
    """Return *blocks* less the share of their expert all-to-alls that another microbatch overlaps.

    >>> found = Block("layer 0", 3 * 10**6, EventArguments(category_us={"ep_comm": 2.0}), ())
    >>> [each.time_ps for each in shortened([found, found], 10**6)]
    [2500000, 2500000]
    """
    cuts = _cuts([_exchange_ps(block.args) for block in blocks], overlapped_ps)
    return [_without(block, each_ps) for block, each_ps in zip(blocks, cuts, strict=True)]


def _without(block: Block, overlapped_ps: int) -> Block:
    """Return *block* with *overlapped_ps* less, split over its parts."""
    cuts = _cuts([_exchange_ps(part.args) for part in block.parts], overlapped_ps)
    parts = (
        part._replace(time_ps=part.time_ps - each_ps, args=_with_less(part.args, each_ps))
        for part, each_ps in zip(block.parts, cuts, strict=True)
    )
    args = _with_less(block.args, overlapped_ps)
    return Block(block.name, block.time_ps - overlapped_ps, args, tuple(parts))


def _cuts(sizes_ps: Sequence[int], overlapped_ps: int) -> list[int]:
    """Return the share of each size in *overlapped_ps*; together they sum to it exactly."""
    total_ps, done_ps, cuts = sum(sizes_ps), 0, list[int]()
    for end_ps in accumulate(sizes_ps):
        # Cumulative rounding: shares are whole picoseconds, and none is lost.
        cuts.append(overlapped_ps * end_ps // max(total_ps, 1) - done_ps)
        done_ps += cuts[-1]
    return cuts


def _exchange_ps(args: EventArguments) -> int:
    """Return the expert-parallel communication of a slice."""
    return round(args["category_us"].get(Category.EP_COMM, 0.0) * PS_PER_US)


def _with_less(args: EventArguments, overlapped_ps: int) -> EventArguments:
    """Return the arguments of a slice with less expert-parallel communication."""
    if not overlapped_ps:
        return args
    exposed_ps = _exchange_ps(args) - overlapped_ps
    spent = {**args["category_us"], Category.EP_COMM.value: microseconds(exposed_ps)}
    return EventArguments(**{**args, "category_us": spent})
