"""Frameworks are imported by their witnesses first.

These keep torchtitan from asking for a GPU, and let Megatron-Core find what stands for Apex.
"""

from witnesses import megatron_job, torchtitan_job

__all__ = ["megatron_job", "torchtitan_job"]

# Imports torchtitan 0.3, whose counts are recorded.
collect_ignore = ["witnesses/torchtitan_0_3_job.py"]
