"""Options of a program, or keys of a configuration: what each takes, and whether a layout reads it.

A CSV file holds those of one version. What is in none of its rows is unknown, and so refused.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import FileKind, ProfileError, shown, suggestion

FOLDER = Path(__file__).resolve().parents[1] / "data" / "options"
OPTION_FILE = FileKind(title="file of options", most_bytes=1_000_000)
COLUMNS = ("key", "takes", "effect", "allowed", "why")


class Takes(StrEnum):
    """The kind of value that an option takes."""

    NOTHING = "nothing"  # a switch: it stands alone
    OPTIONAL = "optional"  # a word, or nothing
    WORD = "word"
    WORDS = "words"  # one or more, up to the next option; in a file a list
    WHOLE = "whole"
    NUMBER = "number"
    BOOLEAN = "boolean"
    TABLE = "table"  # in a file: a section whose keys are the user's own


class Effect(StrEnum):
    """What an option does to the time and the memory of a step."""

    READ = "read"  # it says something of a plan, a job, a model or a stack
    NONE = "none"
    HELD = "held"  # it changes them in a way that no plan says: some values alone are allowed
    RENAMED = "renamed"  # an old name of another option


class Option(NamedTuple):
    """An option of a program, or a key of a configuration.

    Args:
        key: Its name, without dashes before it; sections are joined with dots.
        takes: The kind of its value.
        effect: On the time and the memory of a step.
        allowed: Values that a held one may have, none where it may not stand there at all; of an
            old name the new one.
        why: What it does, or since when it is called otherwise.
    """

    key: str
    takes: Takes
    effect: Effect
    allowed: tuple[str, ...] = ()
    why: str = ""


def list_options() -> tuple[str, ...]:
    """Return the names of the files of options, sorted."""
    return tuple(sorted(each.stem for each in FOLDER.glob("*.csv")))


@cache
def load_options(name: str) -> Mapping[str, Option]:
    """Return the options of a program, by key.

    Args:
        name: Of the program, with its version: ``torchrun-2.13``.

    Raises:
        ProfileError: If there is none, or its file has a mistake.
    """
    if name not in list_options():
        raise ProfileError(
            f"options of {shown(name)} are unknown; {suggestion(name, list_options())}"
        )
    file = f"options/{name}.csv"
    columns, lines = OPTION_FILE.parse_table((FOLDER / f"{name}.csv").read_text("utf-8"), file)
    if tuple(columns) != COLUMNS:
        raise ProfileError(f"{file}: columns {', '.join(columns)}; allowed: {', '.join(COLUMNS)}")
    found: dict[str, Option] = {}
    for number, cells in lines:
        try:
            option = Option(
                cells["key"],
                Takes(cells["takes"]),
                Effect(cells["effect"]),
                tuple(cells["allowed"].split("|")) if cells["allowed"] else (),
                cells["why"],
            )
        except ValueError as error:
            raise ProfileError(f"{file}: line {number}: {error}") from None
        if option.key in found:
            raise ProfileError(f"{file}: line {number}: {option.key} appears twice")
        found[option.key] = option
    return found
