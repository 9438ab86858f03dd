"""Which layers of a stage are alike: with an MLP or with experts, with or without positions."""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple, TypeVar

from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Stage
from meshwright.simulator.model import (
    EXPERT_LAYERS,
    WINDOWED_LAYERS,
    BlockKind,
    ModelSpec,
    layer_kinds,
)

Value = TypeVar("Value")
Kinds = tuple[BlockKind, ...]
ByFamily = tuple[Value, ...]
"""Of layers of each family: of a kind each of those that `families` has, in their order."""


class Alike(NamedTuple):
    """Layers that are alike.

    Args:
        family: Of theirs.
        is_kept: They do not run again where others do.
        num_layers: How many.
    """

    family: int
    is_kept: bool
    num_layers: int


def families(shape: BlockShape) -> Kinds:
    """Return a kind of layers of each family.

    Those with experts and those without are two. A window alone changes neither parameters nor
    bytes; that layers with one have positions and others none changes bytes.
    """
    model = shape.trained
    differs = isinstance(model, ModelSpec) and model.differs_by_window
    kinds = {
        (kind in EXPERT_LAYERS, differs and kind in WINDOWED_LAYERS): kind
        for kind in reversed(layer_kinds(model))
    }
    return tuple(kinds[each] for each in sorted(kinds))


@lru_cache(maxsize=4096)
def by_place(stage: Stage, kinds: Kinds) -> tuple[int, ...]:
    """Return the family of each layer of *stage*, of those with a kind in *kinds* each."""

    def family(kind: BlockKind) -> int:
        if kind in kinds:
            return kinds.index(kind)
        have = [each in EXPERT_LAYERS for each in kinds]
        return have.index(kind in EXPERT_LAYERS)

    return tuple(family(kind) for kind, count in stage.layers for _ in range(count))


@lru_cache(maxsize=65536)
def alike(stage: Stage, kinds: Kinds, first: int = 0, end: int | None = None) -> tuple[Alike, ...]:
    """Return the layers of *stage* from the place *first* to *end* by what they are."""
    family, keeps = by_place(stage, kinds), stage.checkpoints.keeps
    can_keep = stage.checkpoints.keeps_layers
    places = range(first, len(family) if end is None else end)
    found = Counter((family[place], can_keep and keeps(place)) for place in places)
    return tuple(Alike(*what, count) for what, count in found.items())


@lru_cache(maxsize=4096)
def extreme_places(stage: Stage, kinds: Kinds) -> tuple[int, ...]:
    """Return the places of layers of which one may be fullest, the last one first.

    Of layers that are all alike each differs by as much from the one before, from the second to the
    last but one; so it is between layers of another family.
    """
    family = by_place(stage, kinds)
    if stage.checkpoints.keeps_layers:
        return tuple(reversed(range(len(family))))
    ends = {0, len(family)} | {
        place for place in range(1, len(family)) if family[place - 1] != family[place]
    }
    near = {place for end in ends for place in range(end - 2, end + 2)}
    return tuple(sorted(near.intersection(range(len(family))), reverse=True))
