"""The simulator: model x plan to operators, costs, events and a result."""

from typing import TYPE_CHECKING

from meshwright.faces import lazy_name
from meshwright.simulator.account import AsyncRun, MemoryResult, StageMemory, StepResult
from meshwright.simulator.blocks import CONVENTION, hardware_flops, model_flops
from meshwright.simulator.costs import COMMUNICATION, Category, Cost, CostModel
from meshwright.simulator.engine import (
    MAX_PASSES,
    StepTimes,
    StepWork,
    simulate_folded,
    simulate_unfolded,
)
from meshwright.simulator.errors import (
    DeadlockError,
    MistakesError,
    PlanError,
    TooManyTasksError,
)
from meshwright.simulator.layout import (
    Axis,
    Mesh,
    ParallelPlan,
    ParameterServer,
    ResolvedPlan,
    TrainingJob,
    parse_stages,
    resolve,
    resolve_stages,
)
from meshwright.simulator.model import (
    ModelSpec,
    count_active_parameters,
    count_parameters,
    list_models,
    load_model,
)
from meshwright.simulator.schedules import (
    RUNTIMES,
    SCHEDULES,
    Action,
    Phase,
    Schedule,
    get_schedule,
)
from meshwright.simulator.simulation import account, check_plan, rank_timeline, simulate
from meshwright.simulator.step import BuiltStep, build_step

if TYPE_CHECKING:
    from meshwright.simulator.chrome_trace import write_chrome_trace

__all__ = [
    "COMMUNICATION",
    "CONVENTION",
    "MAX_PASSES",
    "RUNTIMES",
    "SCHEDULES",
    "Action",
    "AsyncRun",
    "Axis",
    "BuiltStep",
    "Category",
    "Cost",
    "CostModel",
    "DeadlockError",
    "MemoryResult",
    "Mesh",
    "MistakesError",
    "ModelSpec",
    "ParallelPlan",
    "ParameterServer",
    "Phase",
    "PlanError",
    "ResolvedPlan",
    "Schedule",
    "StageMemory",
    "StepResult",
    "StepTimes",
    "StepWork",
    "TooManyTasksError",
    "TrainingJob",
    "account",
    "build_step",
    "check_plan",
    "count_active_parameters",
    "count_parameters",
    "get_schedule",
    "hardware_flops",
    "list_models",
    "load_model",
    "model_flops",
    "parse_stages",
    "rank_timeline",
    "resolve",
    "resolve_stages",
    "simulate",
    "simulate_folded",
    "simulate_unfolded",
    "write_chrome_trace",
]


def __getattr__(name: str) -> object:
    """Return a writer of files, imported when first asked for."""
    return lazy_name(__name__, ("chrome_trace",), name)
