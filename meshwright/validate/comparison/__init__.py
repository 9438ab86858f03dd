"""Predicted against measured: checks of each rank and of a run, gathered and reported."""

from meshwright.validate.comparison.checks import (
    HOST_PEAK,
    PEAK,
    TO_DEVICE,
    TO_HOST,
    Check,
    CheckUnit,
    CheckVerdict,
    compare_rank,
    has_failed,
)
from meshwright.validate.comparison.report import (
    check_fields,
    failure_document,
    saved_fields,
    validation_document,
    validation_report,
    write_validation,
)
from meshwright.validate.comparison.run_checks import (
    last_loss_check,
    loss_check,
    run_losses,
    staleness_checks,
    time_checks,
)
from meshwright.validate.comparison.validation import Validation, rank_kinds

__all__ = [
    "HOST_PEAK",
    "PEAK",
    "TO_DEVICE",
    "TO_HOST",
    "Check",
    "CheckUnit",
    "CheckVerdict",
    "Validation",
    "check_fields",
    "compare_rank",
    "failure_document",
    "has_failed",
    "last_loss_check",
    "loss_check",
    "rank_kinds",
    "run_losses",
    "saved_fields",
    "staleness_checks",
    "time_checks",
    "validation_document",
    "validation_report",
    "write_validation",
]
