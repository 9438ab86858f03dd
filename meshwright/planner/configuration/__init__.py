"""Configurations that people and other programs wrote: their texts, keys and options."""

from meshwright.planner.configuration.options import (
    Effect,
    Option,
    Options,
    OptionWord,
    Takes,
    Unknown,
    converted,
    known_option,
    list_options,
    load_options,
    read_options,
)

__all__ = [
    "Effect",
    "Option",
    "OptionWord",
    "Options",
    "Takes",
    "Unknown",
    "converted",
    "known_option",
    "list_options",
    "load_options",
    "read_options",
]
