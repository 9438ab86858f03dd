"""Names of the process groups of a plan, by the ranks in them."""

from collections.abc import Mapping

from meshwright.simulator import ResolvedPlan
from meshwright.simulator.layout import tied_embedding_rank
from meshwright.validate.ranks import plan_groups


def groups_of(plan: ResolvedPlan, rank: int) -> Mapping[tuple[int, ...], str]:
    """Return the axis of each group that *rank* is in, as comparisons name them.

    >>> groups_of(ResolvedPlan(tp=2, dp=2, stages=(1,)), 1)
    {(0, 1, 2, 3): 'world', (0, 1): 'tp', (1, 3): 'dp'}
    """
    if plan.cp > 1:
        return plan_groups(plan, rank, is_tied=False)
    tp, dp, pp, shards = plan.tp, plan.dp, plan.pp, plan.num_shards
    stage = rank // (tp * dp) * tp * dp
    # Tensor ranks vary fastest, then data ranks, then pipeline ranks.
    own_tp, own_dp = rank % tp, rank // tp % dp
    first = own_dp // shards * shards
    found = {
        "world": range(plan.world_size),
        "parts": [
            index * tp * dp + shard * tp + other
            for index in range(pp)
            for shard in (range(first, first + shards) if plan.zero_stage else [own_dp])
            for other in range(tp)
        ],
        "batch": [stage + index * tp + own_tp for index in range(dp)],
        "tp": [stage + own_dp * tp + other for other in range(tp)],
        "replica": [stage + index * tp + own_tp for index in range(own_dp % shards, dp, shards)],
        "dp": [stage + index * tp + own_tp for index in range(first, first + shards)],
        "pp": [index * tp * dp + own_dp * tp + own_tp for index in range(pp)],
    }
    if plan.ep > 1:  # of an HSDP shard group; the same ranks, if there are no more
        own = rank - rank % plan.ep
        found["ep"] = range(own, own + plan.ep)
        own = stage + first + rank % plan.ep
        found["edp"] = range(own, own + shards, plan.ep)
        found["dp"] = found.pop("dp")
    ends = [found["pp"][0], found["pp"][tied_embedding_rank(plan)]]
    axes = {tuple(ends): "table"} if pp > 2 else {}
    for axis, ranks in found.items():
        if len(ranks) > 1 and (axis != "parts" or len(ranks) < plan.world_size):
            axes[tuple(ranks)] = axis
    return axes
