"""The live bytes of a pipeline rank, action by action, and their peak."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.simulator.memory.held_messages import (
    held_between_steps,
    held_messages,
    most_messages,
)
from meshwright.simulator.memory.pass_states import LiveBytes, PassState, kept_levels, pass_states
from meshwright.simulator.memory.rank import PassPeak, RankMemory
from meshwright.simulator.schedules import Action, Phase

RanAction = tuple[Action, int, int]
"""An action with its start and end in picoseconds."""


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


NO_PAIRS = range(0)


def pass_levels(
    memory: RankMemory,
    actions: Sequence[Action],
    states: Sequence[PassState] | None = None,
    pairs: range = NO_PAIRS,
) -> Iterator[tuple[LiveBytes, LiveBytes]]:
    """Yield the live bytes of a rank in each action and after it, beside its static ones.

    Args:
        memory: The rank's sizes.
        actions: What it runs, in order.
        states: The states of that, if they are known.
        pairs: Where forward passes are in it that run beside the backward pass behind them.
    """
    if memory.virtual_stages[0].kept_units is None:
        levels = _plain_levels(memory, actions)
        return _paired_levels(memory, actions, levels, pairs) if pairs else levels
    if states is None:
        states = pass_states(actions, len(memory.virtual_stages), reshards=memory.reshards)
    return kept_levels(memory, actions, states)


class _Held(NamedTuple):
    """What a rank that keeps no units holds between its passes, beside what is saved for backward.

    ``gathered`` weights and ``late`` gradients, which no pass has made yet, are by virtual stage.
    """

    gathered: tuple[int, ...]
    late: tuple[int, ...]
    reduced: int

    @classmethod
    def first(cls, memory: RankMemory) -> "_Held":
        """Return what it holds before its first pass."""
        stages = memory.virtual_stages
        return cls((0,) * len(stages), tuple(stage.late_gradients_bytes for stage in stages), 0)


class _Pass(NamedTuple):
    """A pass of such a rank, and its levels beside what is saved.

    ``keeps`` is saved before it, ``frees`` no more after it.
    """

    keeps: int
    during: LiveBytes
    frees: int
    after: LiveBytes
    held: _Held

    @classmethod
    def of(cls, memory: RankMemory, held: _Held, action: Action, *, is_last: bool) -> "_Pass":
        """Return the pass of *action* after which a rank that *held* something holds `held`.

        Args:
            memory: The rank's sizes.
            held: What it held before.
            action: The pass.
            is_last: Whether it is the last backward pass of its virtual stage.
        """
        index, is_forward = action.virtual_stage, action.phase is Phase.FORWARD
        stage, (gathered, late, reduced) = memory.virtual_stages[index], held
        moment, gathers = PassPeak(stage.forward_workspace_bytes, 0), stage.after_forward_bytes
        if not is_forward:
            moment, gathers = (
                PassPeak(stage.backward_workspace_bytes, 0),
                stage.after_backward_bytes,
            )
            if late[index] and stage.first_backward is not None:
                moment = stage.first_backward
            elif is_last and stage.last_backward is not None:
                moment = stage.last_backward
            late = (*late[:index], 0, *late[index + 1 :])
        absent = sum(late) + reduced
        elsewhere = sum(gathered) - gathered[index]  # the workspace of its own pass has it
        during = LiveBytes(0, moment.buffers_bytes + elsewhere, absent + moment.absent_bytes)
        reduced += stage.reduced_gradients_bytes if is_last else 0
        gathered = (*gathered[:index], gathers, *gathered[index + 1 :])
        after = LiveBytes(0, sum(gathered), sum(late) + reduced)
        saved = stage.saved_bytes
        keeps, frees = (saved, 0) if is_forward else (0, saved)
        return cls(keeps, during, frees, after, _Held(gathered, late, reduced))


def _last_backward(actions: Sequence[Action], num_virtual_stages: int) -> set[int]:
    """Return the positions of the last backward pass of each virtual stage."""
    last: dict[int, int] = {}
    for position in reversed(range(len(actions))):
        phase, index, _ = actions[position]
        if phase is Phase.BACKWARD:
            last.setdefault(index, position)
        if len(last) == num_virtual_stages:
            break
    return set(last.values())


def _passes(memory: RankMemory, actions: Sequence[Action]) -> Iterator[_Pass]:
    """Yield the passes of a rank that keeps no units between them; those alike are one record."""
    held = _Held.first(memory)
    last = _last_backward(actions, len(memory.virtual_stages))
    # By identity: what is held between passes hashes slowly, and is the same again and again.
    known: dict[tuple[int, Phase, int, bool], _Pass] = {}
    alike = {held: held}
    for position, (phase, index, _) in enumerate(actions):
        key = (id(held), phase, index, position in last)
        one = known.get(key)
        if one is None:
            one = _Pass.of(memory, held, actions[position], is_last=position in last)
            one = known[key] = one._replace(held=alike.setdefault(one.held, one.held))
        yield one
        held = one[4]


def _plain_levels(
    memory: RankMemory, actions: Sequence[Action]
) -> Iterator[tuple[LiveBytes, LiveBytes]]:
    """Yield the levels of a rank that keeps no units between its passes."""
    saved = memory.buffers_bytes
    held = _held(memory, actions)
    passes = zip(_passes(memory, actions), held, held[1:], strict=False)
    for (keeps, during, frees, after, _), holds, left in passes:
        saved += keeps
        full = during._replace(activations=saved + holds)
        saved -= frees
        yield full, after._replace(activations=saved + left)


def _held(memory: RankMemory, actions: Sequence[Action]) -> list[int]:
    """Return what a runtime holds of messages in each action, and after the last."""
    if memory.held_at is None:
        return [0] * (len(actions) + 1)
    held = held_messages(actions, memory.sent, memory.held_at)
    return [*held, held_between_steps(memory.sent)]


def _paired_levels(
    memory: RankMemory,
    actions: Sequence[Action],
    levels: Iterator[tuple[LiveBytes, LiveBytes]],
    pairs: range,
) -> Iterator[tuple[LiveBytes, LiveBytes]]:
    """Yield *levels* as they are where passes run beside each other: one level for both of a pair.

    Until both end, what the forward pass keeps is counted with what it needs.
    """
    full = LiveBytes(0, 0, 0)
    for position, (during, after) in enumerate(levels):
        if position in pairs:
            made, gone = (actions[place].virtual_stage for place in (position, position + 1))
            before = during.activations - memory.virtual_stages[made].saved_bytes
            full = LiveBytes(before, memory.pairs_bytes[made, gone], during.absent)
            yield full, full
        elif position - 1 in pairs:
            yield full, after
        else:
            yield during, after


def _fullest_levels(
    memory: RankMemory, actions: Sequence[Action], pairs: range
) -> Iterator[tuple[int, tuple[LiveBytes, LiveBytes]]]:
    """Yield the position and the levels of passes of which one is the first fullest.

    Of passes alike it is the first of those that find most saved.
    """
    if memory.virtual_stages[0].kept_units is not None or pairs:
        yield from enumerate(pass_levels(memory, actions, pairs=pairs))
        return
    saved, held = memory.buffers_bytes, _held(memory, actions)
    most: dict[int, tuple[int, int, int, _Pass]] = {}
    for position, (one, holds) in enumerate(zip(_passes(memory, actions), held, strict=False)):
        saved += one[0]
        found, live = most.get(id(one)), saved + holds
        saved -= one[2]
        if found is None or live > found[0]:
            most[id(one)] = live, position, saved, one
    for live, position, left, one in sorted(most.values(), key=lambda found: found[1]):
        during = one.during._replace(activations=live)
        yield position, (during, one.after._replace(activations=left + held[position + 1]))


def most_bytes(memory: RankMemory, num_passes: int, larger: int) -> int | None:
    """Return no fewer bytes than a rank's fullest instant has, in whatever order its passes run.

    Args:
        memory: The rank's sizes.
        num_passes: The most of its passes that are in flight.
        larger: By how many microbatches groups are larger than the pipeline.

    Returns:
        None where gathered units are kept between passes, or passes run beside each other.
    """
    stages = memory.virtual_stages
    if stages[0].kept_units is not None or memory.pairs_bytes:
        return None
    needed = [0]
    for stage in stages:
        needed += stage.forward_workspace_bytes, stage.backward_workspace_bytes
        apart = stage.first_backward, stage.last_backward
        needed += [peak.total_bytes for peak in apart if peak is not None]
    passes = num_passes * max(stage.saved_bytes for stage in stages) + max(needed)
    gathered = sum(max(each.after_forward_bytes, each.after_backward_bytes) for each in stages)
    messages = 0 if memory.held_at is None else most_messages(len(stages), larger)
    held = memory.buffers_bytes + gathered + messages * max(map(max, memory.sent))
    return memory.static_bytes + held + max(passes, memory.update_temporary_bytes)


def update_level(memory: RankMemory) -> LiveBytes:
    """Return what lives beside the static bytes when the optimizer runs."""
    kept = (stage.kept_units for stage in memory.virtual_stages)
    reduced = sum(units.reduction.absent_bytes for units in kept if units is not None)
    reduced += sum(stage.reduced_gradients_bytes for stage in memory.virtual_stages)
    left = 0 if memory.held_at is None else held_between_steps(memory.sent)
    return LiveBytes(memory.buffers_bytes + left, memory.update_temporary_bytes, reduced)


def memory_timeline(
    memory: RankMemory, passes: Sequence[RanAction], update_ps: int, pairs: range = NO_PAIRS
) -> list[MemoryEvent]:
    """Return the live bytes of a rank, beyond its static ones, at each action of a step.

    Args:
        memory: The rank's sizes.
        passes: Each action with its start and end in picoseconds, in order.
        update_ps: When the optimizer starts.
        pairs: Where among them forward passes are that ran beside the backward pass behind them.
    """
    levels = pass_levels(memory, [action for action, _, _ in passes], pairs=pairs)
    return _events(memory, zip(passes, levels, strict=True), update_ps)


def fullest_moments(
    memory: RankMemory,
    actions: Sequence[Action],
    ran: Callable[[int], RanAction],
    update_ps: int,
    pairs: range = NO_PAIRS,
) -> list[MemoryEvent]:
    """Return a few events of `memory_timeline` in order, among them the first fullest instant.

    Args:
        memory: The rank's sizes.
        actions: What it runs, in order.
        ran: Returns the action at a position with its times.
        update_ps: When the optimizer starts.
        pairs: Where among them forward passes are that ran beside the backward pass behind them.
    """
    levels = _fullest_levels(memory, actions, pairs)
    return _events(memory, ((ran(position), pair) for position, pair in levels), update_ps)


def _events(
    memory: RankMemory,
    ran: Iterable[tuple[RanAction, tuple[LiveBytes, LiveBytes]]],
    update_ps: int,
) -> list[MemoryEvent]:
    events: list[MemoryEvent] = []
    for (action, start_ps, end_ps), (during, after) in ran:
        events.append(_event(start_ps, str(action), during, action))
        events.append(_event(end_ps, f"after {action}", after, action))
    events.append(_event(update_ps, "optimizer", update_level(memory)))
    return events


def _event(
    time_ps: int, moment: str, level: LiveBytes, action: Action | None = None
) -> MemoryEvent:
    # Behind blocks whose kept tensors are gone a pass may need less than they were: what is kept is
    # less, no buffer.
    less = min(0, level.buffers)
    kept, buffers = level.activations + less, level.buffers - less
    return MemoryEvent(time_ps, moment, kept, buffers, action, level.absent)


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
