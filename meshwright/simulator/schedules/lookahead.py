"""All-gathers of FSDP virtual stages by PyTorch's pipeline runtime, which keeps the next few."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.simulator.schedules.actions import Action, Phase
from meshwright.simulator.schedules.periodic import Periodic

# max_active_stages of _add_unshard_reshard (torch.distributed.pipelining.schedules, PyTorch 2.13)
MAX_ACTIVE_STAGES = 3


class Refetches(NamedTuple):
    """Repeated all-gathers of a virtual stage in a step, as the runtime had resharded it.

    Args:
        after_forward: Those whose previous pass was a forward pass.
        after_backward: Those whose previous pass was a backward pass.
    """

    after_forward: int = 0
    after_backward: int = 0


NO_REFETCHES = Refetches()


def next_virtual_stages(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    """Return, for each action of a rank, the virtual stages that run next, soonest first.

    They are unsharded before the action, and all others resharded.

    >>> next_virtual_stages([Action(Phase.FORWARD, each, 0) for each in (0, 1, 2, 3)])
    [(0, 1, 2), (1, 2, 3), (2, 3), (3,)]
    """
    coming: list[int] = []
    upcoming: list[tuple[int, ...]] = []
    for action in reversed(actions):
        if not coming or coming[0] != action.virtual_stage:
            if action.virtual_stage in coming:
                coming.remove(action.virtual_stage)
            coming.insert(0, action.virtual_stage)
            upcoming.append(tuple(coming[:MAX_ACTIVE_STAGES]))
        else:
            upcoming.append(upcoming[-1])
    return upcoming[::-1]


def refetched(actions: Sequence[Action], num_virtual_stages: int) -> list[bool]:
    """Return, for each action, whether its virtual stage was resharded since its previous pass.

    >>> order = [Action(Phase.FORWARD, each, 0) for each in (0, 1, 2, 3, 0)]
    >>> refetched(order, 4)
    [False, False, False, False, True]
    """
    if num_virtual_stages <= MAX_ACTIVE_STAGES:
        return [False] * len(actions)
    active: set[int] = set()  # unsharded by an earlier pass, and not resharded since
    passed: set[int] = set()
    refetches = []
    for action, gathered in zip(actions, next_virtual_stages(actions), strict=True):
        active.intersection_update(gathered)
        refetches.append(action.virtual_stage in passed and action.virtual_stage not in active)
        passed.add(action.virtual_stage)
        active.add(action.virtual_stage)
    return refetches


def count_refetches(actions: Sequence[Action], num_virtual_stages: int) -> list[Refetches]:
    """Return the repeated all-gathers of each virtual stage of a rank in a step."""
    if isinstance(actions, Periodic):
        # All periods but the outer ones have the same neighbours, so that counts grow linearly.
        once, twice = (
            count_refetches(actions.repeated(copies), num_virtual_stages) for copies in (1, 2)
        )
        return [
            Refetches(*(a + (b - a) * (actions.copies - 1) for a, b in zip(*each, strict=True)))
            for each in zip(once, twice, strict=True)
        ]
    counts = [[0, 0] for _ in range(num_virtual_stages)]
    before: dict[int, Phase] = {}
    for action, again in zip(actions, refetched(actions, num_virtual_stages), strict=True):
        if again:
            counts[action.virtual_stage][before[action.virtual_stage] is Phase.BACKWARD] += 1
        before[action.virtual_stage] = action.phase
    return [Refetches(*each) for each in counts]
