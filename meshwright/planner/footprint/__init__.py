"""The exact peak memory of every layout of a space, without simulating any."""

from meshwright.planner.footprint.footprint import (
    Group,
    device_bytes_column,
    peak_bytes,
    pipeline_groups,
)

__all__ = [
    "Group",
    "device_bytes_column",
    "peak_bytes",
    "pipeline_groups",
]
