"""The layers of a transformer, made of the parts of a stack."""

from meshwright.validate.programs.layers.transformer import (
    AttentionCore,
    LayerOptions,
    Mlp,
    ResidualAdd,
    TransformerLayer,
    VirtualStage,
)

__all__ = [
    "AttentionCore",
    "LayerOptions",
    "Mlp",
    "ResidualAdd",
    "TransformerLayer",
    "VirtualStage",
]
