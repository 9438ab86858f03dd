"""A line of the ledger: collectives that run together at a point of a step, and their time."""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.costs import Cost, CostModel
from meshwright.simulator.layout import GroupSpan, MeshAxis
from meshwright.simulator.replication import StagePart


class StepPoint(StrEnum):
    """Point of a step at which collectives may start.

    In passes: ``OPERATORS`` of a block run between its kernels; ``GATHER`` comes before a part of a
    pass, which waits for it; ``AHEAD`` comes at the end of a forward pass, for parameters that are
    freed unused; ``REDUCE`` may start once a part's gradients are complete, and the close of the
    step waits for it; ``REPLICAS`` follow the last microbatch's reduction where HSDP all-reduces
    shards then alone; a ``MESSAGE`` follows a pass, and that of the next stage, or of the one
    before, waits for it. The rest closes the step, one after the other: reductions after the last
    pass, tensor-parallel sums (of some stacks before the reductions end), a tied embedding between
    both ends of the pipeline, the token counts that update routing biases, the norm for which all
    ranks meet; then the update, and the all-gather of updated parameters before the next step.
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

    ``padding_bytes`` pad shards to one size: they are sent, and count for nothing in a price.
    ``cast_bytes`` are the memory traffic of casts to the communication format and back, each call.
    """

    axis: MeshAxis
    op: CollectiveOp
    size_bytes: int
    span: GroupSpan
    num_calls: int = 1
    padding_bytes: int = 0
    cast_bytes: int = 0


class LedgerEntry(NamedTuple):
    """Collectives that run one after the other at a point of a step, and their repetitions.

    ``part`` is the part they serve: of a virtual stage in a pass, of the rank at the end.
    """

    moment: StepPoint
    part: StagePart
    collectives: tuple[StepCollective, ...]
    num_times: int = 1


def price(costs: CostModel, collectives: Iterable[StepCollective]) -> Cost:
    """Return the time of *collectives*, one after the other, each with its casts.

    Its source is the first one's; without any, that of the network between nodes.
    """
    time_ps, source = 0, None
    for each in collectives:
        cost = costs.collective(each.op, each.size_bytes, each.span, each.axis)
        casts_ps = costs.memory_traffic(each.cast_bytes).time_ps if each.cast_bytes else 0
        # Each call casts before it sends and after it has received.
        time_ps += each.num_calls * (cost.time_ps + casts_ps)
        source = source or cost.source
    return Cost(time_ps, source or costs.cluster.inter_node.kind)
