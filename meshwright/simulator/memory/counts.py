"""Live sizes of a rank in and after each pass, counted as one matrix.

Rows are candidates of the peak, in the order of the actions; columns are the sizes of the virtual
stages (`pass_sizes`), kind by kind. Rows times sizes are a memory timeline.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.graph import Size
from meshwright.simulator.memory.held_messages import (
    MODULE_TENSORS,
    PipelinePosition,
    live_message_counts,
)
from meshwright.simulator.memory.rank import PassPeak, VirtualStageMemory
from meshwright.simulator.schedules import Action, Phase, next_virtual_stages

Counts: TypeAlias = NDArray[np.int64]
NO_PAIRS = range(0)


class PassSize(IntEnum):
    """Sizes of a virtual stage: those that live between passes, then workspaces of passes."""

    SAVED = 0
    LATE = 1
    AFTER_FORWARD = 2
    AFTER_BACKWARD = 3
    FETCHED = 4
    REDUCTION = 5
    REDUCED = 6
    OUTPUT = 7
    GRADIENT = 8
    FORWARD = 9
    FIRST_BACKWARD = 10
    BACKWARD = 11
    LAST_BACKWARD = 18


NUM_SIZES = len([*range(PassSize.LAST_BACKWARD + 1)])
ACTIVATIONS = PassSize.SAVED, PassSize.OUTPUT, PassSize.GRADIENT
ABSENT = PassSize.LATE, PassSize.REDUCED
MESSAGES = PassSize.OUTPUT, PassSize.GRADIENT
NEEDED = PassSize.FORWARD, PassSize.FIRST_BACKWARD, PassSize.BACKWARD, PassSize.LAST_BACKWARD
DYNAMIC_WITHOUT_STATES = PassSize.SAVED, *MESSAGES, PassSize.FORWARD, PassSize.BACKWARD
DYNAMIC = PassSize.SAVED, PassSize.AFTER_FORWARD, PassSize.AFTER_BACKWARD, *MESSAGES, *NEEDED


def needed_peaks(stage: VirtualStageMemory) -> list[PassPeak[Size]]:
    """Return the peaks of passes through a virtual stage, from `PassSize.FORWARD` on.

    Forward, first and later backward of passes that gather FSDP units themselves, that find them
    gathered, and that find them in prefetch buffers; and the last backward.
    """
    nothing = 0 * stage.saved_bytes
    forward, backward = (
        PassPeak(each, nothing)
        for each in (stage.forward_workspace_bytes, stage.backward_workspace_bytes)
    )
    sharded = forward, stage.first_backward or backward, backward
    kept = stage.kept_units
    gathered = (
        (*sharded, *sharded, *sharded) if kept is None else (*sharded, *kept.whole, *kept.ahead)
    )
    return [*gathered, stage.last_backward or backward]


def pass_sizes(stage: VirtualStageMemory) -> list[Size]:
    """Return the sizes of a virtual stage as `PassSize` numbers them."""
    kept = stage.kept_units
    nothing = 0 * stage.saved_bytes
    return [
        stage.saved_bytes,
        stage.reallocated_gradients_bytes,
        stage.after_forward_bytes,
        stage.after_backward_bytes,
        nothing if kept is None else kept.ahead_bytes,
        nothing if kept is None else kept.reduction.buffers_bytes,
        stage.reduced_gradients_bytes if kept is None else kept.reduction.absent_bytes,
        *stage.sent,
        *(peak.total_bytes for peak in needed_peaks(stage)),
    ]


class RankOrder(NamedTuple):
    """Properties of a rank, other than its actions, from which its counts follow.

    Args:
        kinds: Index of the memory of each virtual stage; equal memories share one.
        place: Position in the pipeline, where p2p buffers are kept alive as by Megatron-Core.
        moves_states: Whether passes allocate gradients, or leave gathered weights behind.
        keeps_units: Whether units stay gathered from a backward pass to the next pass.
        reshards: Whether they are freed after a forward pass.
        sums: Whether the last backward pass reduces accumulated gradients.
        keeps_sent_buffers: Whether sent p2p buffers live until the step ends, with *keeps_units*.
        pairs: Positions of forward passes that overlap with the backward pass behind them.
    """

    kinds: tuple[int, ...]
    place: PipelinePosition | None = None
    moves_states: bool = True
    keeps_units: bool = False
    reshards: bool = False
    sums: bool = False
    keeps_sent_buffers: bool = False
    pairs: range = NO_PAIRS

    @property
    def num_kinds(self) -> int:
        """Number of different virtual stages."""
        return max(self.kinds) + 1

    @property
    def width(self) -> int:
        """Columns of the counts: of the sizes, then those of overlapped pairs of kinds."""
        return self.num_kinds * NUM_SIZES + (self.num_kinds**2 if self.pairs else 0)


class RankPasses(NamedTuple):
    """Passes of a rank as columns, with the positions of first and last backward passes.

    ``first`` and ``last`` are by virtual stage.
    """

    actions: Sequence[Action]
    is_backward: NDArray[np.bool_]
    virtual_stages: Counts
    first: dict[int, int]
    last: dict[int, int]

    @classmethod
    def of(cls, actions: Sequence[Action]) -> "RankPasses":
        """Return the columns of *actions*."""
        backward = Phase.BACKWARD  # looked up once
        phases, virtual_stages, _ = zip(*actions, strict=True)
        is_backward = np.array([phase is backward for phase in phases])
        at = np.flatnonzero(is_backward)
        found = np.array(virtual_stages, np.int64)
        first, last = (
            dict(zip(found[each].tolist(), each.tolist(), strict=True)) for each in (at[::-1], at)
        )
        return cls(actions, is_backward, found, first, last)


class UnitState(IntEnum):
    """State in which a pass finds its FSDP units: sharded, gathered, or in prefetch buffers."""

    SHARDED = 0
    GATHERED = 1
    PREFETCHED = 2


class PassState(NamedTuple):
    """State of the FSDP units at a pass of a rank, whatever their sizes.

    Args:
        found: State of its virtual stage's units.
        freed: Virtual stages whose units are freed before it.
        fetched: Virtual stages whose units are gathered ahead of their passes, before it.
    """

    found: UnitState
    freed: tuple[int, ...]
    fetched: tuple[int, ...]


def pass_states(
    actions: Sequence[Action], num_virtual_stages: int, *, reshards: bool
) -> list[PassState]:
    """Return the states of the FSDP units at a rank's passes, in order.

    PyTorch's pipeline runtimes keep the units of a virtual stage gathered from a backward pass to
    the next pass; with several virtual stages a rank they gather those that come next ahead of
    their passes, and free the others.

    Args:
        actions: Passes of the rank, in order.
        num_virtual_stages: Its virtual stages.
        reshards: Whether units are freed after a forward pass (`reshard_after_forward`).
    """
    after = {
        Phase.FORWARD: UnitState.SHARDED if reshards else UnitState.GATHERED,
        Phase.BACKWARD: UnitState.GATHERED,
    }
    # A step starts with all parameters sharded.
    found = [UnitState.SHARDED] * num_virtual_stages
    # Only the runtime of several stages a rank inserts gathers (`_add_unshard_reshard`, called by
    # _PipelineScheduleRuntime); those of one stage leave them to fully_shard's hooks.
    prefetched = next_virtual_stages(actions) if num_virtual_stages > 1 else [()] * len(actions)
    gathered: tuple[int, ...] = ()
    states = []
    for (phase, virtual_stage, _), following in zip(actions, prefetched, strict=True):
        freed = tuple(each for each in gathered if each not in following)
        fetched = tuple(each for each in following if each not in gathered)
        gathered = following
        for each in fetched:
            found[each] = UnitState.PREFETCHED
        states.append(PassState(found[virtual_stage], freed, fetched))
        # A pipeline's stages do not reshard after backward: the next microbatch wants the weights.
        found[virtual_stage] = after[phase]
    return states


def pass_counts(order: RankOrder, passes: RankPasses) -> Counts:
    """Return the count of each size during each action, and after it: two rows an action."""
    num_actions, kinds = len(passes.actions), np.array(order.kinds, np.int64)[passes.virtual_stages]
    own = np.eye(order.num_kinds, dtype=np.int64)[kinds]
    counts = np.zeros((2 * num_actions, order.num_kinds, NUM_SIZES), np.int64)
    _count_saved(counts, passes, own)
    states = None
    if order.keeps_units:
        states = pass_states(passes.actions, len(order.kinds), reshards=order.reshards)
    if order.moves_states:
        _count_gradients(counts, order, passes)
        _count_gathered(counts, order, passes, states)
    _count_messages(counts, order, passes, own)
    # Workspaces count in the row during a pass alone, never in the one after it.
    counts[2 * np.arange(num_actions), kinds, _needed(order, passes, states)] = 1
    flat = counts.reshape(2 * num_actions, -1)
    return _with_pairs(flat, order, kinds) if order.pairs else flat


def _needed(order: RankOrder, passes: RankPasses, states: Sequence[PassState] | None) -> Counts:
    """Return the column of the workspace of each pass."""
    needed = np.where(passes.is_backward, PassSize.BACKWARD, PassSize.FORWARD)
    if order.moves_states:
        if order.sums:
            needed[[*passes.last.values()]] = PassSize.LAST_BACKWARD
        # First after last: with one microbatch a pass is both, and gradients appear in it.
        needed[[*passes.first.values()]] = PassSize.FIRST_BACKWARD
    if states is not None:
        needed += 3 * np.array([state.found for state in states])
    return needed


def _count_saved(counts: Counts, passes: RankPasses, own: Counts) -> None:
    """Count saved activations: a forward pass saves as it starts, a backward frees as it ends."""
    is_backward = passes.is_backward[:, None]
    kept = np.where(is_backward, -own, own).cumsum(axis=0)
    counts[0::2, :, PassSize.SAVED] = kept + own * is_backward
    counts[1::2, :, PassSize.SAVED] = kept


def _count_gradients(counts: Counts, order: RankOrder, passes: RankPasses) -> None:
    """Subtract gradients that are static but not allocated yet; count reduction buffers."""
    never = len(passes.actions)
    for stage, kind in enumerate(order.kinds):
        first, last = (each.get(stage, never) for each in (passes.first, passes.last))
        # Gradients count as static throughout, but are allocated by the first backward pass.
        counts[: 2 * first, kind, PassSize.LATE] -= 1
        if order.keeps_units:
            counts[2 * last + 1 : 2 * last + 2, kind, PassSize.REDUCTION] += 1
            counts[2 * last + 2 :, kind, PassSize.REDUCED] -= 1
        elif order.sums:
            counts[2 * last + 1 :, kind, PassSize.REDUCED] -= 1


def _count_gathered(
    counts: Counts, order: RankOrder, passes: RankPasses, states: Sequence[PassState] | None
) -> None:
    """Count weights that stay gathered between passes; those of a pass are in its workspace."""
    gathered_since: list[tuple[int, int] | None] = [None] * len(order.kinds)
    spans: list[tuple[int, int, int, int]] = []

    def end(stage: int, row: int) -> None:
        since = gathered_since[stage]
        if since is not None:
            spans.append((since[0], row, order.kinds[stage], since[1]))
        gathered_since[stage] = None

    after = np.where(passes.is_backward, PassSize.AFTER_BACKWARD, PassSize.AFTER_FORWARD).tolist()
    for position, (stage, size) in enumerate(
        zip(passes.virtual_stages.tolist(), after, strict=True)
    ):
        row = 2 * position
        if states is not None:
            for each in states[position].freed:
                end(each, row)
            for each in states[position].fetched:
                gathered_since[each] = row, PassSize.FETCHED
        end(stage, row)
        gathered_since[stage] = row + 1, size
    for stage in range(len(gathered_since)):
        end(stage, len(counts))
    starts, ends, kinds, sizes = np.array(spans, np.int64).T
    # Differences, summed once: spans of many passes would be as many slices to add to.
    changes = np.zeros((len(counts) + 1, *counts.shape[1:]), np.int64)
    np.add.at(changes, (starts, kinds, sizes), 1)
    np.add.at(changes, (ends, kinds, sizes), -1)
    counts += changes[:-1].cumsum(axis=0)


def _count_messages(counts: Counts, order: RankOrder, passes: RankPasses, own: Counts) -> None:
    """Count p2p buffers kept alive: between two actions as many as in the second."""
    sizes = MESSAGES
    if order.place is not None:
        held = live_message_counts(passes.actions, order.place, len(order.kinds))
        # Modules hold their last inputs, and the gradients of these, over the step's end.
        held = np.concatenate([held, [[0, MODULE_TENSORS] * len(order.kinds)]])
        of_kinds = np.eye(counts.shape[1], dtype=np.int64)[[*order.kinds]].T
        # Equal virtual stages share a column: their buffers add up.
        each = of_kinds @ held.reshape(len(held), -1, len(sizes))
        counts[0::2, :, sizes] = each[:-1]
        counts[1::2, :, sizes] = each[1:]
    elif order.keeps_units:
        kept = kept_until_end if order.keeps_sent_buffers else kept_until_next
        for size, each in zip(sizes, kept(passes.is_backward, own), strict=True):
            counts[0::2, :, size] = each[:-1]
            counts[1::2, :, size] = each[1:]


def kept_until_end(is_backward: NDArray[np.bool_], own: Counts) -> tuple[Counts, Counts]:
    """Return the sent outputs and gradients alive during each action, and after the last.

    A message's work holds its tensor (ProcessGroupNCCL stores it as the work's output), and so do
    the lists in which a runtime keeps works and operations (torch/distributed/pipelining/
    schedules.py, PyTorch 2.13).
    The runtimes of GPipe and of interleaved schedules wait for their sends when all passes are
    done.  An output counts once its backward pass is over: until then it is kept anyway.

    Args:
        is_backward: Whether each action is a backward pass.
        own: 1 in the column of its virtual stage, or of the kind of that.

    >>> order = np.array([False, False, True, True])
    >>> [each.ravel().tolist() for each in kept_until_end(order, np.ones((4, 1), np.int64))]
    [[0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]
    """
    sent = (own * is_backward[:, None]).cumsum(axis=0)
    counts = np.concatenate([np.zeros_like(sent[:1]), sent])
    return counts, counts


def kept_until_next(is_backward: NDArray[np.bool_], own: Counts) -> tuple[Counts, Counts]:
    """Return the p2p buffers that 1F1B keeps alive, as `kept_until_end`.

    A gradient lives until the next backward pass has made another.  The last output that was sent
    alone, that of the forward pass before the last of the warm-up, lives until a gradient is sent
    alone, after the last forward pass.

    >>> order = np.array([False, False, True, False, True, True])
    >>> [each.ravel().tolist() for each in kept_until_next(order, np.ones((6, 1), np.int64))]
    [[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]]
    """
    # Schedule1F1B keeps what it sends alone in `send_work`: warm-up outputs but for the last, then
    # gradients once no forward pass is left.  All else goes in a batch with a receive.
    warmup = int(is_backward.argmax())
    steady = len(is_backward) // 2 - warmup  # passes after which a forward pass follows
    done = np.concatenate([[0], is_backward.cumsum()])
    output = (done >= warmup - 1) & (done <= steady) & (done > 0) & (warmup > 1)
    return output[:, None] * own[:1], (done > 0)[:, None] * own[:1]


def _with_pairs(counts: Counts, order: RankOrder, of_passes: Counts) -> Counts:
    """Return *counts* with one row's state for both passes of an overlapped pair.

    Until both end, the activations that the forward pass saves count within the workspace of the
    pair.
    """
    num_kinds = order.num_kinds
    found = np.zeros((len(counts), order.width), np.int64)
    found[:, : counts.shape[1]] = counts
    forward_positions = np.array(order.pairs, np.int64)
    if len(forward_positions):
        kinds = of_passes[forward_positions]
        saved = counts[2 * forward_positions].reshape(len(forward_positions), num_kinds, NUM_SIZES)
        saved[np.arange(len(forward_positions)), kinds, PassSize.SAVED] -= 1
        # Workspaces of both passes are within the pair's own column.
        saved[:, :, PassSize.FORWARD :] = 0
        rows = np.zeros((len(forward_positions), order.width), np.int64)
        rows[:, : counts.shape[1]] = saved.reshape(len(forward_positions), -1)
        columns = counts.shape[1] + num_kinds * kinds + of_passes[forward_positions + 1]
        rows[np.arange(len(forward_positions)), columns] = 1
        # The rows during and after the forward pass, and during the backward pass.
        for place in range(3):
            found[2 * forward_positions + place] = rows
    return found


def pairs_of(num_kinds: int) -> list[tuple[int, int]]:
    """Return the kinds of forward and backward passes in the order of the columns of pairs."""
    # Forward kinds outermost, as `_with_pairs` numbers the columns.
    return [
        (forward_kind, backward_kind)
        for forward_kind in range(num_kinds)
        for backward_kind in range(num_kinds)
    ]
