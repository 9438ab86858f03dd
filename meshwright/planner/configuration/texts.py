"""Documents as texts of JSON, YAML and TOML, read and written."""
# ruff: noqa: PLC0415 (imports of libraries that few commands need)

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

from meshwright.hwprofiles import shown, toml_table
from meshwright.planner.configuration.documents import (
    FRAMEWORK_FILE,
    PLACE,
    Document,
    Entry,
    Table,
    check_bounds,
    check_size,
    document_of,
    placed,
    refused,
)
from meshwright.simulator import PlanError

_NAME = re.compile(r'"(?:[^"\\]++|\\.)*+"(\s*+:)?')  # or another text, without a colon
_TOKEN = re.compile(
    r'(?P<quoted>"(?:[^"\\]++|\\.)*+"?)|(?P<word>[^\s\[\]{},:"]++)|(?P<mark>[\[\]{},:])', re.DOTALL
)
# Comments of a line or of several, one after the other, which Hjson has and DeepSpeed's files.
_COMMENTS = re.compile(
    r'("(?:[^"\\]++|\\.)*+"?)|'
    r"(?:(?:(?://|\#)[^\n]*+|/\*(?:[^*]++|\*(?!/))*+(?:\*/|\Z))\s*+)++",
    re.DOTALL,
)


class Pairs(NamedTuple):
    """Object of JSON as pairs, before its lines are known."""

    items: list[tuple[str, object]]


def read_json(text: str) -> Document:
    r"""Return the keys of a JSON text, which may have comments; raises as `document_of`.

    >>> read_json('{"a": {\n "b": 1}}').lines
    {'a': 1, 'a.b': 2}
    """
    check_size(text)
    if "#" in text or "/" in text:
        # Lines are kept, so that mistakes are found where they stand.
        text = _COMMENTS.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
    check_bounds(text, _TOKEN)
    try:
        document = FRAMEWORK_FILE.parse_json(text, PLACE, Pairs)
        table = _with_lines(document, _lines_of_names(text))
    except PlanError as error:
        raise placed(error, text) from None
    if not isinstance(table, Table):
        raise refused(1, f"must hold a JSON object, not {shown(table)}")
    return document_of(table)


def _lines_of_names(text: str) -> Iterator[int]:
    """Yield the line of each name of valid JSON, as they stand there."""
    line, end = 1, 0
    for found in _NAME.finditer(text):
        if found[1]:
            line += text.count("\n", end, found.start())
            end = found.start()
            yield line


def _with_lines(value: object, lines: Iterator[int]) -> object:
    """Return a value of JSON with the line of each name."""
    if isinstance(value, Pairs):
        return Table(
            [Entry(name, next(lines), _with_lines(each, lines)) for name, each in value.items]
        )
    if isinstance(value, list):
        return [_with_lines(each, lines) for each in value]
    return value


def read_yaml(text: str) -> Document:
    r"""Return the keys of a YAML text; raises as `document_of`, or if it is none.

    Its scalars are those of YAML 1.2. Tags, keys that are no texts and several documents are
    refused; aliases and merged tables are read, up to as many values as a text may have.

    >>> read_yaml("a:\n  b: 1e-5\n  c: no").keys
    {'a.b': 1e-05, 'a.c': 'no'}
    """
    from meshwright.planner.configuration.yaml_events import read_table

    check_size(text)
    return document_of(read_table(text))


def nested(keys: Mapping[str, object]) -> dict[str, object]:
    """Return *keys* with a table for each section.

    >>> nested({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    root: dict[str, object] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        table = root
        for section in sections:
            table = cast("dict[str, object]", table.setdefault(section, {}))
        table[name] = value
    return root


def json_keys(keys: Mapping[str, object]) -> str:
    """Return *keys* as JSON, a table for each section.

    >>> print(json_keys({"a.b": 1}), end="")
    {
      "a": {
        "b": 1
      }
    }
    """
    return json.dumps(nested(keys), indent=2) + "\n"


def yaml_text(keys: Mapping[str, object]) -> str:
    """Return *keys* as YAML, a block for each section.

    >>> print(yaml_text({"a": "no", "b.c": True}), end="")
    a: 'no'
    b:
      c: true
    """
    from meshwright.planner.configuration.yaml_events import dumped

    return dumped(nested(keys))


def toml_text(keys: Mapping[str, object]) -> str:
    """Return *keys* as TOML, a table for each section.

    >>> print(toml_text({"a.b": 1, "a.c": ["x"]}), end="")
    [a]
    b = 1
    c = ["x"]
    """
    return toml_table(nested(keys)).as_string()
