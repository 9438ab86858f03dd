"""Models of transformers under Accelerate, those with experts too, one rank."""

from meshwright.planner.reports import SavedPlan
from witnesses.huggingface_job import HuggingFaceJob, answers

__all__ = ["answers", "job"]


def job(saved: SavedPlan) -> HuggingFaceJob:
    """Return a rank of the job."""
    return HuggingFaceJob(saved)
