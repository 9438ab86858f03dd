"""What each command of the planner does with its options."""

from meshwright.planner.cli.buckets import with_buckets
from meshwright.planner.cli.commands import (
    STEP_WIDTH,
    check_outputs,
    print_report,
    progress_bar,
    say_written,
    show,
    write_text,
)
from meshwright.planner.cli.request import read_setting, resolve_plan

__all__ = [
    "STEP_WIDTH",
    "check_outputs",
    "print_report",
    "progress_bar",
    "read_setting",
    "resolve_plan",
    "say_written",
    "show",
    "with_buckets",
    "write_text",
]
