"""Plans as the configurations of frameworks that train, and back."""

from meshwright.planner.export.facts import STACK_FACT, Facts
from meshwright.planner.export.launch import (
    PORT,
    Launch,
    hand_script,
    job_name,
    nodes_of,
    slurm_script,
)
from meshwright.planner.export.registry import (
    FRAMEWORKS,
    export,
    export_plan,
    get_framework,
    read_framework_file,
)

__all__ = [
    "FRAMEWORKS",
    "PORT",
    "STACK_FACT",
    "Facts",
    "Launch",
    "export",
    "export_plan",
    "get_framework",
    "hand_script",
    "job_name",
    "nodes_of",
    "read_framework_file",
    "slurm_script",
]
