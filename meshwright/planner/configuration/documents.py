"""Documents: the keys of a text of any format, each with its value and the line it stands on."""

import re
from collections.abc import Mapping
from datetime import date, datetime, time
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import FileKind, shown
from meshwright.simulator import PlanError

FRAMEWORK_FILE = FileKind(
    title="configuration of a framework", most_bytes=1_000_000, error=PlanError
)
PARENTS = 4  # folders above a file in which another that it names is looked for
PLACE = "content"  # of the file that who reads it names
MOST_DEPTH, MOST_VALUES, MOST_LENGTH, MOST_DIGITS = 50, 20_000, 300, 30
_MOST_TOKENS = 5 * MOST_VALUES
_OPENING, _CLOSING = ("[", "[[", "{"), ("]", "}")
# How json and tomllib say where a mistake is.
_POSITION = re.compile(r" \((?:at )?(?:line (\d+),? column \d+|end of document)\)$")


class Document(NamedTuple):
    """Keys of a text, and the line that each stands on.

    Args:
        keys: Its values; keys are joined with those of the sections around them by dots. A list
            stays a list, also of tables. A section without keys is an empty table.
        lines: The line of each key, and of each section, counted from 1. Of what stands for a
            YAML alias, that of its anchor.
        dotted: Keys of which a name has a dot of its own, which few programs take for a section.
    """

    keys: dict[str, object]
    lines: Mapping[str, int]
    dotted: frozenset[str] = frozenset()


class Entry(NamedTuple):
    """A name of a table, its line and its value: a `Table`, a list or a scalar."""

    name: str
    line: int
    value: object


class Table(NamedTuple):
    """A section as it stands in a text: a name may stand in it twice."""

    entries: list[Entry]


class Pairs(NamedTuple):
    """An object of JSON before its lines are known."""

    items: list[tuple[str, object]]


def refused(line: int, reason: str) -> PlanError:
    """Return the refusal of what stands on a line."""
    return PlanError(f"line {line}: {reason}")


def too_deep(line: int) -> PlanError:
    """Return the refusal of tables and lists in each other without end."""
    return refused(line, f"nested too deeply; allowed: {MOST_DEPTH} tables in each other")


def too_many(line: int) -> PlanError:
    """Return the refusal of more values than a configuration has."""
    return refused(line, f"too many values; allowed: {MOST_VALUES:,}")


def too_long(line: int, word: str) -> PlanError:
    """Return the refusal of an unquoted word, most likely a number, that is too long."""
    limit = f"at most {MOST_DIGITS} digits, {MOST_LENGTH} characters"
    return refused(line, f"{shown(word)} has too many digits; allowed: {limit}")


def named_file(name: str, folder: Path) -> Path | None:
    """Return the file that a text in *folder* names, or None.

    It has to lie under that folder, or under one of the `PARENTS` above it but for the root.
    """
    # A configuration must not lead to files outside of the folders that it lies in.
    if ".." in Path(name).parts:
        return None
    start = folder.resolve()
    for above in [start, *start.parents][: PARENTS + 1]:
        candidate = above / name
        if above != above.parent and candidate.is_relative_to(above) and _is_file(candidate):
            return candidate
    return None


def _is_file(path: Path) -> bool:
    """Return True if a file is there; a name may be none, or lead where nobody may look."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def document_of(table: Table) -> Document:
    """Return the keys of a text.

    Raises:
        PlanError: If a key stands twice, is a section and a value at once, or is no name; or if
            a number is not finite or too long. Names the line and the key.
    """
    reading = _KeyReader({}, {}, set())
    reading.add(table, "", 1)
    return Document(reading.keys, reading.lines, frozenset(reading.dotted))


class _KeyReader(NamedTuple):
    """Keys, lines and dotted names that are read so far."""

    keys: dict[str, object]
    lines: dict[str, int]
    dotted: set[str]

    def add(self, table: Table, prefix: str, depth: int) -> None:
        """Add the keys of a section, whose own is *prefix*, with a dot after it."""
        _check_names(table, prefix)
        for name, line, value in table.entries:
            key = f"{prefix}{name}"
            if len(key) > MOST_LENGTH or "" in name.split("."):
                limit = f"names of 1 to {MOST_LENGTH} characters"
                raise refused(line, f"key {shown(key)} is no name; allowed: {limit}")
            if depth > MOST_DEPTH:
                raise too_deep(line)
            if "." in name:
                self.dotted.add(key)
            # A dotted name opens the sections that it names, as in TOML.
            for dot in re.finditer(r"\.", name):
                self._begin(f"{prefix}{name[: dot.start()]}", line)
            # A section without keys is a value: an empty table.
            if isinstance(value, Table) and value.entries:
                self._begin(key, line)
                self.add(value, f"{key}.", depth + 1)
            elif key in self.lines:
                # Parsers keep the last of two in silence.
                raise _twice(key, line, self.lines[key])
            else:
                self.lines[key] = line
                self.keys[key] = _plain(value, key, line, depth)

    def _begin(self, section: str, line: int) -> None:
        if section in self.keys:
            raise _twice(section, line, self.lines[section])
        self.lines.setdefault(section, line)


def _check_names(table: Table, prefix: str) -> None:
    first: dict[str, int] = {}
    for name, line, _ in table.entries:
        if name in first:
            raise _twice(f"{prefix}{name}", line, first[name])
        first[name] = line


def _twice(key: str, line: int, first: int) -> PlanError:
    return refused(line, f"key {shown(key)} appears twice, first on line {first}")


def _plain(value: object, key: str, line: int, depth: int) -> object:
    """Return a value in Python's own types: tables are dicts, dates are texts."""
    if depth > MOST_DEPTH:
        raise too_deep(line)
    if isinstance(value, Table):
        _check_names(value, f"{key}.")
        return {
            name: _plain(each, f"{key}.{name}"[:MOST_LENGTH], at, depth + 1)
            for name, at, each in value.entries
        }
    if isinstance(value, list):
        return [_plain(each, key, line, depth + 1) for each in value]
    if isinstance(value, datetime | date | time):
        # JSON has no dates: those of YAML and TOML become texts, too.
        return value.isoformat()
    if isinstance(value, float) and not isfinite(value):
        raise refused(line, f"{key}: {value} is not allowed; it must be a finite number")
    if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        limit = f"at most {MOST_DIGITS} digits"
        raise refused(line, f"{key}: {shown(value)} is too long; allowed: {limit}")
    return value


def check_size(text: str) -> None:
    """Raise PlanError for a text longer than a file may be."""
    if len(text) > FRAMEWORK_FILE.most_bytes:
        limit = f"at most {FRAMEWORK_FILE.most_bytes:,} characters"
        raise PlanError(f"a text of {len(text):,} characters is too long; allowed: {limit}")


def check_bounds(text: str, tokens: re.Pattern[str]) -> None:
    """Raise PlanError for what a library would take seconds, or a hundred megabytes, to read.

    Args:
        text: That is not read yet.
        tokens: Of its format: groups ``mark``, ``word`` and others for texts in quotes. What has
            no end has to reach to that of the text, so that no place is gone over twice.
    """
    check_size(text)
    line, depth, num_words = 1, 0, 0
    for number, token in enumerate(tokens.finditer(text)):
        mark, word = token["mark"], token["word"]
        num_words = 0 if mark else num_words + 1
        depth += len(mark) if mark in _OPENING else -1 if mark in _CLOSING and depth else 0
        if max(depth, num_words) > MOST_DEPTH:
            raise too_deep(line)
        if number > _MOST_TOKENS:
            raise too_many(line)
        if word and len(word) > MOST_LENGTH:
            raise too_long(line, word)
        line += token[0].count("\n")


def placed(error: PlanError, text: str) -> PlanError:
    """Return an *error* of `FRAMEWORK_FILE` over a text, with its line in front."""
    reason = str(error).removeprefix(f"{PLACE}: ")
    found = _POSITION.search(reason)
    if found is None:
        return PlanError(reason)
    return refused(int(found[1] or text.count("\n") + 1), reason[: found.start()])
