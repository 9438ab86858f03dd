"""Configurations that people and other programs wrote: their texts, keys and options."""

from meshwright.planner.configuration.options import (
    Effect,
    Option,
    Takes,
    list_options,
    load_options,
)

__all__ = ["Effect", "Option", "Takes", "list_options", "load_options"]
