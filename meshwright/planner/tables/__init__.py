"""Frameworks' tables: what is told by them, how a plan is written by one, and texts of launches."""

from meshwright.planner.tables.facts import (
    STACK_FACT,
    Facts,
    FileWords,
    Keys,
    MissingError,
    spelled,
    theirs,
    value_of,
)
from meshwright.planner.tables.launch import (
    Launch,
    Starter,
    hand_script,
    job_name,
    nodes_of,
    slurm_script,
)
from meshwright.planner.tables.table import (
    ANY,
    Codec,
    Codecs,
    Export,
    Framework,
    Program,
    Roles,
    write_keys,
)
from meshwright.planner.tables.texts import (
    flags,
    layer_numbers,
    layout_text,
    remarks,
    single_quoted,
    tyro_options,
)

__all__ = [
    "ANY",
    "STACK_FACT",
    "Codec",
    "Codecs",
    "Export",
    "Facts",
    "FileWords",
    "Framework",
    "Keys",
    "Launch",
    "MissingError",
    "Program",
    "Roles",
    "Starter",
    "flags",
    "hand_script",
    "job_name",
    "layer_numbers",
    "layout_text",
    "nodes_of",
    "remarks",
    "single_quoted",
    "slurm_script",
    "spelled",
    "theirs",
    "tyro_options",
    "value_of",
    "write_keys",
]
