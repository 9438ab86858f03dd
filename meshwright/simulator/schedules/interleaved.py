"""Interleaved 1F1B: several virtual stages a rank, a bubble smaller by their number."""

from meshwright.simulator.schedules.actions import (
    Action,
    ActionLists,
    Phase,
    Schedule,
    alternate,
    plain_bubble_fraction,
)


def interleaved(pp: int, num_microbatches: int, vpp: int) -> ActionLists:
    """Return the interleaved 1F1B order, one list per pipeline rank.

    Microbatches go through a rank's virtual stages in groups of *pp*.

    >>> "".join(f"{a.phase}{a.virtual_stage}" for a in interleaved(2, 2, 2)[1])
    'F0F0F1B1F1B1B0B0'
    """
    forward, backward = _passes(pp, num_microbatches, vpp)
    total = len(forward)
    return [alternate(forward, backward, _warmup(rank, pp, total, vpp)) for rank in range(pp)]


def _rank_actions(pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> list[Action]:
    forward, backward = _passes(pp, num_microbatches, vpp)
    return alternate(forward, backward, _warmup(pp_rank, pp, len(forward), vpp))


def _passes(pp: int, num_microbatches: int, vpp: int) -> tuple[list[Action], list[Action]]:
    """Return the order of forward and of backward passes, the same on every rank."""
    forward = [
        Action(Phase.FORWARD, virtual_stage, group + offset)
        for group in range(0, num_microbatches, pp)
        for virtual_stage in range(vpp)
        for offset in range(pp)
    ]
    backward = [
        Action(Phase.BACKWARD, vpp - 1 - virtual_stage, microbatch)
        for _, virtual_stage, microbatch in forward
    ]
    return forward, backward


def _warmup(pp_rank: int, pp: int, total: int, vpp: int) -> int:
    return min(total, 2 * (pp - pp_rank - 1) + (vpp - 1) * pp)


def _in_flight(pp_rank: int, pp: int, num_microbatches: int, vpp: int) -> int:
    total = num_microbatches * vpp
    return min(total, _warmup(pp_rank, pp, total, vpp) + 1)


def _refusal(pp: int, num_microbatches: int, vpp: int) -> str | None:
    if vpp < 2 or pp < 2:
        return f"interleaved needs vpp >= 2 and pp >= 2, got vpp={vpp}, pp={pp}"
    if num_microbatches % pp:
        return f"interleaved needs num_microbatches={num_microbatches} to be a multiple of pp={pp}"
    return None


INTERLEAVED = Schedule(
    name="interleaved",
    title="1F1B over several virtual stages a rank: bubble / vpp, more messages and memory",
    source="Narayanan et al. 2021 (arXiv 2104.04473), sec. 2.2",
    actions=interleaved,
    rank_actions=_rank_actions,
    in_flight=_in_flight,
    bubble_fraction=plain_bubble_fraction,
    refusal=_refusal,
    interleaves=True,
    holds_sent=True,
)
