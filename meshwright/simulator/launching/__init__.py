"""Limits of the frameworks that launch a stack: plans that their options cannot express."""

from meshwright.simulator.launching.gaps import (
    all_gaps,
    chosen_tables,
    framework_gaps,
    framework_refusal,
    refusal_text,
)

__all__ = [
    "all_gaps",
    "chosen_tables",
    "framework_gaps",
    "framework_refusal",
    "refusal_text",
]
