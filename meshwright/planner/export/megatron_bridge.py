"""Megatron Bridge: a recipe with overrides of its ConfigContainer.

Overrides are those of scripts/training/run_recipe.py in v0.6.0
(https://github.com/NVIDIA-NeMo/Megatron-Bridge, commit 51885cf1).
"""

from collections.abc import Mapping, Sequence

from meshwright.planner.configuration import Options, OptionWord
from meshwright.planner.export import megatron_core
from meshwright.planner.export.table import Export, Program
from meshwright.planner.export.texts import single_quoted


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


def _read_words(words: Sequence[OptionWord]) -> Options:
    """Return the overrides of a command, and its recipe; the runner's own options are no keys."""
    found = Options({}, {}, [], [])
    for word, following in zip(words, [*(each.text for each in words[1:]), ""], strict=True):
        key, sign, value = word.text.partition("=")
        if word.text == "--recipe":
            found.keys["recipe"], found.lines["recipe"] = following, word.line
        elif sign and ("." in key or key == "mixed_precision") and not key.startswith("-"):
            found.keys[key], found.lines[key] = _value(value), word.line
    return found


def _value(text: str) -> object:
    plain: Mapping[str, object] = {"null": None, "true": True, "false": False}
    if text in plain:
        return plain[text]
    return int(text) if text.isdigit() else text


PROGRAM = Program(
    command=_command,
    is_script=lambda _: True,
    read_words=_read_words,
    codecs=megatron_core.CODECS,
)
