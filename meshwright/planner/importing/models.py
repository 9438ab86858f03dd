"""Models that a configuration describes, set beside those that have names."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.simulator import ModelSpec, load_model
from meshwright.simulator.model import list_models

# What decides no size and no time of a step: labels, the usual length, the spelling of code.
LABELS = {"name", "title", "source", "seq_len", "scored_fraction", "spelling", "left_out"}


class Difference(NamedTuple):
    """A field in which two models differ; those of experts are joined with a dot."""

    field: str
    first: object
    second: object


def differences(first: ModelSpec, second: ModelSpec) -> list[Difference]:
    """Return the fields that decide sizes or times in which two models differ.

    Positions that are not learned have no weights: how many there may be decides nothing.

    >>> [each.field for each in differences(load_model("llama3-8b"), load_model("llama2-7b"))]
    ['vocab_size', 'num_kv_heads', 'ffn_hidden_size']
    """
    unused = set() if "learned" in {first.positions, second.positions} else {"max_positions"}
    found = _differences("", _facts(first), _facts(second))
    return [each for each in found if each.field not in LABELS | unused]


def _facts(model: ModelSpec) -> dict[str, object]:
    """Return all facts of a model, rare ones that are as usual, too."""
    return {**{name: getattr(model, name) for name in ModelSpec.model_fields}, **model.model_dump()}


def _differences(
    prefix: str, first: dict[str, object], second: dict[str, object]
) -> Iterator[Difference]:
    for name in dict.fromkeys((*first, *second)):
        one, other = first.get(name), second.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(f"{prefix}{name}.", one, other)
        elif one != other:
            yield Difference(f"{prefix}{name}", one, other)


def built_in_name(model: ModelSpec) -> str | None:
    """Return the name of the built-in model that *model* is; None where it is none."""
    for name in list_models():
        known = load_model(name)
        if isinstance(known, ModelSpec) and not differences(model, known):
            return name
    return None
