"""The language of bash: its grammar, texts with their places, words, patterns and arithmetic."""

from meshwright.planner.shell.language.arithmetic import evaluate
from meshwright.planner.shell.language.fields import (
    BRACES,
    WHITE,
    Field,
    Fragment,
    Kind,
    braced,
    field_of,
    split,
)
from meshwright.planner.shell.language.grammar import MOST_BYTES, Source, parse, source_of
from meshwright.planner.shell.language.patterns import escaped, is_match, pieces_of
from meshwright.planner.shell.language.state import Function, Key, State, Variable, merged
from meshwright.planner.shell.language.texts import (
    FILE_STRIDE,
    MARKS,
    MOST_CHARACTERS,
    Text,
    Unknown,
    Unknowns,
    Word,
    joined,
    written,
)
from meshwright.planner.shell.language.wrappers import (
    SLURM,
    Options,
    environment_of,
    next_at,
    split_options,
    where,
    wrapped_at,
)

__all__ = [
    "BRACES",
    "FILE_STRIDE",
    "MARKS",
    "MOST_BYTES",
    "MOST_CHARACTERS",
    "SLURM",
    "WHITE",
    "Field",
    "Fragment",
    "Function",
    "Key",
    "Kind",
    "Options",
    "Source",
    "State",
    "Text",
    "Unknown",
    "Unknowns",
    "Variable",
    "Word",
    "braced",
    "environment_of",
    "escaped",
    "evaluate",
    "field_of",
    "is_match",
    "joined",
    "merged",
    "next_at",
    "parse",
    "pieces_of",
    "source_of",
    "split",
    "split_options",
    "where",
    "wrapped_at",
    "written",
]
