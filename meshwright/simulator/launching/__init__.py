"""What a framework that launches a stack can be told of its plans."""

from meshwright.simulator.launching.gaps import (
    LaunchGap,
    all_gaps,
    chosen_tables,
    framework_gaps,
    framework_refusal,
    refusal_text,
)
from meshwright.simulator.launching.plan_numbers import code_of, fact_number

__all__ = [
    "LaunchGap",
    "all_gaps",
    "chosen_tables",
    "code_of",
    "fact_number",
    "framework_gaps",
    "framework_refusal",
    "refusal_text",
]
