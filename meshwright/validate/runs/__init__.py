"""A plan's ranks at work: on fakes in this process, or as real processes."""

from meshwright.validate.runs.fake import check_torch, measure_fakes, run_counted
from meshwright.validate.runs.real import (
    check_backend,
    check_host,
    collected,
    host_bytes,
    kept_failure,
    reference_bytes,
    reference_of,
    results_folder,
    write_launch,
)

__all__ = [
    "check_backend",
    "check_host",
    "check_torch",
    "collected",
    "host_bytes",
    "kept_failure",
    "measure_fakes",
    "reference_bytes",
    "reference_of",
    "results_folder",
    "run_counted",
    "write_launch",
]
