"""Error messages of profile files: one line each, with the nearest valid names.

Also texts of one file as data of another: on one line, or as one quoted string.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

MAX_SHOWN_LENGTH = 60
_MAP_KEY: Final = "[key]"  # how pydantic marks a mistake in a key of a table
_SUBJECT: Final = re.compile(r"^[A-Z][a-z]+ should ")
# Terminals and viewers execute these, and no text needs them: controls but for tab and line feed,
# other line separators, bidirectional overrides (U+202E reorders what is shown), lone surrogates.
_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
TEXT_RULE: Final = "hold no control characters but tabs and line feeds"
LINE_RULE: Final = "be printable, on one line"
_TOML_WORDS: Final = {  # pydantic's messages name Python types; users write TOML
    "a valid dictionary": "a table",
    "a valid tuple": "a list",
    "a valid string": "a text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


class ProfileError(ValueError):
    """A mistake in a profile file, or a name that no profile has.

    The message is one line: where, which value, and what is allowed.

    >>> str(ProfileError("unknown device 'a100'"))
    "unknown device 'a100'"
    """


def one_line(error: "ValidationError") -> str:
    """Return the first mistake of *error* as ``KEY: what is wrong; what is allowed``.

    >>> from pydantic import ValidationError
    >>> from meshwright.hwprofiles.schema import MemoryKernels
    >>> try:
    ...     MemoryKernels.model_validate({"bandwidth_fraction": 1.5, "kind": "fitted"})
    ... except ValidationError as error:
    ...     print(one_line(error))
    bandwidth_fraction: 1.5 is not allowed; it must be less than or equal to 1
    """
    details = error.errors(include_url=False)[0]
    parts = [_key_part(part) for part in details["loc"] if part != _MAP_KEY]
    context = details.get("ctx", {})
    if details["type"] == "unknown_key":
        parts.append(_key_part(context["key"]))
        text = f"unknown key; {context['hint']}"
    elif details["type"] == "missing":
        text = "missing key; it is required"
    elif isinstance(context.get("error"), ProfileError):
        text = str(context["error"])
    else:
        text = _mistake(details, context)
    key = ".".join(parts)
    return f"{key}: {text}" if key else text


def _mistake(details: "ErrorDetails", context: Mapping[str, object]) -> str:
    wanted = _SUBJECT.sub("", " ".join(details["msg"].split()))
    for python_word, toml_word in _TOML_WORDS.items():
        wanted = wanted.replace(python_word, toml_word)
    value = details["input"]
    text = f"{shown(value)} is not allowed; it must {wanted}"
    expected = context.get("expected")
    if details["type"] != "enum" or not isinstance(value, str) or not isinstance(expected, str):
        return text
    # pydantic gives the members of an enumeration as one text: 'a', 'b' or 'c'.
    choices = re.findall(r"'([^']*)'", expected)
    return f"{text}; {suggestion(value, choices)}"


def _key_part(part: int | str) -> str:
    word = str(part)
    return word if re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", word) else shown(word)


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of *known* that look most like *name*, best first.

    The comparison ignores case. A name that resembles nothing gives an empty list.

    Args:
        name: As the user wrote it.
        known: Valid names.

    >>> nearest_names("A100", ["a100-sxm4-80gb", "a100-sxm4-40gb", "h100"])
    ['h100', 'a100-sxm4-80gb', 'a100-sxm4-40gb']
    """
    # difflib is quadratic in the length, and a name from a file may be very long.
    originals = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower()[:MAX_SHOWN_LENGTH], originals, cutoff=0.3)
    return [originals[match] for match in matches]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest names, or all where none is near.

    >>> suggestion("kye", ["key", "value"])
    'nearest: key'
    >>> suggestion("qqq", ["b", "a"])
    'known: a, b'
    """
    candidates = sorted(known)
    nearest = nearest_names(name, candidates)
    if nearest:
        return f"nearest: {', '.join(nearest)}"
    return f"known: {', '.join(candidates) or 'none'}"


def counted(number: int, noun: str) -> str:
    """Return *number* with its *noun*, in the plural unless it is 1.

    >>> counted(1, "microbatch"), counted(1_024, "microbatch"), counted(0, "GPU")
    ('1 microbatch', '1,024 microbatches', '0 GPUs')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{ending}"


def shown(value: object) -> str:
    r"""Return *value* as one short line for an error message.

    >>> shown("two\nlines")
    "'two\\nlines'"
    """
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."


def shown_path(path: str | Path) -> str:
    r"""Return a path as it is shown in an error, quoted only where it would break the line.

    >>> shown_path("a b.toml"), shown_path("a\n.toml")
    ('a b.toml', "'a\\n.toml'")
    """
    text = str(path)
    return text if text.isprintable() else ascii(text)


def has_controls(text: str) -> bool:
    r"""Return True if *text* has control characters other than tabs and line feeds.

    >>> has_controls("two\nlines"), has_controls("red \x1b[31m")
    (False, True)
    """
    return _CONTROLS.search(text) is not None


def shown_text(text: str) -> str:
    r"""Return *text* of any length for a terminal, its control characters escaped.

    >>> print(shown_text("red \x1b[31m"))
    red \x1b[31m
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def single_line(text: str) -> str:
    r"""Return *text* for a comment: a space for each line break, control or invisible character.

    >>> single_line("two\nlines\x1b[0m")
    'two lines [0m'
    """
    return "".join(character if character.isprintable() else " " for character in text)


def quoted(text: str) -> str:
    r"""Return *text* as a string in double quotes: of TOML, of YAML and of Python alike.

    JSON's escapes are strings of all three; JSON leaves raw what TOML and terminals do not take,
    such as DEL and U+2028.

    >>> print(quoted('say "a\\b"\n\x7f'))
    "say \"a\\b\"\n\u007f"
    """
    basic = json.dumps(text, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in basic)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def check_distinct(key: str, values: tuple[object, ...]) -> None:
    """Raise ProfileError if a list has a value twice."""
    if len(set(values)) != len(values):
        raise ProfileError(f"{key}: {listed(values)} repeats a value; allowed: each value once")


def check_member(key: str, value: object, choices_key: str, choices: tuple[object, ...]) -> None:
    """Raise ProfileError if *value* is none of the choices of another key."""
    if value not in choices:
        raise ProfileError(f"{key}: {value} is not in {choices_key}; allowed: {listed(choices)}")


def listed(values: tuple[object, ...]) -> str:
    """Return values with commas between them."""
    return ", ".join(str(value) for value in values)
