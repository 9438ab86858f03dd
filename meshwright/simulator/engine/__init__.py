"""The discrete-event engine; the only package that knows SimPy."""

from meshwright.simulator.engine.graph import Task, TaskKind, TaskTimes, simulate_tasks
from meshwright.simulator.engine.work import (
    ChunkWork,
    Message,
    RankTimes,
    RankWork,
    Segment,
    StepTimes,
    StepWork,
    Unit,
    UnitCollective,
    UnitPart,
    with_overhead,
)
from meshwright.simulator.engine.world import simulate_folded, simulate_unfolded

__all__ = [
    "ChunkWork",
    "Message",
    "RankTimes",
    "RankWork",
    "Segment",
    "StepTimes",
    "StepWork",
    "Task",
    "TaskKind",
    "TaskTimes",
    "Unit",
    "UnitCollective",
    "UnitPart",
    "simulate_folded",
    "simulate_tasks",
    "simulate_unfolded",
    "with_overhead",
]
