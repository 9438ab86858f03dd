"""Layers of each pipeline stage: by a rule, or parsed from a text."""

from meshwright.simulator.layout.splits.rules import split_layers
from meshwright.simulator.layout.splits.texts import (
    check_predictions,
    num_predictions,
    parse_stages,
    prediction_place,
    read_layout,
)

__all__ = [
    "check_predictions",
    "num_predictions",
    "parse_stages",
    "prediction_place",
    "read_layout",
    "split_layers",
]
