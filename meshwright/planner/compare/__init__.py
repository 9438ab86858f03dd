"""Comparison of several plans, term by term."""

from meshwright.planner.compare.comparison import Comparison, compare, memory_terms, time_terms
from meshwright.planner.compare.files import term_rows, write_comparison
from meshwright.planner.compare.report import comparison_document, comparison_report

__all__ = [
    "Comparison",
    "compare",
    "comparison_document",
    "comparison_report",
    "memory_terms",
    "term_rows",
    "time_terms",
    "write_comparison",
]
