"""Micro-benchmarks of a machine, and the device and cluster profiles made of them."""

from meshwright.validate.calibration.command import run_calibrate
from meshwright.validate.calibration.options import CalibrateOptions
from meshwright.validate.calibration.rows import Accelerator

__all__ = [
    "Accelerator",
    "CalibrateOptions",
    "run_calibrate",
]
