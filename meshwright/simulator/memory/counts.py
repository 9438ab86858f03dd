"""The order of a rank's passes as one matrix: how often each size is live in and after a pass.

Its rows are the times at which the peak may be, in the order of the actions; its columns are the
sizes of the virtual stages (`pass_sizes`), kind by kind.  Rows times sizes are a timeline.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.graph import Size
from meshwright.simulator.memory.held_messages import (
    MODULES_HOLD,
    PipelinePlace,
    message_counts,
)
from meshwright.simulator.memory.rank import PassPeak, VirtualStageMemory
from meshwright.simulator.schedules import Action, Phase, next_virtual_stages

Counts: TypeAlias = NDArray[np.int64]
NO_PAIRS = range(0)


class PassSize(IntEnum):
    """The sizes of a virtual stage that count: what lives between passes, then what one needs."""

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

    Forward, first and later backward of passes that gather units themselves, that find them whole,
    and that find their buffers; and the last backward.
    """
    nothing = 0 * stage.saved_bytes
    forward, backward = (
        PassPeak(each, nothing)
        for each in (stage.forward_workspace_bytes, stage.backward_workspace_bytes)
    )
    apart = forward, stage.first_backward or backward, backward
    kept = stage.kept_units
    found = (*apart, *apart, *apart) if kept is None else (*apart, *kept.whole, *kept.ahead)
    return [*found, stage.last_backward or backward]


def pass_sizes(stage: VirtualStageMemory) -> list[Size]:
    """Return the sizes of a virtual stage as `PassSize` numbers them."""
    kept = stage.kept_units
    nothing = 0 * stage.saved_bytes
    return [
        stage.saved_bytes,
        stage.late_gradients_bytes,
        stage.after_forward_bytes,
        stage.after_backward_bytes,
        nothing if kept is None else kept.ahead_bytes,
        nothing if kept is None else kept.reduction.buffers_bytes,
        stage.reduced_gradients_bytes if kept is None else kept.reduction.absent_bytes,
        *stage.sent,
        *(peak.total_bytes for peak in needed_peaks(stage)),
    ]


class RankOrder(NamedTuple):
    """Properties of a rank, beside its actions, from which its counts follow.

    Args:
        kinds: Numbers of its virtual stages, those that are alike the same.
        place: Which rank it is, where a runtime holds messages as Megatron-Core's does.
        moves_states: Whether passes make gradients, or leave gathered weights behind.
        keeps_units: Whether gathered units stay from a backward pass to the next pass.
        reshards: Whether they are freed after a forward pass.
        sums: Whether the last backward pass reduces sums of gradients.
        holds_sent: Whether messages that were sent live until the step ends, with *keeps_units*.
        pairs: Where forward passes are that run beside the backward pass behind them.
    """

    kinds: tuple[int, ...]
    place: PipelinePlace | None = None
    moves_states: bool = True
    keeps_units: bool = False
    reshards: bool = False
    sums: bool = False
    holds_sent: bool = False
    pairs: range = NO_PAIRS

    @property
    def num_kinds(self) -> int:
        """Virtual stages that differ."""
        return max(self.kinds) + 1

    @property
    def width(self) -> int:
        """Columns of its counts: of the sizes, then those of pairs of kinds."""
        return self.num_kinds * NUM_SIZES + (self.num_kinds**2 if self.pairs else 0)


class RankPasses(NamedTuple):
    """The passes of a rank as columns, and where each virtual stage's backward passes are.

    ``first`` and ``last`` are by virtual stage.
    """

    actions: Sequence[Action]
    is_backward: NDArray[np.bool_]
    virtual_stages: Counts
    first: dict[int, int]
    last: dict[int, int]

    @classmethod
    def of(cls, actions: Sequence[Action]) -> "RankPasses":
        """Return those of *actions*."""
        backward = Phase.BACKWARD  # looked up once
        phases, virtual_stages, _ = zip(*actions, strict=True)
        is_backward = np.array([phase is backward for phase in phases])
        at = np.flatnonzero(is_backward)
        found = np.array(virtual_stages, np.int64)
        first, last = (
            dict(zip(found[each].tolist(), each.tolist(), strict=True)) for each in (at[::-1], at)
        )
        return cls(actions, is_backward, found, first, last)


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

    PyTorch's pipeline runtimes keep the units of a virtual stage gathered from a backward pass to
    the next pass; with several virtual stages a rank they gather those that come next ahead of
    their passes, and free the others.

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


def pass_counts(order: RankOrder, passes: RankPasses) -> Counts:
    """Return how often each size counts during each action, and after it: two rows an action."""
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
    counts[2 * np.arange(num_actions), kinds, _needed(order, passes, states)] = 1
    flat = counts.reshape(2 * num_actions, -1)
    return _with_pairs(flat, order, kinds) if order.pairs else flat


def _needed(order: RankOrder, passes: RankPasses, states: Sequence[PassState] | None) -> Counts:
    """Return the column of what each pass needs."""
    needed = np.where(passes.is_backward, PassSize.BACKWARD, PassSize.FORWARD)
    if order.moves_states:
        if order.sums:
            needed[[*passes.last.values()]] = PassSize.LAST_BACKWARD
        needed[[*passes.first.values()]] = PassSize.FIRST_BACKWARD
    if states is not None:
        needed += 3 * np.array([state.found for state in states])
    return needed


def _count_saved(counts: Counts, passes: RankPasses, own: Counts) -> None:
    """Count what passes keep: while a pass runs its own, a forward already, a backward still."""
    is_backward = passes.is_backward[:, None]
    kept = np.where(is_backward, -own, own).cumsum(axis=0)
    counts[0::2, :, PassSize.SAVED] = kept + own * is_backward
    counts[1::2, :, PassSize.SAVED] = kept


def _count_gradients(counts: Counts, order: RankOrder, passes: RankPasses) -> None:
    """Count gradients that count as static and are not there, and what reductions need."""
    never = len(passes.actions)
    for stage, kind in enumerate(order.kinds):
        first, last = (each.get(stage, never) for each in (passes.first, passes.last))
        counts[: 2 * first, kind, PassSize.LATE] -= 1
        if order.keeps_units:
            counts[2 * last + 1 : 2 * last + 2, kind, PassSize.REDUCTION] += 1
            counts[2 * last + 2 :, kind, PassSize.REDUCED] -= 1
        elif order.sums:
            counts[2 * last + 1 :, kind, PassSize.REDUCED] -= 1


def _count_gathered(
    counts: Counts, order: RankOrder, passes: RankPasses, states: Sequence[PassState] | None
) -> None:
    """Count weights that stay gathered between passes; those of a pass are in what it needs."""
    begun: list[tuple[int, int] | None] = [None] * len(order.kinds)
    spans: list[tuple[int, int, int, int]] = []

    def end(stage: int, row: int) -> None:
        since = begun[stage]
        if since is not None:
            spans.append((since[0], row, order.kinds[stage], since[1]))
        begun[stage] = None

    after = np.where(passes.is_backward, PassSize.AFTER_BACKWARD, PassSize.AFTER_FORWARD).tolist()
    for position, (stage, size) in enumerate(
        zip(passes.virtual_stages.tolist(), after, strict=True)
    ):
        row = 2 * position
        if states is not None:
            for each in states[position].freed:
                end(each, row)
            for each in states[position].fetched:
                begun[each] = row, PassSize.FETCHED
        end(stage, row)
        begun[stage] = row + 1, size
    for stage in range(len(begun)):
        end(stage, len(counts))
    starts, ends, kinds, sizes = np.array(spans, np.int64).T
    changes = np.zeros((len(counts) + 1, *counts.shape[1:]), np.int64)
    np.add.at(changes, (starts, kinds, sizes), 1)
    np.add.at(changes, (ends, kinds, sizes), -1)
    counts += changes[:-1].cumsum(axis=0)


def _count_messages(counts: Counts, order: RankOrder, passes: RankPasses, own: Counts) -> None:
    """Count messages that a runtime holds: between two actions as many as in the second."""
    sizes = MESSAGES
    if order.place is not None:
        held = message_counts(passes.actions, order.place, len(order.kinds))
        # Modules hold their last inputs, and the gradients of these, over the step's end.
        held = np.concatenate([held, [[0, MODULES_HOLD] * len(order.kinds)]])
        of_kinds = np.eye(counts.shape[1], dtype=np.int64)[[*order.kinds]].T
        each = of_kinds @ held.reshape(len(held), -1, len(sizes))
        counts[0::2, :, sizes] = each[:-1]
        counts[1::2, :, sizes] = each[1:]
    elif order.keeps_units:
        kept = kept_until_end if order.holds_sent else kept_until_next
        for size, each in zip(sizes, kept(passes.is_backward, own), strict=True):
            counts[0::2, :, size] = each[:-1]
            counts[1::2, :, size] = each[1:]


def kept_until_end(is_backward: NDArray[np.bool_], own: Counts) -> tuple[Counts, Counts]:
    """Return the outputs and gradients that live during each action, and after the last: all sent.

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
    found = np.concatenate([np.zeros_like(sent[:1]), sent])
    return found, found


def kept_until_next(is_backward: NDArray[np.bool_], own: Counts) -> tuple[Counts, Counts]:
    """Return those of 1F1B, as `kept_until_end`.

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
    """Return *counts* with one time for both passes of a pair: what was kept before them, and more.

    Until both end, what the forward pass keeps is counted with what the pair needs.
    """
    num_kinds = order.num_kinds
    found = np.zeros((len(counts), order.width), np.int64)
    found[:, : counts.shape[1]] = counts
    made = np.array(order.pairs, np.int64)
    if len(made):
        kinds = of_passes[made]
        full = counts[2 * made].reshape(len(made), num_kinds, NUM_SIZES)
        full[np.arange(len(made)), kinds, PassSize.SAVED] -= 1
        full[:, :, PassSize.FORWARD :] = 0
        rows = np.zeros((len(made), order.width), np.int64)
        rows[:, : counts.shape[1]] = full.reshape(len(made), -1)
        columns = counts.shape[1] + num_kinds * kinds + of_passes[made + 1]
        rows[np.arange(len(made)), columns] = 1
        for place in range(3):
            found[2 * made + place] = rows
    return found


def pairs_of(num_kinds: int) -> list[tuple[int, int]]:
    """Return the kinds of forward and backward passes in the order of the columns of pairs."""
    return [(made, gone) for made in range(num_kinds) for gone in range(num_kinds)]
