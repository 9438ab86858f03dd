"""torchtitan is imported by its witness first, which keeps it from asking for a GPU."""

from witnesses import torchtitan_job

__all__ = ["torchtitan_job"]

# Imports torchtitan 0.3, whose counts are recorded.
collect_ignore = ["witnesses/torchtitan_0_3_job.py"]
