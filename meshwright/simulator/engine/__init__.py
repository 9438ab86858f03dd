"""The discrete-event engine; the only package that knows SimPy."""

from meshwright.simulator.engine.graph import Task, TaskKind, TaskTimes, simulate_tasks
from meshwright.simulator.engine.groups import Intervals, busy_end_ps
from meshwright.simulator.engine.program import Instruction, compile_rank
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
    num_gathers,
    with_overhead,
)
from meshwright.simulator.engine.world import simulate_folded, simulate_unfolded

__all__ = [
    "ChunkWork",
    "Instruction",
    "Intervals",
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
    "busy_end_ps",
    "compile_rank",
    "num_gathers",
    "simulate_folded",
    "simulate_tasks",
    "simulate_unfolded",
    "with_overhead",
]
