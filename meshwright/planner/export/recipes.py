"""Recipes of a framework: layouts that it has in code, by name, each with the keys that it sets."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import Profile, ProfileError, shown, suggestion
from meshwright.records import Field

FOLDER = Path(__file__).resolve().parents[1] / "data" / "recipes"
FINE_TUNING = ("_sft_", "_peft_", "_lora_", "_dora_", "_finetune_")

UserOptions = bool | int | float | str | list[str | int] | dict[str, str | int]
"""A value of a recipe's key."""


class Recipe(Profile):
    """Keys of a recipe that say a layout, or that no plan says.

    Args:
        aliases: Further names of it.
        model: The built-in model that it trains; empty where it trains none.
        sizes: In what its model differs from that, or what is known of one that is none.
        release: The checkpoint whose configuration says them.
        keys: Its own values.
    """

    aliases: tuple[str, ...] = ()
    model: str = ""
    sizes: dict[str, bool | int] = Field({})
    release: str = ""
    keys: dict[str, UserOptions] = Field({})

    def has_section(self, name: str) -> bool:
        """Return True if it fills a section, so that an override may set keys in it."""
        return any(key.startswith(f"{name}.") for key in self.keys)


class _File(Profile):
    source: str
    usual: dict[str, UserOptions]
    recipes: dict[str, Recipe]
    refused: dict[str, str]


class Recipes(NamedTuple):
    """Recipes of one version of a framework: by all their names, and those of no plan, with why."""

    known: Mapping[str, Recipe]
    refused: Mapping[str, str]

    def find(self, name: str) -> Recipe:
        """Return a recipe by name, with all of its values.

        Raises:
            ProfileError: If there is none of that name, or no plan says what it does.
        """
        if name in self.known:
            return self.known[name]
        if name in self.refused:
            raise ProfileError(f"recipe {name} is in no plan: {self.refused[name]}")
        if any(each in f"_{name}_" for each in FINE_TUNING):
            raise ProfileError(f"recipe {shown(name)} is in no plan: it fine-tunes")
        hint = " (benchmarks of perf_recipes are not read)" if "gpu_" in name else ""
        raise ProfileError(f"recipe {shown(name)} is unknown{hint}; {suggestion(name, self.known)}")


@cache
def load_recipes(name: str) -> Recipes:
    """Return the recipes of a framework.

    Args:
        name: Of the framework, with its version: ``megatron-bridge-0.6``.

    >>> load_recipes("megatron-bridge-0.6").find("llama31_405b_pretrain_config").model
    'llama3-405b'
    """
    text = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    file = _File.trusted(tomllib.loads(text))
    by_name: dict[str, Recipe] = {}
    for own_name, recipe in file.recipes.items():
        whole = recipe.model_copy(update={"keys": {**file.usual, **recipe.keys}})
        by_name |= dict.fromkeys((own_name, *recipe.aliases), whole)
    return Recipes(by_name, file.refused)
