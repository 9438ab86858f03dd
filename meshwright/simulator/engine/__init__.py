"""The discrete-event engine; the only package that knows SimPy."""

from meshwright.simulator.engine.copies import CopyPoint, HostCopies
from meshwright.simulator.engine.graph import Task, TaskKind, TaskTimes, simulate_tasks
from meshwright.simulator.engine.record import RankStreams, RankTimes, Span, SpanKind, StepTimes
from meshwright.simulator.engine.work import (
    MAX_PASSES,
    Message,
    OverlapSavings,
    PassSegment,
    PassWork,
    RankWork,
    StepWork,
    UnitWork,
    check_passes,
    num_gathers,
    with_overhead,
)
from meshwright.simulator.engine.world import simulate_folded, simulate_unfolded

__all__ = [
    "MAX_PASSES",
    "CopyPoint",
    "HostCopies",
    "Message",
    "OverlapSavings",
    "PassSegment",
    "PassWork",
    "RankStreams",
    "RankTimes",
    "RankWork",
    "Span",
    "SpanKind",
    "StepTimes",
    "StepWork",
    "Task",
    "TaskKind",
    "TaskTimes",
    "UnitWork",
    "check_passes",
    "num_gathers",
    "simulate_folded",
    "simulate_tasks",
    "simulate_unfolded",
    "with_overhead",
]
