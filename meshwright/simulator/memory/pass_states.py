"""What a rank of PyTorch's pipeline runtimes finds gathered in each pass, and its live bytes then.

Such a runtime keeps the units of a virtual stage gathered from a backward pass to the next pass.
One that has several virtual stages a rank gathers those that come next ahead of their passes, and
frees the others.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from meshwright.simulator.memory.rank import (
    KeptUnits,
    PassPeak,
    PassPeaks,
    RankMemory,
    VirtualStageMemory,
)
from meshwright.simulator.memory.sent_messages import sent_bytes_until_end, sent_bytes_until_next
from meshwright.simulator.schedules import Action, Phase, next_virtual_stages


class LiveBytes(NamedTuple):
    """Live bytes beside the static ones: *activations* stay, *buffers* are a momentary need.

    ``absent`` bytes of gradients that count as static are not there.
    """

    activations: int
    buffers: int
    absent: int = 0

    @property
    def moving_bytes(self) -> int:
        """Live bytes beside the static ones."""
        return self.activations + self.buffers - self.absent


class PassKind(IntEnum):
    """A pass: forward, the first backward of its virtual stage, another backward."""

    FORWARD = 0
    FIRST_BACKWARD = 1
    BACKWARD = 2


class UnitsFound(IntEnum):
    """What a pass finds of its units: not all of them, all, or all in their gathered buffers."""

    APART = 0
    WHOLE = 1
    AHEAD = 2


class PassState(NamedTuple):
    """A pass of a rank, whatever the sizes.

    Args:
        kind: What it is.
        virtual_stage: Of which virtual stage.
        found: What it finds of that.
        is_last: No backward pass of that follows.
        freed: Virtual stages whose units are freed before it.
        fetched: Virtual stages whose units are gathered ahead of their passes, before it.
    """

    kind: PassKind
    virtual_stage: int
    found: UnitsFound
    is_last: bool
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
    found, left = (
        [UnitsFound.APART] * num_virtual_stages,
        [len(actions) // (2 * num_virtual_stages)] * num_virtual_stages,
    )
    backward = [PassKind.FIRST_BACKWARD] * num_virtual_stages
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
        kind = PassKind.FORWARD
        if phase is Phase.BACKWARD:
            kind, backward[virtual_stage] = backward[virtual_stage], PassKind.BACKWARD
            left[virtual_stage] -= 1
        is_last = phase is Phase.BACKWARD and not left[virtual_stage]
        states.append(PassState(kind, virtual_stage, found[virtual_stage], is_last, freed, fetched))
        # A pipeline's stages do not reshard after backward: the next microbatch wants the weights.
        found[virtual_stage] = after[phase]
    return states


def kept_levels(
    memory: RankMemory, actions: Sequence[Action], states: Sequence[PassState]
) -> Iterator[tuple[LiveBytes, LiveBytes]]:
    """Yield what lives in each pass and after it on a rank whose units are kept between passes.

    Args:
        memory: Its sizes; each virtual stage has ``kept_units``.
        actions: What it runs.
        states: The states of that.
    """
    stages = [
        (stage, kept) for stage in memory.virtual_stages if (kept := stage.kept_units) is not None
    ]
    moments = [_moments(stage, kept) for stage, kept in stages]
    saved = memory.buffers_bytes
    absent = sum(stage.late_gradients_bytes for stage, _ in stages)
    gathered, elsewhere = [0] * len(stages), 0
    sent = (
        sent_bytes_until_end(actions, memory.sent)
        if memory.holds_sent
        else sent_bytes_until_next(actions, memory.sent[0])
    )
    for index, (kind, number, found, is_last, freed, fetched) in enumerate(states):
        for each in freed:
            elsewhere, gathered[each] = elsewhere - gathered[each], 0
        for each in fetched:
            gathered[each] = stages[each][1].ahead_bytes
            elsewhere += gathered[each]
        elsewhere -= gathered[number]  # the workspaces of its own passes have it
        stage, kept = stages[number]
        if kind is PassKind.FORWARD:
            saved += stage.saved_bytes
        elif kind is PassKind.FIRST_BACKWARD:
            absent -= stage.late_gradients_bytes
        buffers, missing = moments[number][found][kind]
        during = LiveBytes(saved + sent[index], elsewhere + buffers, absent + missing)
        reduction_bytes = reduced_bytes = 0
        if kind is PassKind.FORWARD:
            gathered[number] = stage.after_forward_bytes
        else:
            saved -= stage.saved_bytes
            gathered[number] = stage.after_backward_bytes
            if is_last:
                reduction_bytes, reduced_bytes = kept.reduction
        elsewhere += gathered[number]
        yield during, LiveBytes(saved + sent[index + 1], elsewhere + reduction_bytes, absent)
        absent += reduced_bytes


def _moments(stage: VirtualStageMemory, kept: KeptUnits) -> tuple[PassPeaks[int], ...]:
    """Return the fullest instants of passes by what they find."""
    backward = PassPeak(stage.backward_workspace_bytes, 0)
    first = stage.first_backward or backward
    apart = PassPeaks(PassPeak(stage.forward_workspace_bytes, 0), first, backward)
    return (apart, kept.whole, kept.ahead)
