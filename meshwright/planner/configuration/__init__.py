"""Configurations that people and other programs wrote: their texts, keys and options."""

from meshwright.planner.configuration.documents import FRAMEWORK_FILE, PARENTS, Document, named_file
from meshwright.planner.configuration.options import (
    LAUNCHERS,
    Effect,
    Option,
    Options,
    OptionWord,
    Takes,
    Unknown,
    converted,
    known_option,
    list_options,
    load_options,
    read_options,
)
from meshwright.planner.configuration.texts import (
    json_keys,
    read_json,
    read_yaml,
    toml_text,
    yaml_text,
)
from meshwright.planner.configuration.toml_lines import read_toml

__all__ = [
    "FRAMEWORK_FILE",
    "LAUNCHERS",
    "PARENTS",
    "Document",
    "Effect",
    "Option",
    "OptionWord",
    "Options",
    "Takes",
    "Unknown",
    "converted",
    "json_keys",
    "known_option",
    "list_options",
    "load_options",
    "named_file",
    "read_json",
    "read_options",
    "read_toml",
    "read_yaml",
    "toml_text",
    "yaml_text",
]
