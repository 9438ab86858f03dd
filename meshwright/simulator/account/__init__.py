"""Accounting of a simulated step: time, memory, traffic, streams and warnings."""

from typing import TYPE_CHECKING

from meshwright.faces import lazy_name
from meshwright.simulator.account.advice import copy_warnings, plan_warnings
from meshwright.simulator.account.breakdown import time_breakdown
from meshwright.simulator.account.critical_path import CLOSING, CriticalPath, critical_path
from meshwright.simulator.account.host_traffic import NO_TRAFFIC, HostTraffic, host_traffic
from meshwright.simulator.account.lanes import ResourceLane, task_lanes
from meshwright.simulator.account.result import AsyncRun, MemoryResult, StageMemory, StepResult
from meshwright.simulator.account.shown import Presenter, Shown

if TYPE_CHECKING:
    from meshwright.simulator.account.counts import rank_flops
    from meshwright.simulator.account.passes import RankPass, rank_passes
    from meshwright.simulator.account.traffic import (
        Traffic,
        closing_traffic,
        message_traffic,
        norm_calls,
        norm_ranks,
        norm_traffic,
        rank_traffic,
        token_traffic,
    )

__all__ = [
    "CLOSING",
    "NO_TRAFFIC",
    "AsyncRun",
    "CriticalPath",
    "HostTraffic",
    "MemoryResult",
    "Presenter",
    "RankPass",
    "ResourceLane",
    "Shown",
    "StageMemory",
    "StepResult",
    "Traffic",
    "closing_traffic",
    "copy_warnings",
    "critical_path",
    "host_traffic",
    "message_traffic",
    "norm_calls",
    "norm_ranks",
    "norm_traffic",
    "plan_warnings",
    "rank_flops",
    "rank_passes",
    "rank_traffic",
    "task_lanes",
    "time_breakdown",
    "token_traffic",
]


def __getattr__(name: str) -> object:
    """Return a name of a late module, imported when first asked for."""
    return lazy_name(__name__, ("passes", "counts", "traffic"), name)
