"""Explanation of the time and the memory of a plan, and of the changes that would help."""

from meshwright.planner.explain.explanation import explain
from meshwright.planner.explain.report import explanation_document, explanation_report

__all__ = [
    "explain",
    "explanation_document",
    "explanation_report",
]
