"""Kinds of blocks by name, and runs of equal blocks in model order."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Self

BlockKind = str

# Blocks ahead of all layers, and behind them, in every model.
EMBEDDING: BlockKind = "embedding"
HEAD: BlockKind = "head"
ENDS = (EMBEDDING, HEAD)
FINAL_NORM: BlockKind = "final norm"  # apart from the head in models with MTP
PREDICTIONS: BlockKind = "predictions"  # all MTP layers, ahead of the head
APART = (FINAL_NORM, PREDICTIONS)  # between the last layer and the head, with MTP
COPY: BlockKind = "copy"  # of the input of a stage without layers, as Megatron-Core has it
COPY_OF_STREAMS: BlockKind = "copy of streams"  # of the hidden states of MTP layers as well
TRANSFORMER_LAYER: BlockKind = "layer"
WINDOWED_LAYER: BlockKind = "windowed layer"  # with sliding-window or chunked attention
EXPERT_LAYER: BlockKind = "expert layer"  # routed experts instead of the MLP
WINDOWED_EXPERT_LAYER: BlockKind = "windowed expert layer"  # both
EXPERT_LAYERS = (EXPERT_LAYER, WINDOWED_EXPERT_LAYER)
WINDOWED_LAYERS = (WINDOWED_LAYER, WINDOWED_EXPERT_LAYER)
LAYERS = (TRANSFORMER_LAYER, WINDOWED_LAYER, *EXPERT_LAYERS)


class KeptLayer(str):
    """A layer that keeps its activations while others are recomputed.

    >>> KeptLayer("layer"), KeptLayer("layer").layer
    ('kept layer', 'layer')
    """

    __slots__ = ("layer",)
    layer: BlockKind

    def __new__(cls, layer: BlockKind) -> Self:
        """Return the kind of such a *layer*."""
        made = super().__new__(cls, f"kept {layer}")
        made.layer = layer
        return made


class OffloadedLayer(str):
    """A layer whose saved tensors are offloaded to the host until its backward.

    >>> OffloadedLayer("layer"), OffloadedLayer("layer").layer
    ('offloaded layer', 'layer')
    """

    __slots__ = ("layer",)
    layer: BlockKind

    def __new__(cls, layer: BlockKind) -> Self:
        """Return the kind of such a *layer*."""
        made = super().__new__(cls, f"offloaded {layer}")
        made.layer = layer
        return made


class LayerGroup(str):
    """Layers in one activation checkpoint.

    >>> LayerGroup(["layer", "expert layer", "expert layer"])
    '1-layer 2-expert-layer checkpoint'
    """

    __slots__ = ("layers",)
    layers: tuple[BlockKind, ...]

    def __new__(cls, layers: Sequence[BlockKind]) -> Self:
        """Return the kind of such *layers*, in model order."""
        runs = ((len([*run]), kind.replace(" ", "-")) for kind, run in groupby(layers))
        words = (f"{count}-{kind}" for count, kind in runs)
        made = super().__new__(cls, f"{' '.join(words)} checkpoint")
        made.layers = tuple(layers)
        return made


def model_blocks(kind: BlockKind) -> tuple[BlockKind, ...]:
    """Return the kinds of a model's own blocks in *kind*, a wrapped or grouped one.

    >>> model_blocks("layer"), model_blocks(LayerGroup(["layer", "expert layer"]))
    (('layer',), ('layer', 'expert layer'))
    """
    if isinstance(kind, LayerGroup):
        return kind.layers
    return (kind.layer if isinstance(kind, KeptLayer | OffloadedLayer) else kind,)


class BlockRun(NamedTuple):
    """Consecutive equal blocks."""

    kind: BlockKind
    num_blocks: int


def cut_runs(runs: Sequence[BlockRun], first: int, end: int) -> tuple[BlockRun, ...]:
    """Return the blocks of *runs* from index *first* up to, but without, *end*.

    >>> cut_runs([BlockRun("narrow", 3), BlockRun("wide", 2)], 1, 4)
    (BlockRun(kind='narrow', num_blocks=2), BlockRun(kind='wide', num_blocks=1))
    """
    cut, start = [], 0
    for kind, count in runs:
        inside = min(end, start + count) - max(first, start)
        start += count
        if inside > 0:
            cut.append(BlockRun(kind, inside))
    return tuple(cut)


def join_runs(runs: Sequence[BlockRun]) -> tuple[BlockRun, ...]:
    """Return the same blocks with consecutive runs of one kind joined.

    >>> join_runs([BlockRun("narrow", 1), BlockRun("narrow", 2)])
    (BlockRun(kind='narrow', num_blocks=3),)
    """
    joined: list[BlockRun] = []
    for kind, count in runs:
        if joined and joined[-1].kind == kind:
            joined[-1] = BlockRun(kind, joined[-1].num_blocks + count)
        else:
            joined.append(BlockRun(kind, count))
    return tuple(joined)


def mixes_windows(runs: Iterable[BlockRun]) -> bool:
    """Return True if layers with and without a window occur that are otherwise equal."""
    kinds = {run.kind for run in runs}
    return any({*pair} <= kinds for pair in (LAYERS[:2], LAYERS[2:]))
