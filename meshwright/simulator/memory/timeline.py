"""Live bytes of a pipeline rank, action by action, and their peak."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.graph import Size, larger, largest
from meshwright.simulator.memory.counts import (
    ABSENT,
    ACTIVATIONS,
    DYNAMIC,
    MESSAGES,
    NEEDED,
    NO_PAIRS,
    NUM_SIZES,
    PassSize,
    RankOrder,
    RankPasses,
    needed_peaks,
    pairs_of,
    pass_counts,
    pass_sizes,
)
from meshwright.simulator.memory.held_messages import MODULE_TENSORS, max_live_messages
from meshwright.simulator.memory.rank import RankMemory, VirtualStageMemory
from meshwright.simulator.schedules import Action

MOST_EXACT = 2**62
"""Sums of whole numbers below it fit into 64 bits."""

RanAction = tuple[Action, int, int]
"""An action with its start and end in picoseconds."""


class MemoryEvent(NamedTuple):
    """A change of a rank's live bytes, as in `_Levels`, with its time."""

    time_ps: int
    moment: str
    activations_bytes: int
    buffers_bytes: int
    action: Action | None = None
    absent_bytes: int = 0

    @property
    def dynamic_bytes(self) -> int:
        """Live bytes beside the static ones."""
        return self.activations_bytes + self.buffers_bytes - self.absent_bytes


class _Levels(NamedTuple):
    """Live bytes beyond the static ones, during each action and after it.

    *activations* stay, *buffers* are a momentary need; *absent* bytes of gradients that count as
    static are not there.
    """

    activations: NDArray[np.int64]
    buffers: NDArray[np.int64]
    absent: NDArray[np.int64]

    @classmethod
    def of(cls, memory: RankMemory, actions: Sequence[Action], pairs: range) -> "_Levels":
        """Return the levels of a rank."""
        order, stages = _order_of(memory, pairs)
        counts = pass_counts(order, RankPasses.of(actions))
        sizes = np.zeros((3, order.width), object)
        for kind, stage in enumerate(stages):
            first, found = NUM_SIZES * kind, pass_sizes(stage)
            activations, buffers, absent = sizes[:, first : first + NUM_SIZES]
            for size, size_bytes in enumerate(found[: PassSize.FORWARD]):
                if size in ACTIVATIONS:
                    activations[size] = size_bytes
                elif size in ABSENT:
                    absent[size] = -size_bytes  # counted as not there
                else:
                    buffers[size] = size_bytes
            needed = needed_peaks(stage)
            buffers[PassSize.FORWARD :] = [peak.buffers_bytes for peak in needed]
            absent[PassSize.FORWARD :] = [peak.absent_bytes for peak in needed]
        if pairs:
            each = [memory.overlapped_bytes[pair] for pair in pairs_of(len(stages))]
            sizes[1, len(stages) * NUM_SIZES :] = each
        # Python integers where 64 bits might overflow.
        most = np.abs(sizes).max() * int(np.abs(counts).sum(axis=1).max())
        levels = counts @ (sizes if most >= MOST_EXACT else sizes.astype(np.int64)).T
        levels[:, 0] += memory.buffers_bytes
        return cls(*levels.T)


def _order_of(memory: RankMemory, pairs: range) -> tuple[RankOrder, Sequence[VirtualStageMemory]]:
    """Return the order of a rank's passes, and its different virtual stages."""
    stages = memory.virtual_stages
    # What a pair needs follows from more than the sizes of either.
    indices = {stage: place for place, stage in enumerate(dict.fromkeys(stages))}
    kinds = range(len(stages)) if pairs else map(indices.__getitem__, stages)
    order = RankOrder(
        kinds=tuple(kinds),
        place=memory.p2p_position,
        moves_states=any(
            each.after_forward_bytes or each.after_backward_bytes or each.first_backward is not None
            for each in stages
        ),
        keeps_units=stages[0].kept_units is not None,
        reshards=memory.reshards,
        sums=any(stage.last_backward is not None for stage in stages),
        keeps_sent_buffers=memory.keeps_sent_buffers,
        pairs=pairs,
    )
    return order, stages if pairs else [*indices]


def dynamic_upper_bound(
    stages: Sequence[Mapping[PassSize, Size]], in_flight: tuple[Size, Size], messages: Size
) -> Size:
    """Return an upper bound of a rank's dynamic bytes, in whatever order its passes run.

    Args:
        stages: The `pass_sizes` of its virtual stages, none of which keeps units between passes:
            those that are `DYNAMIC`, or `DYNAMIC_WITHOUT_STATES` where passes change no states.
        in_flight: The most of its passes that are in flight, and of those through the last stage.
        messages: Upper bound of its p2p buffers.
    """
    each, others = ({id(stage): stage for stage in some} for some in (stages, stages[:-1]))
    last = stages[-1][PassSize.SAVED]
    # The last stage may have few passes in flight: only its surplus counts for those.
    saved = largest(stage[PassSize.SAVED] for stage in (others or each).values())
    kept = in_flight[0] * saved + in_flight[1] * larger(last - saved, 0 * saved)
    needed = largest(
        size for stage in each.values() for name, size in stage.items() if name in NEEDED
    )
    sent = largest(stage[size] for stage in each.values() for size in MESSAGES)
    gathered: Size = 0
    for stage in stages:
        if PassSize.AFTER_FORWARD in stage:
            after = stage[PassSize.AFTER_FORWARD], stage[PassSize.AFTER_BACKWARD]
            # All stages count, as any may keep its units gathered while another runs.
            gathered = gathered + larger(*after)
    return kept + larger(needed, 0 * saved) + gathered + messages * sent


def peak_upper_bound(memory: RankMemory, in_flight: tuple[int, int], larger_by: int) -> int | None:
    """Return an upper bound of a rank's peak, in whatever order its passes run.

    Args:
        memory: Sizes of the rank.
        in_flight: The most of its passes that are in flight, and of those through the last stage.
        larger_by: By how many microbatches groups are larger than the pipeline.

    Returns:
        None where gathered units are kept between passes, or passes overlap.
    """
    stages = memory.virtual_stages
    if stages[0].kept_units is not None or memory.overlapped_bytes:
        return None
    messages = 0 if memory.p2p_position is None else max_live_messages(len(stages), larger_by)
    sizes = {stage: pass_sizes(stage) for stage in stages}
    named = {stage: {name: each[name] for name in DYNAMIC} for stage, each in sizes.items()}
    dynamic = dynamic_upper_bound([named[stage] for stage in stages], in_flight, messages)
    static = memory.static_bytes + memory.buffers_bytes
    return static + max(int(dynamic), memory.update_temporary_bytes)


def update_level(memory: RankMemory) -> tuple[int, int, int]:
    """Return activations, buffers and absent bytes during the optimizer's update."""
    reduced = sum(pass_sizes(stage)[PassSize.REDUCED] for stage in memory.virtual_stages)
    # Modules keep their last input and its gradient over the step's end.
    module_inputs = 0
    if memory.p2p_position is not None:
        module_inputs = sum(MODULE_TENSORS * int(each.gradient) for each in memory.sent)
    return memory.buffers_bytes + module_inputs, memory.update_temporary_bytes, int(reduced)


def memory_timeline(
    memory: RankMemory, passes: Sequence[RanAction], update_ps: int, pairs: range = NO_PAIRS
) -> list[MemoryEvent]:
    """Return the live bytes of a rank, beyond its static ones, at each action of a step.

    Args:
        memory: The rank's sizes.
        passes: Each action with its start and end in picoseconds, in order.
        update_ps: When the optimizer starts.
        pairs: Positions of forward passes that overlapped with the backward pass behind them.
    """
    levels = _Levels.of(memory, [action for action, _, _ in passes], pairs)
    rows = zip(*(column.tolist() for column in levels), strict=True)
    events = []
    for row, level in enumerate(rows):
        # Even rows are during an action, odd ones after it.
        events.append(_pass_event(passes[row // 2], level, is_over=row % 2 == 1))
    return [*events, _event(update_ps, "optimizer", update_level(memory))]


class PeriodGrowth(NamedTuple):
    """Activations that a rank keeps beyond those of its passes, from an action on."""

    first: int
    size_bytes: int


NO_GROWTH = PeriodGrowth(0, 0)


def peak_event(
    memory: RankMemory,
    actions: Sequence[Action],
    ran: Callable[[int], RanAction],
    update_ps: int,
    pairs: range = NO_PAIRS,
    *,
    growth: PeriodGrowth = NO_GROWTH,
) -> MemoryEvent:
    """Return the first peak of `memory_timeline`.

    Args:
        memory: The rank's sizes.
        actions: Its passes, in order.
        ran: Returns the action at a position with its times.
        update_ps: When the optimizer starts.
        pairs: Positions of forward passes that overlapped with the backward pass behind them.
        growth: Bytes that periods excluded from *actions* leave alive.
    """
    activations, buffers, absent = _Levels.of(memory, actions, pairs)
    activations[2 * growth.first :] += growth.size_bytes  # two rows of each pass
    row = int((activations + buffers - absent).argmax())
    level = int(activations[row]), int(buffers[row]), int(absent[row])
    event = _pass_event(ran(row // 2), level, is_over=row % 2 == 1)
    # The update may be the peak: no activations, but its temporaries.
    update = _event(update_ps, "optimizer", update_level(memory))
    return max(event, update, key=attrgetter("dynamic_bytes"))


def _pass_event(ran: RanAction, level: tuple[int, int, int], *, is_over: bool) -> MemoryEvent:
    action, start_ps, end_ps = ran
    time_ps, moment = (end_ps, f"after {action}") if is_over else (start_ps, str(action))
    return _event(time_ps, moment, level, action)


def _event(
    time_ps: int, moment: str, level: tuple[int, int, int], action: Action | None = None
) -> MemoryEvent:
    activations, buffers, absent = level
    # Behind blocks whose kept tensors are gone a pass may need less than they were: what is kept is
    # less, no buffer.
    less = min(0, buffers)
    return MemoryEvent(time_ps, moment, activations + less, buffers - less, action, absent)
