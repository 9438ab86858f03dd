"""The layers of a transformer, made of the parts of a stack."""

from meshwright.validate.programs.layers.stage import VirtualStage
from meshwright.validate.programs.layers.transformer import (
    NORM_EPSILON,
    AttentionCore,
    GatedSilu,
    LayerOptions,
    Mlp,
    ResidualAdd,
    SquaredRelu,
    TransformerLayer,
)

__all__ = [
    "NORM_EPSILON",
    "AttentionCore",
    "GatedSilu",
    "LayerOptions",
    "Mlp",
    "ResidualAdd",
    "SquaredRelu",
    "TransformerLayer",
    "VirtualStage",
]
