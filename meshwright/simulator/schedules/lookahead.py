"""Which virtual stages of a rank PyTorch's pipeline runtime keeps gathered: those that run next."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.simulator.schedules.actions import Action, Phase
from meshwright.simulator.schedules.periodic import Periodic

# max_active_stages of _add_unshard_reshard (torch.distributed.pipelining.schedules, PyTorch 2.13)
MOST_GATHERED = 3


class Refetches(NamedTuple):
    """How often a virtual stage is gathered anew in a step because it was not among the next.

    Args:
        after_forward: The pass before was a forward pass.
        after_backward: It was a backward pass.
    """

    after_forward: int = 0
    after_backward: int = 0


NO_REFETCHES = Refetches()


def next_virtual_stages(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    """Return for each action of a rank the virtual stages that run from there on, soonest first.

    They are gathered before the action, and all others freed.

    >>> next_virtual_stages([Action(Phase.FORWARD, each, 0) for each in (0, 1, 2, 3)])
    [(0, 1, 2), (1, 2, 3), (2, 3), (3,)]
    """
    coming: list[int] = []
    found: list[tuple[int, ...]] = []
    for action in reversed(actions):
        if not coming or coming[0] != action.virtual_stage:
            if action.virtual_stage in coming:
                coming.remove(action.virtual_stage)
            coming.insert(0, action.virtual_stage)
            found.append(tuple(coming[:MOST_GATHERED]))
        else:
            found.append(found[-1])
    return found[::-1]


def refetched(actions: Sequence[Action], num_virtual_stages: int) -> list[bool]:
    """Tell of each action whether its virtual stage was freed since its pass before.

    >>> order = [Action(Phase.FORWARD, each, 0) for each in (0, 1, 2, 3, 0)]
    >>> refetched(order, 4)
    [False, False, False, False, True]
    """
    if num_virtual_stages <= MOST_GATHERED:
        return [False] * len(actions)
    waiting: set[int] = set()  # passed, and not freed since
    passed: set[int] = set()
    found = []
    for action, gathered in zip(actions, next_virtual_stages(actions), strict=True):
        waiting.intersection_update(gathered)
        found.append(action.virtual_stage in passed and action.virtual_stage not in waiting)
        passed.add(action.virtual_stage)
        waiting.add(action.virtual_stage)
    return found


def count_refetches(actions: Sequence[Action], num_virtual_stages: int) -> list[Refetches]:
    """Return how often each virtual stage of a rank is gathered anew in a step."""
    if isinstance(actions, Periodic):
        # What comes next, and what came before, is the same in all periods but the outer ones.
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
