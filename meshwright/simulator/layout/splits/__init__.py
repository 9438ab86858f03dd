"""Layers of each pipeline stage: by a rule, or parsed from a text."""

from meshwright.simulator.layout.splits.rules import split_layers
from meshwright.simulator.layout.splits.texts import (
    check_mtp_layers,
    count_mtp_layers,
    layout_mtp_stage,
    parse_stages,
    read_layout,
)

__all__ = [
    "check_mtp_layers",
    "count_mtp_layers",
    "layout_mtp_stage",
    "parse_stages",
    "read_layout",
    "split_layers",
]
