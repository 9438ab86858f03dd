"""The options of the command line as records, and the words that they are read from."""

from meshwright.planner.options.records import (
    FileOptions,
    JobOptions,
    LayoutOptions,
    LimitOptions,
    MatmulOptions,
    MoneyOptions,
    NameOptions,
    OutputOptions,
    ReplicaOptions,
    check_counts,
    read_memory_limit,
    read_price,
    read_tokens,
)
from meshwright.planner.options.words import as_command, option_name, run_command_line

__all__ = [
    "FileOptions",
    "JobOptions",
    "LayoutOptions",
    "LimitOptions",
    "MatmulOptions",
    "MoneyOptions",
    "NameOptions",
    "OutputOptions",
    "ReplicaOptions",
    "as_command",
    "check_counts",
    "option_name",
    "read_memory_limit",
    "read_price",
    "read_tokens",
    "run_command_line",
]
