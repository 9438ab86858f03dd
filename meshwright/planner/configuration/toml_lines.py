"""Documents in TOML: tomllib reads the values, and a scan finds the lines of their keys."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from meshwright.planner.configuration.documents import (
    FRAMEWORK_FILE,
    PLACE,
    Document,
    Entry,
    Table,
    check_bounds,
    document_of,
    placed,
)
from meshwright.simulator import PlanError

_TOKEN = re.compile(
    r'(?P<text>"""(?:[^"\\]++|\\.|"{1,2}(?!"))*+(?:"{3,5}|\Z)|'
    r"""'{3}(?:[^']++|'{1,2}(?!'))*+(?:'{3,5}|\Z))"""
    r'|(?P<quoted>"(?:[^"\\\n]++|\\.)*+"?|'
    r"'[^'\n]*+'?)"
    r"|(?P<word>[^\s\[\]{}=,.\"'#]++)"
    r"|(?P<mark>\[\[|[\[\]{}=,]|\n(?:\s++|\#[^\n]*+)*+)"
    r"|\#[^\n]*+",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
_ESCAPED = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}


def read_toml(text: str) -> Document:
    r"""Return the keys of a TOML text; raises as `document_of`, or if it is none.

    >>> read_toml("[a]\nb.c = [\n1]\nd = 2").lines
    {'a': 1, 'a.b': 2, 'a.b.c': 2, 'a.d': 4}
    """
    check_bounds(text, _TOKEN)
    try:
        document = FRAMEWORK_FILE.load_toml(text, PLACE)
    except PlanError as error:
        raise placed(error, text) from None
    return document_of(_table(document, _Scan.of(text).root))


@dataclass(slots=True)
class _Name:
    """A name of a table: its line, and the names in its own table."""

    line: int
    inner: dict[str, Self] = field(default_factory=dict)
    is_list: bool = False

    def at(self, words: Iterable[str], line: int) -> "_Name":
        """Return the name that a dotted key leads to, begun on *line* where it is new."""
        name: _Name = self
        for word in words:
            name = name.inner.setdefault(word, _Name(line))
            if name.is_list:
                name = _Name(line)  # the last table of a list has no lines of its own
        return name


class _Scan:
    """The names of a valid text, read token by token."""

    def __init__(self) -> None:
        self.root = _Name(1)
        self.section = self.root  # that the last header began
        self.value = self.root  # the name whose value is read
        self.brackets: list[tuple[str, _Name]] = []  # those around a value; of {, its table
        self.words: list[str] = []  # of a key, before its sign
        self.in_value = False
        self.header = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the scan of a text."""
        scan, line = cls(), 1
        for token in _TOKEN.finditer(text):
            if scan.in_value:
                scan.take_value(token[0] if token["mark"] else "")
            elif token["word"] or token["quoted"]:
                scan.words.append(_named(token[0]))
            elif token["mark"]:
                scan.take_key(token[0], line)
            line += token[0].count("\n")
        return scan

    def take_key(self, mark: str, line: int) -> None:
        """Read a mark where a key, or a header, may stand."""
        if mark == "=":
            table = self.brackets[-1][1] if self.brackets else self.section
            self.value, self.in_value = table.at(self.words, line), True
            self.words = []
        elif mark in ("[", "[["):
            self.header = mark
        elif mark == "]" and self.header:
            self.section = self.root.at(self.words, line)
            if self.header == "[[":
                self.section.is_list = True
                self.section = _Name(line)
            self.words, self.header = [], ""
        elif mark == "}":
            self.brackets.pop()
            self.in_value = True

    def take_value(self, mark: str) -> None:
        """Read a mark within a value."""
        if mark in ("[", "[["):
            self.brackets += [("[", _Name(1))] * len(mark)
        elif mark == "{":
            # A table within a list has no lines of its own.
            is_inner = bool(self.brackets) and self.brackets[-1][0] == "["
            self.brackets.append((mark, _Name(1) if is_inner else self.value))
            self.in_value = False
        elif mark in ("]", "}"):
            self.brackets.pop()
        elif mark == ",":
            self.in_value = self.brackets[-1][0] == "["
        elif mark.startswith("\n") and not self.brackets:
            self.in_value = False


def _named(word: str) -> str:
    """Return a name as a key spells it."""
    if word[0] == "'":
        return word[1:-1]
    return _ESCAPE.sub(_character, word[1:-1]) if word[0] == '"' else word


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    return chr(int(code, 16)) if code else _ESCAPED.get(escape[3], escape[3])


def _table(document: Mapping[str, object], name: _Name) -> Table:
    entries = []
    for word, value in document.items():
        inner = name.inner.get(word, _Name(name.line))
        entries.append(Entry(word, inner.line, _with_lines(value, inner)))
    return Table(entries)


def _with_lines(value: object, name: _Name) -> object:
    if isinstance(value, Mapping):
        return _table(value, name)
    if isinstance(value, list):
        return [_with_lines(each, _Name(name.line)) for each in value]
    return value
