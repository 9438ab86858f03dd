"""Pipeline ranks that hold alike, and the fullest moments each of them goes through."""

from collections.abc import Sequence
from operator import add, ge, sub
from typing import NamedTuple

import numpy as np

from meshwright.planner.space.shapes import block_counts
from meshwright.planner.space.switches import Column
from meshwright.simulator import Phase, Schedule
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import BlockKind

# An interleaved order repeats itself every p microbatches once its warm-up is over; warm-up
# takes fewer than (v + 1) p of the v m passes, so 3 p microbatches show every moment.
PERIODS = 3


class Role(NamedTuple):
    """Ranks with the same virtual stages: the first and the last of them."""

    stages: tuple[Stage, ...]
    first: int
    last: int


class PeakCandidate(NamedTuple):
    """A candidate for a rank's fullest moment: kept passes of each kind, and the running action."""

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


def representative_microbatches(role: Role, pp: int, num_microbatches: Column) -> Column:
    """Return the fewest microbatches that show the same fullest moments."""
    if len(role.stages) == 1:
        return num_microbatches
    return np.minimum(num_microbatches, PERIODS * pp)


def fullest_moments(
    schedule: Schedule, role: Role, pp: int, num_microbatches: int, kinds: Sequence[BlockKind]
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
    """
    if len(set(role.stages)) > 1:
        return _walk(schedule, role, pp, num_microbatches, kinds)
    stage = role.stages[0]
    passes = schedule.in_flight(role.first, pp, num_microbatches, len(role.stages))
    kept = tuple(passes * count for count in block_counts(kinds, [stage]))
    return [PeakCandidate(kept, phase, stage) for phase in Phase]


def _walk(
    schedule: Schedule, role: Role, pp: int, num_microbatches: int, kinds: Sequence[BlockKind]
) -> list[PeakCandidate]:
    actions = schedule.rank_actions(role.first, pp, num_microbatches, len(role.stages))
    counts = [tuple(block_counts(kinds, [stage])) for stage in role.stages]
    kept = (0,) * len(kinds)
    most_of_first: dict[tuple[tuple[int, ...], Phase, Stage], int] = {}
    for phase, virtual_stage, _ in actions:
        if phase is Phase.FORWARD:
            kept = tuple(map(add, kept, counts[virtual_stage]))
        key = (kept[1:], phase, role.stages[virtual_stage])
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
