"""Options of programs, and keys of configurations: their values, and whether a layout reads them.

A CSV file holds those of one version. What is in none of its rows is unknown, and so refused.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from meshwright.hwprofiles import FileKind, ProfileError, shown, suggestion

FOLDER = Path(__file__).resolve().parents[1] / "data" / "options"
OPTION_FILE = FileKind(title="file of options", most_bytes=1_000_000)
OPTION_NAME = re.compile(r"--?[A-Za-z]")  # a negative number is a value
COLUMNS = ("key", "takes", "effect", "allowed", "why")
# The files of options of programs that start ranks.
LAUNCHERS: Mapping[str, str] = {
    "torchrun": "torchrun-2.13",
    "deepspeed": "deepspeed-launcher-0.19",
    "accelerate": "accelerate-launch-1.15",
    "srun": "srun-25",
    "sbatch": "srun-25",
}


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
    """Effect of an option on the time and the memory of a step."""

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
    options: dict[str, Option] = {}
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
        if option.key in options:
            raise ProfileError(f"{file}: line {number}: {option.key} appears twice")
        options[option.key] = option
    return options


class Unknown(NamedTuple):
    """Value of an option that the file alone does not tell; ``why`` says what is missing."""

    why: str


class OptionWord(Protocol):
    """A word of a command, the line that it stands on, and why it is unknown if it is."""

    @property
    def text(self) -> str:
        """The word."""

    @property
    def line(self) -> int:
        """Of the file, from 1."""

    @property
    def unknown(self) -> str:
        """Reason why the word is not known; empty where it is."""

    @property
    def is_open(self) -> bool:
        """True where it may stand for any number of words, options among them."""


class Options(NamedTuple):
    """Options of a command: values and lines by key, other words, and refusals."""

    keys: dict[str, object]
    lines: dict[str, int]
    words: list[OptionWord]
    refusals: list[str]


def read_options(words: Sequence[OptionWord], known: Mapping[str, Option]) -> Options:
    """Return the options among *words*; of one that stands twice the last counts.

    A name may have dashes or underscores, whichever is *known*. An unknown option is a key too.
    """
    parsed = Options({}, {}, [], [])
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_option(word):
            parsed.words.append(word)
            continue
        name, sign, text = word.text.lstrip("-").partition("=")
        option = known_option(name, known)
        if sign:
            # `--a=b` has its value, whatever stands behind it.
            values: list[OptionWord | str] = [text]
        else:
            end = _end_of_values(words, index, option)
            # An unknown word that is not the value of an option may hold options.
            hiding = [each for each in words[index:end] if each.unknown and each.is_open]
            hiding += [each for each in words[index + 1 : end] if each.unknown]
            parsed.refusals.extend(f"line {each.line}: {each.unknown}" for each in hiding)
            values, index = [*words[index:end]], end
        key = name if option is None else option.key
        # Popped first, so that keys stand in the order in which they take effect.
        parsed.keys.pop(key, None)
        parsed.keys[key], parsed.lines[key] = _value_of(option, word, values, parsed), word.line
    return parsed


def known_option(name: str, known: Mapping[str, Option]) -> Option | None:
    """Return the option of a name, by its new one if it is an old one; None where it is unknown."""
    spellings = (name, name.replace("_", "-"), name.replace("-", "_"))
    option = next((known[each] for each in spellings if each in known), None)
    if option is not None and option.effect is Effect.RENAMED:
        return known.get(option.allowed[0], option)
    return option


def _is_option(word: OptionWord) -> bool:
    return bool(OPTION_NAME.match(word.text))


def _end_of_values(words: Sequence[OptionWord], start: int, option: Option | None) -> int:
    """Return the index behind the values of an option that stands before *start*."""
    # An option that is not known may take any number of words.
    takes = Takes.WORDS if option is None else option.takes
    most = {Takes.NOTHING: 0, Takes.WORDS: len(words)}.get(takes, 1)
    end = start
    while end < min(start + most, len(words)) and not _is_option(words[end]):
        end += 1
    return end


def _value_of(
    option: Option | None, word: OptionWord, values: Sequence[OptionWord | str], parsed: Options
) -> object:
    unknown = [each.unknown for each in (word, *values) if not isinstance(each, str)]
    why = next(filter(None, unknown), "")
    if why:
        return Unknown(why)
    texts = [each if isinstance(each, str) else each.text for each in values]
    if not texts:
        lacks_value = option is not None and option.takes not in {Takes.NOTHING, Takes.OPTIONAL}
        if lacks_value:
            parsed.refusals.append(f"line {word.line}: {word.text} has no value")
        return True
    if option is None or len(texts) > 1:
        return texts[0] if len(texts) == 1 else texts
    if option.takes is Takes.NOTHING:
        parsed.refusals.append(f"line {word.line}: {word.text} takes no value")
    return texts if option.takes is Takes.WORDS else converted(option, texts[0])


def converted(option: Option, value: object) -> object:
    """Return the value of an option as the kind that it takes, as it is where it is of another.

    >>> converted(Option("a", Takes.WHOLE, Effect.READ), "5e8")
    500000000
    """
    if option.takes in {Takes.WHOLE, Takes.NUMBER} and isinstance(value, str | float):
        with suppress(ValueError, OverflowError):
            number = float(value)
            if option.takes is Takes.NUMBER:
                return number
            # Up to 2**53, some 9e15, a float holds whole numbers exactly.
            return int(number) if number.is_integer() and abs(number) < 10**15 else value
    if option.takes is Takes.BOOLEAN and isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if option.takes in {Takes.BOOLEAN, Takes.OPTIONAL} and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    return value
