"""Which layers of a stage have an MLP and which have experts: units of two sizes."""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple, TypeVar

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import EXPERT_LAYERS, BlockKind, layer_kinds

Value = TypeVar("Value")
ByFamily = tuple[Value, ...]
"""Of layers with an MLP and of those with experts, or of either, if a model has no others."""


class Alike(NamedTuple):
    """Layers that are alike.

    Args:
        has_experts: They have experts, and no MLP.
        is_kept: They do not run again where others do.
        num_layers: How many.
    """

    has_experts: bool
    is_kept: bool
    num_layers: int


def families(shape: BlockShape) -> ByFamily[BlockKind]:
    """Return a kind of layers of each family; a window changes neither parameters nor bytes."""
    kinds = {kind in EXPERT_LAYERS: kind for kind in reversed(layer_kinds(shape.trained))}
    return tuple(kinds[each] for each in sorted(kinds))


def member(of_families: ByFamily[Value], *, has_experts: bool) -> Value:
    """Return what is of layers with experts, or of those without."""
    return of_families[-1 if has_experts else 0]


@lru_cache(maxsize=4096)
def experts_by_place(stage: Stage) -> tuple[bool, ...]:
    """Return of each layer of *stage* whether it has experts."""
    return tuple(kind in EXPERT_LAYERS for kind, count in stage.layers for _ in range(count))


@lru_cache(maxsize=65536)
def alike(stage: Stage, first: int = 0, end: int | None = None) -> tuple[Alike, ...]:
    """Return the layers of *stage* from the place *first* to *end* by what they are."""
    have, keeps = experts_by_place(stage), stage.checkpoints.keeps
    can_keep = stage.checkpoints.keeps_layers
    places = range(first, len(have) if end is None else end)
    found = Counter((have[place], can_keep and keeps(place)) for place in places)
    return tuple(Alike(*what, count) for what, count in found.items())


@lru_cache(maxsize=4096)
def extreme_places(stage: Stage) -> tuple[int, ...]:
    """Return the places of layers of which one may be fullest, the last one first.

    Of layers that are all alike each differs by as much from the one before, from the second to the
    last but one; so it is between layers of another family.
    """
    have = experts_by_place(stage)
    if stage.checkpoints.keeps_layers:
        return tuple(reversed(range(len(have))))
    ends = {0, len(have)} | {
        place for place in range(1, len(have)) if have[place - 1] != have[place]
    }
    near = {place for end in ends for place in range(end - 2, end + 2)}
    return tuple(sorted(near.intersection(range(len(have))), reverse=True))
