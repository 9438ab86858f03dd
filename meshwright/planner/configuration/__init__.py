"""Configurations that people and other programs wrote: their texts, keys and options."""

from meshwright.planner.configuration.bridge import (
    bridge_recipe,
    read_overrides,
    said_of_section,
)
from meshwright.planner.configuration.documents import FRAMEWORK_FILE, Document
from meshwright.planner.configuration.options import (
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
from meshwright.planner.configuration.recipes import Recipe, load_recipes
from meshwright.planner.configuration.texts import (
    json_keys,
    nested,
    read_json,
    read_yaml,
    toml_text,
    yaml_text,
)
from meshwright.planner.configuration.toml_lines import read_toml

__all__ = [
    "FRAMEWORK_FILE",
    "Document",
    "Effect",
    "Option",
    "OptionWord",
    "Options",
    "Recipe",
    "Takes",
    "Unknown",
    "bridge_recipe",
    "converted",
    "json_keys",
    "known_option",
    "list_options",
    "load_options",
    "load_recipes",
    "nested",
    "read_json",
    "read_options",
    "read_overrides",
    "read_toml",
    "read_yaml",
    "said_of_section",
    "toml_text",
    "yaml_text",
]
