"""The kernels of one device, timed."""

from meshwright.validate.calibration.measure.device_bench import measure_device
from meshwright.validate.calibration.measure.machine_probe import probe_machine
from meshwright.validate.calibration.measure.stopwatch import (
    calls_of_visit,
    interleaved,
    repeats_of,
    warmed_up_s,
)

__all__ = [
    "calls_of_visit",
    "interleaved",
    "measure_device",
    "probe_machine",
    "repeats_of",
    "warmed_up_s",
]
