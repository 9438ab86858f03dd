"""GPipe: all forward passes, then all backward passes."""

from simulator.schedules.actions import (
    Action,
    ActionLists,
    Phase,
    Schedule,
    plain_bubble_fraction,
    refuse_virtual_stages,
)


def gpipe(pp: int, num_microbatches: int, vpp: int = 1) -> ActionLists:
    """Return the GPipe order, one list per pipeline rank.

    >>> " ".join(str(action) for action in gpipe(2, 2)[0])
    'F0.0 F0.1 B0.0 B0.1'
    """
    assert vpp == 1
    forward = [Action(Phase.FORWARD, 0, index) for index in range(num_microbatches)]
    backward = [Action(Phase.BACKWARD, 0, index) for index in range(num_microbatches)]
    return [forward + backward for _ in range(pp)]


def _in_flight(_pp_rank: int, _pp: int, num_microbatches: int, _vpp: int) -> int:
    return num_microbatches


GPIPE = Schedule(
    name="gpipe",
    title="all forward passes, then all backward passes; every microbatch in flight",
    source="Huang et al. 2019, GPipe (arXiv 1811.06965)",
    actions=gpipe,
    in_flight=_in_flight,
    bubble_fraction=plain_bubble_fraction,
    refusal=refuse_virtual_stages,
)
