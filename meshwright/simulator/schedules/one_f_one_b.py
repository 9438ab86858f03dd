"""1F1B: one forward, one backward; at most p - r microbatches in flight on rank r."""

from meshwright.simulator.schedules.actions import (
    Action,
    Schedule,
    all_passes,
    alternate,
    plain_bubble_fraction,
    refuse_virtual_stages,
    single_stage_passes,
    steady_pairs,
)

OVERLAP_REFUSAL = (
    "passes of two microbatches beside each other at pp={pp} need virtual stages; allowed: "
    "schedule=interleaved with vpp of 2 or more, or pp=1"
)


def _rank_actions(pp_rank: int, pp: int, num_microbatches: int, _vpp: int) -> list[Action]:
    """Return the ordered actions of a rank.

    >>> ["".join(f"{a.phase}{a.microbatch}" for a in _rank_actions(r, 2, 3, 1)) for r in (0, 1)]
    ['F0F1B0F2B1B2', 'F0B0F1B1F2B2']
    """
    return alternate(*single_stage_passes(num_microbatches), pp - 1 - pp_rank)


def _overlapped_actions(_pp_rank: int, _pp: int, num_microbatches: int, _vpp: int) -> list[Action]:
    """Return the ordered actions of the only rank, one forward pass ahead."""
    return alternate(*single_stage_passes(num_microbatches), 1)


def _in_flight(pp_rank: int, pp: int, num_microbatches: int, _vpp: int) -> int:
    # Warm-up fills the pipeline behind the rank; then a backward precedes each further forward.
    return min(pp - pp_rank, num_microbatches)


def _pytorch_refusal(pp: int, num_microbatches: int, vpp: int) -> str | None:
    """Return the refusal of Schedule1F1B (torch.distributed.pipelining, PyTorch 2.5 to 2.13)."""
    if num_microbatches < pp:
        return f"num_microbatches={num_microbatches} is below pp={pp}; allowed: {pp} or more"
    return refuse_virtual_stages(pp, num_microbatches, vpp)


ONE_F_ONE_B = Schedule(
    name="1f1b",
    title="one forward, one backward; at most p - r microbatches in flight on rank r",
    source="Narayanan et al. 2019, PipeDream (SOSP 2019); flushed form: arXiv 2104.04473, sec. 2.2",
    rank_actions=_rank_actions,
    in_flight=_in_flight,
    around_last=all_passes,
    bubble_fraction=plain_bubble_fraction,
    refusal=refuse_virtual_stages,
    warmup=lambda pp_rank, pp, _count, _vpp: pp - 1 - pp_rank,
)

# Without a pipeline one forward pass runs ahead; each later one overlaps the backward pass of the
# previous microbatch (`combined_1f1b_schedule_for_no_pipelining`, megatron/core/pipeline_parallel/
# combined_1f1b.py of core 0.16); Megatron-Core has F/B overlap in a pipeline only with vpp > 1.
OVERLAPPED_ONE_F_ONE_B = ONE_F_ONE_B._replace(
    rank_actions=_overlapped_actions,
    in_flight=lambda _rank, _pp, count, _vpp: min(2, count),
    pairs=lambda _rank, _pp, count, _vpp: steady_pairs(1, count),
    warmup=lambda *_size: 1,
    refusal=lambda pp, count, vpp: (
        OVERLAP_REFUSAL.format(pp=pp) if pp > 1 else refuse_virtual_stages(pp, count, vpp)
    ),
)

PYTORCH_ONE_F_ONE_B = ONE_F_ONE_B._replace(refusal=_pytorch_refusal)
