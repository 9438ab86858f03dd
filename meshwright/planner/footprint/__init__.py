"""The exact peak memory of every layout of a space, without simulating any."""

from meshwright.planner.footprint.footprint import (
    PipelineGroup,
    device_bytes_column,
    peak_bytes,
    pipeline_groups,
)

__all__ = [
    "PipelineGroup",
    "device_bytes_column",
    "peak_bytes",
    "pipeline_groups",
]
