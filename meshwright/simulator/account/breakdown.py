"""Time breakdown of a simulated step, averaged over pipeline ranks."""

from meshwright.hwprofiles import Source
from meshwright.simulator.costs import Category, Cost, PhaseCost
from meshwright.simulator.engine import RankTimes, RankWork, StepTimes
from meshwright.simulator.ledger import StepPoint
from meshwright.simulator.schedules import total_ps
from meshwright.simulator.step import BuiltStep


def time_breakdown(
    built: BuiltStep, times: StepTimes
) -> tuple[dict[Category, int], dict[Source, float]]:
    """Return the step's time by category, and the share of busy time by kind of evidence.

    A rank that neither computes nor communicates is idle: the bubble takes the rest, so that the
    categories add up to the step's time but for rounding down.
    """
    ranks = [_rank_cost(built, times, pp_rank) for pp_rank in range(built.work.pp)]
    total = sum(ranks, PhaseCost())
    count = len(ranks)
    end_ps = max(rank.end_ps for rank in times.ranks)
    parts = {category: total.category_ps(category) // count for category in Category}
    parts[Category.STEP_OVERHEAD] = times.step_ps - end_ps
    parts[Category.BUBBLE] = end_ps - total.time_ps // count
    busy_ps = max(1, total.time_ps)
    return parts, {source: total.source_ps(source) / busy_ps for source in Source}


def _rank_cost(built: BuiltStep, times: StepTimes, pp_rank: int) -> PhaseCost:
    """Return the busy time of a rank, by category and source."""
    work, rank = built.work.ranks[pp_rank], times.ranks[pp_rank]
    total = built.update_costs[pp_rank] + _exposed(built, pp_rank, work, rank)
    for costs in built.virtual_stage_costs[pp_rank]:
        total += sum(costs.values(), PhaseCost()) * built.work.num_microbatches
    # Overlapped passes hide some all-to-all time that their costs include.
    hidden_ps = built.work.total_overlap_saving_ps(pp_rank)
    total += PhaseCost.total([(Category.EP_COMM, Cost(-hidden_ps, built.evidence.exchanges))])
    # Without overlap_p2p a send occupies the rank until it is done.
    if built.work.blocking_messages:
        sent_ps = total_ps(rank.messages.ends_ps) - total_ps(rank.messages.starts_ps)
        total += PhaseCost.total([(Category.PP_COMM, Cost(sent_ps, built.evidence.messages))])
    return total


def _exposed(built: BuiltStep, pp_rank: int, work: RankWork, rank: RankTimes) -> PhaseCost:
    """Return the exposed communication of a rank outside its passes, and its host copies."""
    waited_ps = rank.gather_wait_ps + rank.reduce_wait_ps + work.gather_ps
    host_ps = int(waited_ps * built.host_shares[pp_rank])
    closing = built.closing_costs[pp_rank]
    return PhaseCost.total(
        [
            (Category.DP_COMM, Cost(waited_ps - host_ps, built.evidence.replicas)),
            (Category.HOST_COPY, Cost(host_ps + sum(rank.copy_waits_ps), built.evidence.host)),
            (Category.TP_COMM, closing[StepPoint.SUMS]),
            *((Category.DP_COMM, closing[each]) for each in (StepPoint.TOKENS, StepPoint.NORM)),
        ]
    )
