"""Command `matmul`: every placement of a matrix product, as text, files and a picture."""

from meshwright.planner.matmul.report import matmul_document, matmul_report, write_matmul
from meshwright.planner.matmul.study import read_study

__all__ = [
    "matmul_document",
    "matmul_report",
    "read_study",
    "write_matmul",
]
