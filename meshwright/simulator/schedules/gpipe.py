"""GPipe: all forward passes, then all backward passes."""

from meshwright.simulator.schedules.actions import (
    Action,
    Schedule,
    all_passes,
    plain_bubble_fraction,
    refuse_virtual_stages,
    single_stage_passes,
)


def _rank_actions(_pp_rank: int, pp: int, num_microbatches: int, _vpp: int) -> list[Action]:
    """Return the ordered actions of a rank.

    >>> " ".join(str(action) for action in _rank_actions(0, 2, 2, 1))
    'F0.0 F0.1 B0.0 B0.1'
    """
    forward, backward = single_stage_passes(num_microbatches)
    # Without a pipeline no framework has a schedule: gradients of microbatches are accumulated one
    # by one (`forward_backward_no_pipelining`, megatron/core/pipeline_parallel/schedules.py).
    if pp == 1:
        return [action for pair in zip(forward, backward, strict=True) for action in pair]
    return forward + backward


def _in_flight(_pp_rank: int, pp: int, num_microbatches: int, _vpp: int) -> int:
    # Gradient accumulation without a pipeline frees each microbatch before the next one begins.
    return 1 if pp == 1 else num_microbatches


GPIPE = Schedule(
    name="gpipe",
    title="all forward passes, then all backward passes; every microbatch in flight",
    source="Huang et al. 2019, GPipe (arXiv 1811.06965)",
    rank_actions=_rank_actions,
    in_flight=_in_flight,
    around_last=all_passes,
    bubble_fraction=plain_bubble_fraction,
    refusal=refuse_virtual_stages,
    keeps_sent_buffers=True,
)
