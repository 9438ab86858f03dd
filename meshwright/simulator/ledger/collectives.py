"""A line of the ledger: collectives that run together at a moment of a step, and their price."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.costs import Cost, CostModel
from meshwright.simulator.layout import GroupSpan, MeshAxis
from meshwright.simulator.replication import StagePart


class Moment(StrEnum):
    """When collectives of a step may start, and what waits for them.

    In passes: ``OPERATORS`` of a block wait for what comes between them; ``GATHER`` comes before a
    part of a pass, which waits for it; ``AHEAD`` comes at the end of a forward pass, for parameters
    that are freed unused; ``REDUCE`` may start once a part's gradients are there, and what closes
    the step waits for it; ``REPLICAS`` follow that of the last microbatch where shards are summed
    over their replicas then alone; a ``MESSAGE`` follows a pass, and that of the next stage, or of
    the one before, waits for it.  The rest closes the step, one after the other: what of the
    gradients is reduced after the last pass, sums over tensor-parallel ranks (of some stacks before
    the reductions end), a tied table between both ends of the pipeline, the tokens of experts that
    routing biases move by, the norm for which all ranks meet; then the update, and what gathers the
    updated parameters before the next step.
    """

    OPERATORS = "operators"
    GATHER = "gather"
    AHEAD = "ahead"
    REDUCE = "reduce"
    REPLICAS = "replicas"
    MESSAGE = "message"
    PASSES_DONE = "passes done"
    SUMS = "sums"
    TIED_TABLE = "tied table"
    TOKENS = "tokens"
    NORM = "norm"
    UPDATED = "updated"


class StepCollective(NamedTuple):
    """Equal collectives of a rank, one after the other; ``size_bytes`` as in `Collective`.

    ``padding_bytes`` fill shards up to one size: they are sent, and count for nothing in a price.
    ``cast_bytes`` are the memory traffic of casts to the format of the wire and back, each call.
    """

    axis: MeshAxis
    op: CollectiveOp
    size_bytes: int
    span: GroupSpan
    num_calls: int = 1
    padding_bytes: int = 0
    cast_bytes: int = 0


class LedgerEntry(NamedTuple):
    """Collectives that run one after the other at a moment, and how often a step comes to it.

    ``part`` is what they are for: of a virtual stage in a pass, of the rank at the end.
    """

    moment: Moment
    part: StagePart
    collectives: tuple[StepCollective, ...]
    num_times: int = 1


def price(costs: CostModel, collectives: Iterable[StepCollective]) -> Cost:
    """Return the time of *collectives*, one after the other, each with its casts.

    It rests on what the first rests on, none on what is known of the network.
    """
    time_ps, source = 0, None
    for each in collectives:
        cost = costs.collective(each.op, each.size_bytes, each.span, each.axis)
        casts_ps = costs.memory_traffic(each.cast_bytes).time_ps if each.cast_bytes else 0
        time_ps += each.num_calls * (cost.time_ps + casts_ps)
        source = source or cost.source
    return Cost(time_ps, source or costs.cluster.inter_node.kind)
