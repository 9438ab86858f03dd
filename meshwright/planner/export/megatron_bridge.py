"""Megatron Bridge: a recipe with overrides of its ConfigContainer.

Overrides are those of scripts/training/run_recipe.py in v0.6.0
(https://github.com/NVIDIA-NeMo/Megatron-Bridge, commit 51885cf1).
"""

from collections.abc import Mapping

from meshwright.planner.export import megatron_core
from meshwright.planner.export.facts import Keys
from meshwright.planner.export.table import Export, Program
from meshwright.planner.export.texts import command_words, single_quoted


def _command(export: Export) -> tuple[str, ...]:
    keys = dict(export.keys)
    recipe = keys.pop("recipe")
    start = f"scripts/training/run_recipe.py --recipe {recipe} --mode pretrain --dataset mock"
    return (start, *(single_quoted(f"{key}={_hydra(value)}") for key, value in keys.items()))


def _hydra(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _read(text: str) -> Keys:
    """Return the overrides of a script, and its recipe; the runner's own options are no keys."""
    words = command_words(text)
    found: Keys = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        key, sign, value = word.partition("=")
        if word == "--recipe":
            found["recipe"] = following
        elif sign and ("." in key or key == "mixed_precision") and not word.startswith("-"):
            found[key] = _value(value)
    return found


def _value(text: str) -> object:
    plain: Mapping[str, object] = {"null": None, "true": True, "false": False}
    if text in plain:
        return plain[text]
    return int(text) if text.isdigit() else text


PROGRAM = Program(
    command=_command, is_script=lambda _: True, read=_read, codecs=megatron_core.CODECS
)
