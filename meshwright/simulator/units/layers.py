"""Families of layers that are alike in memory: MLP or experts, with or without positions."""

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
"""One value for each family of layers, in the order of `families`."""


class AlikeLayers(NamedTuple):
    """Layers of one family that are alike in memory.

    Args:
        family: Index of their family.
        is_kept: Whether they are excluded from recomputation.
        num_layers: Number of them.
    """

    family: int
    is_kept: bool
    num_layers: int


def families(shape: BlockShape) -> Kinds:
    """Return one kind of layers for each family.

    Layers with experts and those without are two families. A window alone changes neither
    parameters nor bytes; where layers with one have positions and others have none, bytes differ.
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
    """Return the family of each layer of *stage*, given one kind of each family."""

    def family(kind: BlockKind) -> int:
        if kind in kinds:
            return kinds.index(kind)
        has_experts = [each in EXPERT_LAYERS for each in kinds]
        return has_experts.index(kind in EXPERT_LAYERS)

    return tuple(family(kind) for kind, count in stage.layers for _ in range(count))


@lru_cache(maxsize=65536)
def alike(
    stage: Stage, kinds: Kinds, first: int = 0, end: int | None = None
) -> tuple[AlikeLayers, ...]:
    """Return the layers of *stage* from index *first* to *end*, grouped by likeness."""
    family, keeps = by_place(stage, kinds), stage.checkpoints.keeps
    # Asked once: `keeps` of a plan without such layers is false for each.
    can_keep = stage.checkpoints.keeps_layers
    indices = range(first, len(family) if end is None else end)
    counts = Counter((family[place], can_keep and keeps(place)) for place in indices)
    return tuple(AlikeLayers(*what, count) for what, count in counts.items())


@lru_cache(maxsize=4096)
def extreme_places(stage: Stage, kinds: Kinds) -> tuple[int, ...]:
    """Return the indices of layers whose passes may be the peak, the last one first.

    Among equal layers memory changes by the same amount from each to the next, from the second to
    the last but one: the extremes are near the ends of each run of a family.
    """
    family = by_place(stage, kinds)
    if stage.checkpoints.keeps_layers:
        return tuple(reversed(range(len(family))))
    ends = {0, len(family)} | {
        index for index in range(1, len(family)) if family[index - 1] != family[index]
    }
    # Two on either side: the outermost layers have neighbours of another kind.
    candidates = {index for end in ends for index in range(end - 2, end + 2)}
    return tuple(sorted(candidates.intersection(range(len(family))), reverse=True))
