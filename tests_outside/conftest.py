"""torchtitan is imported by its witness first, which keeps it from asking for a GPU."""

from witnesses import torchtitan_job

__all__ = ["torchtitan_job"]
