"""Exact peak memory of all layouts of a space, without simulation."""

from meshwright.planner.footprint.footprint import device_bytes_column, peak_bytes
from meshwright.planner.footprint.hosts import host_bytes_column
from meshwright.planner.footprint.least import least_bytes
from meshwright.planner.footprint.partial import PartialMemory
from meshwright.planner.footprint.states import least_state_bytes

__all__ = [
    "PartialMemory",
    "device_bytes_column",
    "host_bytes_column",
    "least_bytes",
    "least_state_bytes",
    "peak_bytes",
]
