"""The exact peak memory of every layout of a space, without simulating any."""

from meshwright.planner.footprint.footprint import Footprint, device_bytes_column, peak_bytes
from meshwright.planner.footprint.groups import PipelineGroup, pipeline_groups
from meshwright.planner.footprint.hosts import host_bytes_column
from meshwright.planner.footprint.least import (
    PassColumns,
    StateColumns,
    least_bytes,
    least_of_columns,
)
from meshwright.planner.footprint.states import least_state_bytes

__all__ = [
    "Footprint",
    "PassColumns",
    "PipelineGroup",
    "StateColumns",
    "device_bytes_column",
    "host_bytes_column",
    "least_bytes",
    "least_of_columns",
    "least_state_bytes",
    "peak_bytes",
    "pipeline_groups",
]
