"""A user's own training script, run as one rank of any world and counted."""

from meshwright.validate.scripts.report import count_document, count_report, write_count
from meshwright.validate.scripts.run import (
    ScriptCount,
    ScriptFailedError,
    ScriptRun,
    count,
    count_script,
)
from meshwright.validate.scripts.torchrun import check_script

__all__ = [
    "ScriptCount",
    "ScriptFailedError",
    "ScriptRun",
    "check_script",
    "count",
    "count_document",
    "count_report",
    "count_script",
    "write_count",
]
