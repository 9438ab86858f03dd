"""What a framework that launches a stack can be told of its plans."""

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
