"""Plans as the configurations of frameworks that train, and back."""

from meshwright.planner.export.facts import (
    STACK_FACT,
    Facts,
    FileWords,
    Keys,
    MissingError,
    spelled,
    theirs,
    value_of,
)
from meshwright.planner.export.launch import (
    PORT,
    Launch,
    hand_script,
    job_name,
    nodes_of,
    slurm_script,
)
from meshwright.planner.export.megatron_core import CODECS as MEGATRON_CODECS
from meshwright.planner.export.registry import (
    FRAMEWORKS,
    export,
    export_plan,
    get_framework,
)
from meshwright.planner.export.table import ANY, Codec, Codecs, Framework, Program, Roles

__all__ = [
    "ANY",
    "FRAMEWORKS",
    "MEGATRON_CODECS",
    "PORT",
    "STACK_FACT",
    "Codec",
    "Codecs",
    "Facts",
    "FileWords",
    "Framework",
    "Keys",
    "Launch",
    "MissingError",
    "Program",
    "Roles",
    "export",
    "export_plan",
    "get_framework",
    "hand_script",
    "job_name",
    "nodes_of",
    "slurm_script",
    "spelled",
    "theirs",
    "value_of",
]
