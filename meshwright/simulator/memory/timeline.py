"""The live bytes of a pipeline rank, action by action, and their peak."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.simulator.memory.pass_states import LiveBytes, PassState, kept_levels, pass_states
from meshwright.simulator.memory.rank import PassPeak, RankMemory
from meshwright.simulator.schedules import Action, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """The fullest instant of a rank: when, in which action, and what lives then."""

    total_bytes: int
    absent_bytes: int
    activations_bytes: int
    buffers_bytes: int
    time_ps: int
    moment: str
    action: Action | None


class MemoryEvent(NamedTuple):
    """A change of a rank's live bytes, as in `LiveBytes`, and when it happens."""

    time_ps: int
    moment: str
    activations_bytes: int
    buffers_bytes: int
    action: Action | None = None
    absent_bytes: int = 0

    @property
    def moving_bytes(self) -> int:
        """Live bytes beside the static ones."""
        return self.activations_bytes + self.buffers_bytes - self.absent_bytes


def pass_levels(
    memory: RankMemory, actions: Sequence[Action], states: Sequence[PassState] | None = None
) -> Iterator[tuple[LiveBytes, LiveBytes]]:
    """Yield the live bytes of a rank in each action and after it, beside its static ones.

    Args:
        memory: The rank's sizes.
        actions: What it runs, in order.
        states: The states of that, if they are known.
    """
    if memory.virtual_stages[0].kept_units is None:
        return _plain_levels(memory, actions)
    if states is None:
        states = pass_states(actions, len(memory.virtual_stages), reshards=memory.reshards)
    return kept_levels(memory, actions, states)


def _plain_levels(
    memory: RankMemory, actions: Sequence[Action]
) -> Iterator[tuple[LiveBytes, LiveBytes]]:
    """Yield the levels of a rank that keeps no units between its passes."""
    live = memory.message_buffers_bytes
    gathered: dict[int, int] = {}
    late = {index: stage.late_gradients_bytes for index, stage in enumerate(memory.virtual_stages)}
    last = {action.virtual_stage: action for action in actions if action.phase is Phase.BACKWARD}
    reduced = 0
    for action in actions:
        phase, index, _ = action
        stage = memory.virtual_stages[index]
        if phase is Phase.FORWARD:
            live += stage.saved_bytes
            moment = PassPeak(stage.forward_workspace_bytes)
        else:
            moment = PassPeak(stage.backward_workspace_bytes)
            if late.pop(index, 0) and stage.first_backward is not None:
                moment = stage.first_backward
            elif action == last[index] and stage.last_backward is not None:
                moment = stage.last_backward
        gathered.pop(index, None)  # the workspace of its own pass has it
        absent, elsewhere = sum(late.values()) + reduced, sum(gathered.values())
        during = LiveBytes(live, moment.buffers_bytes + elsewhere, absent + moment.absent_bytes)
        gathered[index] = stage.after_forward_bytes
        if phase is Phase.BACKWARD:
            gathered[index] = stage.after_backward_bytes
            live -= stage.saved_bytes
            if action == last[index]:
                reduced += stage.reduced_gradients_bytes
        absent = sum(late.values()) + reduced
        yield during, LiveBytes(live, sum(gathered.values()), absent)


def update_level(memory: RankMemory) -> LiveBytes:
    """Return what lives beside the static bytes when the optimizer runs."""
    kept = (stage.kept_units for stage in memory.virtual_stages)
    reduced = sum(units.reduction.absent_bytes for units in kept if units is not None)
    reduced += sum(stage.reduced_gradients_bytes for stage in memory.virtual_stages)
    return LiveBytes(memory.message_buffers_bytes, memory.update_temporary_bytes, reduced)


def memory_timeline(
    memory: RankMemory, passes: Iterable[tuple[Action, int, int]], update_ps: int
) -> list[MemoryEvent]:
    """Return the live bytes of a rank, beyond its static ones, at each action of a step.

    Args:
        memory: The rank's sizes.
        passes: Each action with its start and end in picoseconds, in order.
        update_ps: When the optimizer starts.
    """
    ran = list(passes)
    events: list[MemoryEvent] = []
    levels = pass_levels(memory, [action for action, _, _ in ran])
    for (action, start_ps, end_ps), (during, after) in zip(ran, levels, strict=True):
        events.append(_event(start_ps, str(action), during, action))
        events.append(_event(end_ps, f"after {action}", after, action))
    events.append(_event(update_ps, "optimizer", update_level(memory)))
    return events


def _event(
    time_ps: int, moment: str, level: LiveBytes, action: Action | None = None
) -> MemoryEvent:
    return MemoryEvent(time_ps, moment, level.activations, level.buffers, action, level.absent)


def memory_peak(memory: RankMemory, events: Iterable[MemoryEvent]) -> MemoryPeak:
    """Return the first fullest instant of a timeline."""
    # Of instants as full, `max` gives the first, so that the same step names the same tensor.
    fullest = max(events, key=lambda event: event.moving_bytes)
    return MemoryPeak(
        total_bytes=memory.static_bytes + fullest.moving_bytes,
        absent_bytes=fullest.absent_bytes,
        activations_bytes=fullest.activations_bytes,
        buffers_bytes=fullest.buffers_bytes,
        time_ps=fullest.time_ps,
        moment=fullest.moment,
        action=fullest.action,
    )
