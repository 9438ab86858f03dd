"""Constants and profiles made of rows, and how well they agree with them."""

from meshwright.validate.calibration.fit.calibrated import (
    calibrated_device,
    calibrated_link,
    combined_rows,
    evidence,
    misfit_of,
)
from meshwright.validate.calibration.fit.cost_fit import launch_floor
from meshwright.validate.calibration.fit.datasheet import read_peak
from meshwright.validate.calibration.fit.picture import draw_residuals
from meshwright.validate.calibration.fit.profile_files import write_profiles
from meshwright.validate.calibration.fit.residuals import (
    Residual,
    Summary,
    rate_unit,
    residuals_of,
    summaries,
    write_residuals,
)
from meshwright.validate.calibration.fit.stack_file import check_stacks, write_stacks

__all__ = [
    "Residual",
    "Summary",
    "calibrated_device",
    "calibrated_link",
    "check_stacks",
    "combined_rows",
    "draw_residuals",
    "evidence",
    "launch_floor",
    "misfit_of",
    "rate_unit",
    "read_peak",
    "residuals_of",
    "summaries",
    "write_profiles",
    "write_residuals",
    "write_stacks",
]
