"""The layers of a transformer, made of the parts of a stack."""

from meshwright.validate.programs.layers.transformer import Layer, LayerOptions, ResidualAdd, Stage

__all__ = [
    "Layer",
    "LayerOptions",
    "ResidualAdd",
    "Stage",
]
