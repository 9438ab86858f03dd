"""The commands ``meshwright validate`` and ``count``: options, and what is done with them."""

from meshwright.validate.cli.commands import run_validate
from meshwright.validate.cli.count import CountOptions, run_count
from meshwright.validate.cli.options import DEFAULT_STEPS, ValidateOptions, ValidateOutput
from meshwright.validate.cli.plan_words import plan_of_options

__all__ = [
    "DEFAULT_STEPS",
    "CountOptions",
    "ValidateOptions",
    "ValidateOutput",
    "plan_of_options",
    "run_count",
    "run_validate",
]
