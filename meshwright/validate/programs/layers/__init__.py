"""Layers of a transformer, made of the parts of a stack."""

from meshwright.validate.programs.layers.pointwise import NORM_EPSILON, GatedSilu, SquaredRelu
from meshwright.validate.programs.layers.stage import Ends, VirtualStage
from meshwright.validate.programs.layers.transformer import (
    AttentionCore,
    LayerOptions,
    Mlp,
    ResidualAdd,
    TransformerLayer,
)

__all__ = [
    "NORM_EPSILON",
    "AttentionCore",
    "Ends",
    "GatedSilu",
    "LayerOptions",
    "Mlp",
    "ResidualAdd",
    "SquaredRelu",
    "TransformerLayer",
    "VirtualStage",
]
