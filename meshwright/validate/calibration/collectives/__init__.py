"""Collectives between the processes of one machine, timed."""

from meshwright.validate.calibration.collectives.bench import measure_collectives

__all__ = [
    "measure_collectives",
]
