"""Commands of the planner, from options to results."""

from meshwright.planner.cli.buckets import with_bucket_size
from meshwright.planner.cli.commands import (
    NOTHING_FITS,
    STEP_WIDTH,
    check_json,
    check_outputs,
    print_report,
    print_written,
    progress_bar,
    show,
    tell,
    write_text,
)
from meshwright.planner.cli.request import Setting, read_budget, read_setting, resolve_plan
from meshwright.planner.cli.search_request import read_limits

__all__ = [
    "NOTHING_FITS",
    "STEP_WIDTH",
    "Setting",
    "check_json",
    "check_outputs",
    "print_report",
    "print_written",
    "progress_bar",
    "read_budget",
    "read_limits",
    "read_setting",
    "resolve_plan",
    "show",
    "tell",
    "with_bucket_size",
    "write_text",
]
