"""Units that a rank of PyTorch's pipeline runtimes finds gathered in each pass.

Such a runtime keeps the units of a virtual stage gathered from a backward pass to the next pass.
One that has several virtual stages a rank gathers those that come next ahead of their passes, and
frees the others.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from meshwright.simulator.schedules import Action, Phase, next_virtual_stages


class UnitsFound(IntEnum):
    """What a pass finds of its units: not all of them, all, or all in their gathered buffers."""

    APART = 0
    WHOLE = 1
    AHEAD = 2


class PassState(NamedTuple):
    """A pass of a rank, whatever the sizes.

    Args:
        found: What it finds of its virtual stage.
        freed: Virtual stages whose units are freed before it.
        fetched: Virtual stages whose units are gathered ahead of their passes, before it.
    """

    found: UnitsFound
    freed: tuple[int, ...]
    fetched: tuple[int, ...]


def pass_states(
    actions: Sequence[Action], num_virtual_stages: int, *, reshards: bool
) -> list[PassState]:
    """Return the states of a rank's passes, in order.

    Args:
        actions: What it runs.
        num_virtual_stages: Its virtual stages.
        reshards: Units are freed after a forward pass.
    """
    after = {
        Phase.FORWARD: UnitsFound.APART if reshards else UnitsFound.WHOLE,
        Phase.BACKWARD: UnitsFound.WHOLE,
    }
    found = [UnitsFound.APART] * num_virtual_stages
    # Only the runtime of several stages a rank inserts gathers (`_add_unshard_reshard`, called by
    # _PipelineScheduleRuntime); those of one stage leave them to fully_shard's hooks.
    coming = next_virtual_stages(actions) if num_virtual_stages > 1 else [()] * len(actions)
    gathered: tuple[int, ...] = ()
    states = []
    for (phase, virtual_stage, _), following in zip(actions, coming, strict=True):
        freed = tuple(each for each in gathered if each not in following)
        fetched = tuple(each for each in following if each not in gathered)
        gathered = following
        for each in fetched:
            found[each] = UnitsFound.AHEAD
        states.append(PassState(found[virtual_stage], freed, fetched))
        # A pipeline's stages do not reshard after backward: the next microbatch wants the weights.
        found[virtual_stage] = after[phase]
    return states
