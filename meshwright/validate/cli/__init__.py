"""The command ``meshwright validate``: its options, and what it does with them."""

from meshwright.validate.cli.commands import run_validate
from meshwright.validate.cli.options import DEFAULT_STEPS, ValidateOptions, ValidateOutput
from meshwright.validate.cli.plan_words import plan_of_words

__all__ = [
    "DEFAULT_STEPS",
    "ValidateOptions",
    "ValidateOutput",
    "plan_of_words",
    "run_validate",
]
