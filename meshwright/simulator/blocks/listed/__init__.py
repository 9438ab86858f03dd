"""Blocks of models that list their layers: residual networks for images, chains."""

from meshwright.simulator.blocks.listed.chain import end, linear_layer
from meshwright.simulator.blocks.listed.images import (
    batch_norm,
    bottleneck,
    classifier,
    convolution,
    max_pool,
    mean,
    stem,
)

__all__ = [
    "batch_norm",
    "bottleneck",
    "classifier",
    "convolution",
    "end",
    "linear_layer",
    "max_pool",
    "mean",
    "stem",
]
