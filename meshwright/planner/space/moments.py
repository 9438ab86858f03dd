"""The fullest moments that pipeline ranks go through."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.space.columns import Column, distinct
from meshwright.planner.space.pipelines import Pipeline, Role, block_counts
from meshwright.simulator import Phase, Schedule
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import HeldSpans, PipelinePlace, held_spans
from meshwright.simulator.model import BlockKind

# An interleaved order repeats itself with every group of g microbatches once its warm-up is over;
# warm-up takes fewer than (v + 1) g of the v m passes, so 3 g microbatches show every moment.  What
# a runtime holds of messages changes once more, when the first pass after the warm-up is backward:
# fewer than 2 v g passes later.
PERIODS = 3
BESIDE = len(Phase)  # the number of a moment of two passes, behind those of the phases
PERIODS_OF_MESSAGES = 5


class MessageColumns(NamedTuple):
    """In which column messages count, by the kind of block that receives or that sends them."""

    received: dict[BlockKind, int]
    sent: dict[BlockKind, int]

    def of(self, stages: Sequence[Stage]) -> NDArray[np.int64]:
        """Return 1 in the column of what each virtual stage sends: output, then gradient."""
        sizes = np.zeros((2 * len(stages), self.width), np.int64)
        for number, stage in enumerate(stages):
            if not stage.has_head:
                sizes[2 * number, self.sent[stage.passes[-1].kind]] = 1
            if not stage.has_embedding:
                sizes[2 * number + 1, self.received[stage.passes[0].kind]] = 1
        return sizes

    @property
    def width(self) -> int:
        """How many columns there are."""
        return max(*self.received.values(), *self.sent.values()) + 1


def representative_microbatches(
    pipeline: Pipeline, role: Role, num_microbatches: int, *, holds_messages: bool
) -> int:
    """Return the fewest microbatches that show the same fullest moments.

    Where groups leave a rest the whole order is walked.
    """
    group = pipeline.schedule.group(pipeline.pp, num_microbatches)
    if len(role.stages) == 1 or num_microbatches % group:
        return num_microbatches
    return min(num_microbatches, group * (PERIODS_OF_MESSAGES if holds_messages else PERIODS))


def fullest_moments(
    pipeline: Pipeline,
    role: Role,
    num_microbatches: Column,
    messages: MessageColumns | None = None,
) -> NDArray[np.int64]:
    """Return the moments among which the role's peak is, whatever the tensors' sizes.

    The first rank of a role has the most passes in flight.  Where its stages are equal only
    the number of passes matters; where they differ the order is walked.

    Args:
        pipeline: The pipeline.
        role: Which of its ranks.
        num_microbatches: Microbatches of a step.
        messages: How messages are counted that the runtime holds beside those of passes in flight,
            if it does.

    Returns:
        For each number of microbatches as many rows, some of them repeated: kept passes through
        blocks of each kind, held messages, and of the running pass the phase and the place of its
        stage among those of the role that differ.  Of two passes beside each other the phase is
        `BESIDE`, the place that of the forward pass times the number of such stages and that of
        the backward pass; they keep what was kept before both.
    """
    numbers, vpp = num_microbatches.tolist(), len(role.stages)
    stages = list(dict.fromkeys(role.stages))
    beside = pipeline.schedule.runs_beside
    if beside and vpp == 1:  # one pass ahead, then pairs, which are all alike
        numbers = [min(each, 1 + len(Phase)) for each in numbers]
    if beside or (vpp > 1 and (messages is not None or len(stages) > 1)):
        counts = np.array([block_counts(pipeline.kinds, [stage]) for stage in stages], np.int64)
        own = counts[[stages.index(stage) for stage in role.stages]]
        places = np.array([stages.index(stage) for stage in role.stages])
        return _walked(pipeline, role, numbers, (own, places), messages)
    if messages is not None:
        return _plain_moments(pipeline, role, num_microbatches, messages)
    passes = [pipeline.schedule.in_flight(role.first, pipeline.pp, each, vpp) for each in numbers]
    counts = np.array(block_counts(pipeline.kinds, stages), np.int64)
    moments = np.zeros((len(numbers), len(Phase), len(counts) + 2), np.int64)
    moments[:, :, :-2] = (np.array(passes, np.int64)[:, None] * counts)[:, None]
    moments[:, :, -2] = range(len(Phase))
    return moments


def _plain_moments(
    pipeline: Pipeline, role: Role, num_microbatches: Column, messages: MessageColumns
) -> NDArray[np.int64]:
    """Return the moments of ranks with one virtual stage that hold messages.

    Nothing is held until the first backward pass is over; then outputs and gradients in forward
    passes, and gradients in backward passes (`meshwright.simulator.memory.held_messages`).
    """
    pp, counts = pipeline.pp, np.array(block_counts(pipeline.kinds, role.stages), np.int64)
    output, gradient = messages.of(role.stages)
    # Only a rank that runs a forward pass after a backward one holds messages in forward.
    alternating = np.minimum(np.maximum(role.first, pp - num_microbatches + 1), role.last)
    ranks = np.stack([np.full_like(alternating, role.first), alternating], axis=1)
    passes = np.array(
        [
            [pipeline.schedule.in_flight(rank, pp, number, 1) for rank in row]
            for row, number in zip(ranks.tolist(), num_microbatches.tolist(), strict=True)
        ],
        np.int64,
    )
    alternates = passes < num_microbatches[:, None]
    follows = num_microbatches > 1
    kept = np.column_stack([passes, passes[:, 0], passes[:, 0] - (follows & ~alternates[:, 0])])
    moments = np.zeros((len(kept), 4, len(counts) + messages.width + 2), np.int64)
    moments[:, :, : len(counts)] = kept[:, :, None] * counts
    moments[:, :2, len(counts) : -2] = alternates[:, :, None] * (output + 2 * gradient)
    moments[:, 3, len(counts) : -2] = follows[:, None] * gradient
    moments[:, 2:, -2] = 1
    return moments


def _walked(
    pipeline: Pipeline,
    role: Role,
    num_microbatches: Sequence[int],
    stages: tuple[NDArray[np.int64], Column],
    messages: MessageColumns | None,
) -> NDArray[np.int64]:
    """Return the fullest moments of a rank, as `fullest_moments`.

    Args:
        pipeline: The pipeline.
        role: The rank's.
        num_microbatches: Microbatches of a step, of each order that is walked.
        stages: Of each virtual stage the blocks of each kind, and its place among those that
            differ.
        messages: How messages are counted, if any are held.
    """
    counts, places = stages
    holds = messages is not None
    rank, vpp = (role.first, pipeline.pp), len(role.stages)
    orders = [_order(pipeline.schedule, *rank, each, vpp, holds=holds) for each in num_microbatches]
    is_backward, virtual_stage = (
        np.concatenate(each) for each in list(zip(*orders, strict=True))[:2]
    )
    lengths = [len(each.is_backward) for each in orders]
    order, own = np.repeat(np.arange(len(orders)), lengths), counts[virtual_stage]
    # While a pass runs it keeps its own blocks: a forward pass already, a backward pass still.
    # When an order is over nothing is kept, so that the next one's sums begin with none.
    kept = np.where(is_backward[:, None], -own, own).cumsum(axis=0) + own * is_backward[:, None]
    held = [] if messages is None else [_held(orders, lengths, messages.of(role.stages))]
    found = np.column_stack([kept, *held, is_backward, places[virtual_stage]])
    pairs = [pipeline.schedule.pairs(*rank, each, vpp) for each in num_microbatches]
    if any(pairs):
        begins = np.searchsorted(order, range(len(orders))).tolist()
        made = np.array([at + each for at, of in zip(begins, pairs, strict=True) for each in of])
        order = np.delete(order, made + 1)
        found = _with_pairs(found, own, len({*places.tolist()}), made)
    rows = _undominated(found[:, :-2], distinct([order, found[:, -2], found[:, -1]])[1])
    return _by_order(found[rows], order[rows])


def _with_pairs(
    moments: NDArray[np.int64], own: NDArray[np.int64], num_places: int, made: Column
) -> NDArray[np.int64]:
    """Return *moments* with one in place of the two of each pair; *made* are the first of them.

    *own* are the blocks of each pass, *num_places* the stages that differ.
    """
    found = moments.copy()
    found[made, : own.shape[1]] -= own[made]
    found[made, -2] = BESIDE
    found[made, -1] = num_places * moments[made, -1] + moments[made + 1, -1]
    return np.delete(found, made + 1, axis=0)


class _Order(NamedTuple):
    """What a rank runs, by action, and the messages that it holds meanwhile.

    ``spans`` are those of `HeldSpans`: starts, ends, sources and times.
    """

    is_backward: NDArray[np.bool_]
    virtual_stage: Column
    spans: NDArray[np.int64]


@lru_cache(maxsize=1024)
def _order(
    schedule: Schedule, pp_rank: int, pp: int, num_microbatches: int, vpp: int, *, holds: bool
) -> _Order:
    """Return what a rank runs, with messages if it *holds* any."""
    actions = schedule.rank_actions(pp_rank, pp, num_microbatches, vpp)
    phases, virtual_stages, _ = zip(*actions, strict=True)
    backward = Phase.BACKWARD  # looked up once
    is_backward = np.array([phase is backward for phase in phases])
    held = [*held_spans(actions, PipelinePlace(pp_rank, pp))] if holds else []
    *columns, times = zip(*held, strict=True) if held else [()] * len(HeldSpans._fields)
    found = np.array([[*chain.from_iterable(each)] for each in columns], np.int64)
    each = np.repeat(np.array(times, np.int64), [len(span.starts) for span in held])
    lasts = found[1] > found[0]
    spans = np.concatenate([found, each[None]])[:, lasts]
    return _Order(is_backward, np.array(virtual_stages, np.int64), spans)


def _held(
    orders: Sequence[_Order], lengths: Sequence[int], columns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many messages of each column are held in each action of *orders*.

    Args:
        orders: One after the other.
        lengths: How many actions each has.
        columns: 1 in the column of each source of `HeldSpans`; zeros where it is none.
    """
    begins = np.cumsum([0, *lengths])
    of_order = np.repeat(begins[:-1], [each.spans.shape[1] for each in orders])
    starts, ends, sources, times = np.concatenate([each.spans for each in orders], axis=1)
    size = begins[-1] + 1, columns.shape[1]
    places = np.concatenate([starts + of_order, ends + of_order]) * size[1]
    places += np.tile(columns.argmax(axis=1)[sources], 2)
    counts = np.asarray(columns.any(axis=1), np.int64)[sources] * times
    # Sums of small whole numbers, which are exact as floats.
    changes = np.bincount(places, np.concatenate([counts, -counts]), minlength=prod(size))
    return changes.astype(np.int64).reshape(size)[:-1].cumsum(axis=0)


def _undominated(kept: NDArray[np.int64], alike: Column) -> Column:
    """Return the rows of *kept* that no other one of those *alike* reaches in every count.

    Nor is there one between two others: while passes of one virtual stage are kept and those of
    another one are freed, the counts move in even steps, and an end of these has most bytes.
    """
    left = _ends_of_steps(kept, alike)
    # The fullest of those alike first: none that comes later reaches it.
    left = left[np.lexsort((-kept[left].sum(axis=1), alike[left]))]
    found = []
    while len(left):
        group = alike[left]
        is_first = np.ones(len(left), np.bool_)
        is_first[1:] = group[1:] != group[:-1]
        fullest = left[is_first]
        found.append(fullest)
        is_reached = (kept[left] <= kept[fullest[is_first.cumsum() - 1]]).all(axis=1)
        left = left[~is_reached]
    return np.concatenate(found)


def _ends_of_steps(kept: NDArray[np.int64], alike: Column) -> Column:
    """Return the rows of *kept* where even steps from one of those *alike* to the next end."""
    order = np.argsort(alike, kind="stable")
    steps, goes_on = np.diff(kept[order], axis=0), np.diff(alike[order]) == 0
    is_between = (steps[1:] == steps[:-1]).all(axis=1) & goes_on[1:] & goes_on[:-1]
    is_end = np.concatenate([[True], ~is_between, [True]])[: len(order)]
    return np.asarray(order[is_end], np.int64)


def _by_order(moments: NDArray[np.int64], order: Column) -> NDArray[np.int64]:
    """Return the *moments* of each order, some repeated so that all have as many."""
    counts = np.bincount(order)
    starts = counts.cumsum() - counts
    places = np.arange(counts.max()) % counts[:, None] + starts[:, None]
    return np.asarray(moments[np.argsort(order, kind="stable")[places]], np.int64)
