"""Cases to measure on a machine, their times as rows, and the files of rows."""

from meshwright.validate.calibration.rows.cases import (
    Coverage,
    Progress,
    collective_cases,
    device_cases,
    in_batches,
    tensor_bytes,
)
from meshwright.validate.calibration.rows.machine import Accelerator, Machine
from meshwright.validate.calibration.rows.nccl_tests import NcclRun, read_nccl_tests
from meshwright.validate.calibration.rows.row_file import FILE_NAME, RowFile
from meshwright.validate.calibration.rows.rows import (
    BenchmarkCase,
    CaseGroup,
    Row,
    collective,
    median,
    summarised,
)

__all__ = [
    "FILE_NAME",
    "Accelerator",
    "BenchmarkCase",
    "CaseGroup",
    "Coverage",
    "Machine",
    "NcclRun",
    "Progress",
    "Row",
    "RowFile",
    "collective",
    "collective_cases",
    "device_cases",
    "in_batches",
    "median",
    "read_nccl_tests",
    "summarised",
    "tensor_bytes",
]
