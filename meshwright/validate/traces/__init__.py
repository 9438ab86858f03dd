"""Traces of jobs that ran: where the time of their kernels went."""

from meshwright.validate.traces.job_trace import COMMUNICATION, JobTrace, read_job_trace

__all__ = [
    "COMMUNICATION",
    "JobTrace",
    "read_job_trace",
]
