"""Pipeline ranks that hold alike, and the fullest moments each of them goes through."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.planner.space.space import Column
from meshwright.simulator import ParallelPlan, Phase, Schedule
from meshwright.simulator.layout import Stage, rank_stages

# An interleaved order repeats itself every p microbatches once its warm-up is over; warm-up
# takes fewer than (v + 1) p of the v m passes, so 3 p microbatches show every moment.
PERIODS = 3


class Role(NamedTuple):
    """Ranks with the same virtual stages: the first and the last of them.

    ``layers_before`` are the layers of the stages ahead of the last one's first virtual stage,
    ``layers_after`` those behind its last virtual stage.
    """

    stages: tuple[Stage, ...]
    first: int
    last: int
    layers_before: int
    layers_after: int

    @property
    def num_layers(self) -> int:
        """Layers of a rank."""
        return sum(stage.num_layers for stage in self.stages)


class PeakCandidate(NamedTuple):
    """A candidate for a rank's fullest moment: passes that are kept, and the running action."""

    layer_passes: int
    embedding_passes: int
    head_passes: int
    phase: Phase
    stage: Stage


def pipeline_roles(layers: Sequence[int], pp: int) -> list[Role]:
    """Return the roles of a pipeline whose virtual stages hold *layers*, in rank order.

    >>> [(role.first, role.last) for role in pipeline_roles([2, 2, 2, 2], 4)]
    [(0, 0), (1, 2), (3, 3)]
    """
    plan = ParallelPlan(pp=pp, num_virtual_stages=len(layers) // pp, stages=tuple(layers))
    members: dict[tuple[Stage, ...], list[int]] = {}
    for rank in range(pp):
        members.setdefault(rank_stages(plan, rank), []).append(rank)
    return [
        Role(
            rank_stages,
            ranks[0],
            ranks[-1],
            sum(layers[: ranks[-1]]),
            sum(layers[len(layers) - pp + ranks[-1] + 1 :]),
        )
        for rank_stages, ranks in members.items()
    ]


def representative_microbatches(role: Role, pp: int, num_microbatches: Column) -> Column:
    """Return the fewest microbatches that show the same fullest moments."""
    if len(role.stages) == 1:
        return num_microbatches
    return np.minimum(num_microbatches, PERIODS * pp)


def fullest_moments(
    schedule: Schedule, role: Role, pp: int, num_microbatches: int
) -> list[PeakCandidate]:
    """Return the moments among which the role's peak is, whatever the tensors' sizes.

    The first rank of a role has the most passes in flight.  Where its stages are equal only
    the number of passes matters; where they differ the order is walked.
    """
    if len(set(role.stages)) > 1:
        return _walk(schedule, role, pp, num_microbatches)
    stage = role.stages[0]
    passes = schedule.in_flight(role.first, pp, num_microbatches, len(role.stages))
    return [
        PeakCandidate(
            passes * stage.num_layers,
            passes * stage.has_embedding,
            passes * stage.has_head,
            phase,
            stage,
        )
        for phase in Phase
    ]


def _walk(schedule: Schedule, role: Role, pp: int, num_microbatches: int) -> list[PeakCandidate]:
    actions = schedule.rank_actions(role.first, pp, num_microbatches, len(role.stages))
    layers = embeddings = heads = 0
    most_layers: dict[tuple[int, int, Phase, Stage], int] = {}
    for phase, virtual_stage, _ in actions:
        stage = role.stages[virtual_stage]
        num_layers, has_embedding, has_head = stage
        if phase is Phase.FORWARD:
            layers, embeddings, heads = (
                layers + num_layers,
                embeddings + has_embedding,
                heads + has_head,
            )
        key = (embeddings, heads, phase, stage)
        if most_layers.get(key, -1) < layers:
            most_layers[key] = layers
        if phase is Phase.BACKWARD:
            layers, embeddings, heads = (
                layers - num_layers,
                embeddings - has_embedding,
                heads - has_head,
            )
    return _undominated([PeakCandidate(layers, *key) for key, layers in most_layers.items()])


def _undominated(moments: list[PeakCandidate]) -> list[PeakCandidate]:
    """Drop moments that another one of the same action reaches in every count."""
    kept: list[PeakCandidate] = []
    # The larger ones first: none that comes later exceeds one before it.
    for moment in sorted(moments, key=lambda each: each[:3], reverse=True):
        layers, embeddings, heads, *action = moment
        if not any(
            each.layer_passes >= layers
            and each.embedding_passes >= embeddings
            and each.head_passes >= heads
            and [each.phase, each.stage] == action
            for each in kept
        ):
            kept.append(moment)
    return kept
