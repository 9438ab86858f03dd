"""Why a plan takes as long, and as much memory, as it does, and what would change that."""

from meshwright.planner.explain.explanation import Explanation, explain
from meshwright.planner.explain.report import explanation_document, explanation_report
from meshwright.planner.explain.resources import RESOURCES, resource_changes

__all__ = [
    "RESOURCES",
    "Explanation",
    "explain",
    "explanation_document",
    "explanation_report",
    "resource_changes",
]
