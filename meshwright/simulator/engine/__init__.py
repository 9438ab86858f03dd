"""The discrete-event engine; the only package that knows SimPy."""

from meshwright.simulator.engine.graph import Task, TaskKind, TaskTimes, simulate_tasks
from meshwright.simulator.engine.groups import Intervals, busy_end_ps
from meshwright.simulator.engine.program import Instruction, compile_rank
from meshwright.simulator.engine.work import (
    Message,
    PassSegment,
    RankTimes,
    RankWork,
    StepTimes,
    StepWork,
    UnitCollective,
    UnitPart,
    UnitWork,
    VirtualStageWork,
    num_gathers,
    with_overhead,
)
from meshwright.simulator.engine.world import simulate_folded, simulate_unfolded

__all__ = [
    "Instruction",
    "Intervals",
    "Message",
    "PassSegment",
    "RankTimes",
    "RankWork",
    "StepTimes",
    "StepWork",
    "Task",
    "TaskKind",
    "TaskTimes",
    "UnitCollective",
    "UnitPart",
    "UnitWork",
    "VirtualStageWork",
    "busy_end_ps",
    "compile_rank",
    "num_gathers",
    "simulate_folded",
    "simulate_tasks",
    "simulate_unfolded",
    "with_overhead",
]
