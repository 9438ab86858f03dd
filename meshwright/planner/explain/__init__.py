"""Why a plan takes as long, and as much memory, as it does, and what would change that."""

from meshwright.planner.explain.explanation import explain
from meshwright.planner.explain.report import explanation_document, explanation_report

__all__ = [
    "explain",
    "explanation_document",
    "explanation_report",
]
