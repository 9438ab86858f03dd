"""Pipeline ranks that hold alike, and the fullest moments each of them goes through."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import add, ge, sub
from typing import NamedTuple

import numpy as np

from meshwright.planner.space.shapes import block_counts
from meshwright.planner.space.switches import Column
from meshwright.simulator import Action, Phase, Schedule
from meshwright.simulator.layout import Stage
from meshwright.simulator.memory import PipelinePlace, SentBytes, held_messages
from meshwright.simulator.model import BlockKind

# An interleaved order repeats itself every p microbatches once its warm-up is over; warm-up
# takes fewer than (v + 1) p of the v m passes, so 3 p microbatches show every moment.  What a
# runtime holds of messages changes once more, when the first pass after the warm-up is backward:
# fewer than 2 v p passes later.
PERIODS = 5
DIGIT_BITS = 16  # fewer messages are held than they count


class Role(NamedTuple):
    """Ranks with the same virtual stages: the first and the last of them."""

    stages: tuple[Stage, ...]
    first: int
    last: int


class PeakCandidate(NamedTuple):
    """A candidate for a rank's fullest moment: kept passes of each kind, and the running action.

    Where a runtime holds messages, their numbers follow: of those as large as what a block of each
    kind receives, then of those as large as what it sends.
    """

    passes: tuple[int, ...]
    phase: Phase
    stage: Stage


def pipeline_roles(stages: Sequence[Stage], pp: int) -> list[Role]:
    """Return the roles of a pipeline with the virtual *stages*, in rank order.

    >>> from meshwright.simulator import load_model
    >>> from meshwright.simulator.layout import model_stages
    >>> stages = model_stages(load_model("gpt2"), (3, 3, 3, 3))
    >>> [(role.first, role.last) for role in pipeline_roles(stages, 4)]
    [(0, 0), (1, 2), (3, 3)]
    """
    members: dict[tuple[Stage, ...], list[int]] = {}
    for rank in range(pp):
        members.setdefault(tuple(stages[rank::pp]), []).append(rank)
    return [Role(rank_stages, ranks[0], ranks[-1]) for rank_stages, ranks in members.items()]


def representative_microbatches(
    schedule: Schedule, role: Role, pp: int, num_microbatches: Column
) -> Column:
    """Return the fewest microbatches that show the same fullest moments."""
    if len(role.stages) == 1:
        return num_microbatches
    numbers, member = np.unique(num_microbatches, return_inverse=True)
    fewest = [_representative(schedule, pp, len(role.stages), each) for each in numbers.tolist()]
    return np.array(fewest, np.int64)[member.reshape(-1)]


def _representative(schedule: Schedule, pp: int, vpp: int, num_microbatches: int) -> int:
    """Return the fewest microbatches whose groups are as large, and the last one's rest."""
    passes = schedule.in_flight(pp - 1, pp, num_microbatches, vpp)
    group = (passes - 1) // (vpp - 1)  # the last rank's warm-up is of whole groups
    fewest = PERIODS * group + num_microbatches % group
    alike = (
        each
        for each in range(fewest, num_microbatches, group)
        if schedule.refusal(pp, each, vpp) is None
        and schedule.in_flight(pp - 1, pp, each, vpp) == passes
    )
    return next(alike, num_microbatches)


def fullest_moments(
    schedule: Schedule,
    role: Role,
    pp: int,
    num_microbatches: int,
    kinds: Sequence[BlockKind],
    *,
    holds_messages: bool = False,
) -> list[PeakCandidate]:
    """Return the moments among which the role's peak is, whatever the tensors' sizes.

    The first rank of a role has the most passes in flight.  Where its stages are equal only
    the number of passes matters; where they differ the order is walked.

    Args:
        schedule: What ranks run.
        role: Which ones.
        pp: Ranks of the pipeline.
        num_microbatches: Microbatches of a step.
        kinds: Kinds of blocks in the order in which passes are counted.
        holds_messages: Whether the runtime holds messages beside those of passes in flight.
    """
    if holds_messages and pp > 1:
        # Only a rank that runs a forward pass after a backward one holds messages in forward.
        boundary = min(max(role.first, pp - num_microbatches + 1), role.last)
        ranks = {role.first: None, boundary: None}
        find = _held_moments
        if len(role.stages) > 1:
            ranks, find = {role.first: None}, _walk
        found = (
            find(schedule, role, PipelinePlace(each, pp), num_microbatches, kinds) for each in ranks
        )
        return _undominated([moment for each in found for moment in each])
    if len(set(role.stages)) > 1:
        place = PipelinePlace(role.first, pp)
        return _walk(schedule, role, place, num_microbatches, kinds, holds_messages=False)
    stage = role.stages[0]
    passes = schedule.in_flight(role.first, pp, num_microbatches, len(role.stages))
    kept = tuple(passes * count for count in block_counts(kinds, [stage]))
    return [PeakCandidate(kept, phase, stage) for phase in Phase]


def _held_moments(
    schedule: Schedule,
    role: Role,
    place: PipelinePlace,
    num_microbatches: int,
    kinds: Sequence[BlockKind],
) -> list[PeakCandidate]:
    """Return the moments of a rank with one virtual stage: first passes, and those that follow."""
    stage = role.stages[0]
    passes = schedule.in_flight(place.pp_rank, place.pp, num_microbatches, 1)
    alternates = num_microbatches > passes
    order = [(Phase.FORWARD, passes)] * passes + [(Phase.BACKWARD, passes)]
    order += [(Phase.FORWARD, passes)] * alternates
    order += [(Phase.BACKWARD, passes - (not alternates))] * (num_microbatches > 1)
    actions = [Action(phase, 0, 0) for phase, _ in order]
    held = _held_counts(role, place, actions, kinds)
    counts = block_counts(kinds, [stage])
    return [
        PeakCandidate((*(kept * count for count in counts), *messages), phase, stage)
        for (phase, kept), messages in dict.fromkeys(zip(order, held, strict=True))
    ]


def _walk(
    schedule: Schedule,
    role: Role,
    place: PipelinePlace,
    num_microbatches: int,
    kinds: Sequence[BlockKind],
    *,
    holds_messages: bool = True,
) -> list[PeakCandidate]:
    actions = schedule.rank_actions(*place, num_microbatches, len(role.stages))
    held = _held_counts(role, place, actions, kinds) if holds_messages else repeat(())
    counts = [tuple(block_counts(kinds, [stage])) for stage in role.stages]
    kept = (0,) * len(kinds)
    most_of_first: dict[tuple[tuple[int, ...], Phase, Stage], int] = {}
    for (phase, virtual_stage, _), messages in zip(actions, held, strict=False):
        if phase is Phase.FORWARD:
            kept = tuple(map(add, kept, counts[virtual_stage]))
        key = ((*kept[1:], *messages), phase, role.stages[virtual_stage])
        if most_of_first.get(key, -1) < kept[0]:
            most_of_first[key] = kept[0]
        if phase is Phase.BACKWARD:
            kept = tuple(map(sub, kept, counts[virtual_stage]))
    return _undominated(
        [
            PeakCandidate((first, *others), phase, stage)
            for (others, phase, stage), first in most_of_first.items()
        ]
    )


def _held_counts(
    role: Role, place: PipelinePlace, actions: Sequence[Action], kinds: Sequence[BlockKind]
) -> Iterator[tuple[int, ...]]:
    """Yield how many messages of each size are held in each action, as in `PeakCandidate`."""
    # Sizes that are powers of one base give a number whose digits say how often each counts.
    symbols = [1 << DIGIT_BITS * number for number in range(2 * len(kinds))]
    received, sent = (
        dict(zip(kinds, symbols, strict=False)),
        dict(zip(kinds, symbols[len(kinds) :], strict=True)),
    )
    messages = [
        SentBytes(
            output=0 if stage.has_head else sent[stage.blocks[-1].kind],
            gradient=0 if stage.has_embedding else received[stage.blocks[0].kind],
        )
        for stage in role.stages
    ]
    known: dict[int, tuple[int, ...]] = {}
    mask = (1 << DIGIT_BITS) - 1
    for during in held_messages(actions, messages, place):
        if during not in known:
            shifts = range(0, DIGIT_BITS * len(symbols), DIGIT_BITS)
            known[during] = tuple(during >> shift & mask for shift in shifts)
        yield known[during]


def _undominated(moments: list[PeakCandidate]) -> list[PeakCandidate]:
    """Drop moments that another one of the same action reaches in every count."""
    kept: list[PeakCandidate] = []
    # The larger ones first: none that comes later exceeds one before it.
    for moment in sorted(moments, key=lambda each: each.passes, reverse=True):
        if not any(
            all(map(ge, each.passes, moment.passes)) and each[1:] == moment[1:] for each in kept
        ):
            kept.append(moment)
    return kept
