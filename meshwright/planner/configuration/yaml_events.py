"""YAML, read event by event and written by PyYAML; imported late, for it takes its time.

PyYAML, with which most programs read, is of YAML 1.1; scalars here are those of the core schema of
YAML 1.2 (https://yaml.org/spec/1.2.2, 10.3.2): ``1e-5`` is a number, ``no`` and ``1:30`` are texts.
"""

import re
from collections.abc import Iterator, Mapping

import yaml

from meshwright.hwprofiles import shown
from meshwright.planner.configuration.documents import (
    MOST_DEPTH,
    MOST_LENGTH,
    MOST_VALUES,
    Entry,
    Table,
    refused,
    too_deep,
    too_long,
    too_many,
)

# libyaml's where it was built in: PyYAML's own takes many seconds for a megabyte.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTANTS: Mapping[str, object] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_WHOLE = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BASES = {"0o": 8, "0x": 16}
# Each is held against all before it, which takes minutes for a megabyte of them.
_TAG_DIRECTIVE = re.compile("(?:^|[\n\r\x85\u2028\u2029])\ufeff?%TAG")
_MERGE = "<<"


def read_table(text: str) -> Table:
    """Return the table that the only document of a text is.

    Raises:
        PlanError: If it is none; names the line.
    """
    directive = _TAG_DIRECTIVE.search(text)
    if directive is not None:
        line = text.count("\n", 0, directive.end()) + 1
        raise refused(line, "%TAG is not allowed; allowed: values without tags")
    try:
        return _Reader(text).read()
    except yaml.MarkedYAMLError as error:
        index = 0 if error.problem_mark is None else error.problem_mark.index
        line = text.count("\n", 0, index) + 1
        raise refused(line, f"not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeEncodeError) as error:  # a control, or half a character
        index = getattr(error, "position", getattr(error, "start", 0))
        line = text.encode(errors="replace").count(b"\n", 0, index) + 1
        raise refused(line, f"not valid YAML: {getattr(error, 'reason', error)}") from None


class _Reader:
    """The events of a text, read one after the other."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
        self.line, self.index = 1, 0  # of the last event
        self.num_values = 0
        # Values, with how many there are in each; None while the value is read.
        self.anchors: dict[str, tuple[object, int] | None] = {}

    def read(self) -> Table:
        """Return the table of the only document."""
        documents: list[object] = []
        for event in self._rest():
            if isinstance(event, yaml.DocumentStartEvent):
                documents.append(self._value(self._next(), 0))
                line = self.line
                if len(documents) > 1 and documents[-1] is not None:
                    raise refused(line, "a second document; allowed: one, and nothing after it")
        document = documents[0] if documents else None
        if document is None:
            return Table([])
        if not isinstance(document, Table):
            raise refused(1, f"must hold KEY: VALUE, not {shown(document)}")
        return document

    def _rest(self) -> Iterator[yaml.Event]:
        while not isinstance(event := self._next(), yaml.StreamEndEvent):
            yield event

    def _next(self) -> yaml.Event:
        event = next(self.events)
        index = self.index if event.start_mark is None else event.start_mark.index
        self.line += self.text.count("\n", self.index, index)
        self.index = max(index, self.index)
        return event

    def _value(self, event: yaml.Event, depth: int) -> object:
        self._count(1)
        if depth > MOST_DEPTH:
            raise too_deep(self.line)
        if isinstance(event, yaml.AliasEvent):
            return self._anchored(event.anchor or "")
        before, anchor = self.num_values, None
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            anchor = event.anchor
            if event.tag is not None:
                raise refused(self.line, f"tag {shown(event.tag)} is not allowed; leave it out")
        if anchor is not None:
            self.anchors[anchor] = None
        value = self._content(event, depth)
        if anchor is not None:
            self.anchors[anchor] = value, 1 + self.num_values - before
        return value

    def _content(self, event: yaml.Event, depth: int) -> object:
        if isinstance(event, yaml.MappingStartEvent):
            return Table(self._entries(depth))
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[object] = []
            while not isinstance(item := self._next(), yaml.SequenceEndEvent):
                items.append(self._value(item, depth + 1))
            return items
        assert isinstance(event, yaml.ScalarEvent)
        # A quoted scalar is a text, whatever it looks like.
        return self._scalar(event.value) if event.implicit[0] else event.value

    def _entries(self, depth: int) -> list[Entry]:
        entries: list[Entry] = []
        merged: list[Entry] | None = None
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            line = self.line
            name = self._value(event, depth + 1)
            if not isinstance(name, str):
                raise refused(line, f"key {_word(name)} is not a text; allowed: texts, as '1'")
            value = self._value(self._next(), depth + 1)
            if name != _MERGE or not _is_plain(event):
                entries.append(Entry(name, line, value))
            elif merged is None:
                merged = self._merged(value, line)
            else:
                raise refused(line, f"key {_MERGE} appears twice")
        # A name of the table itself overrides a merged one, wherever `<<` stands.
        own_names = {each.name for each in entries}
        return [*(each for each in merged or () if each.name not in own_names), *entries]

    def _merged(self, value: object, line: int) -> list[Entry]:
        """Return the entries of a table, or of several: the first to have a name has it."""
        by_name: dict[str, Entry] = {}
        for table in value if isinstance(value, list) else [value]:
            if not isinstance(table, Table):
                raise refused(line, f"{_MERGE} of {_word(table)}; allowed: tables")
            for entry in table.entries:
                by_name.setdefault(entry.name, entry)
        return list(by_name.values())

    def _anchored(self, name: str) -> object:
        if name not in self.anchors:
            raise refused(self.line, f"*{name} stands for nothing: no &{name} before it")
        anchored = self.anchors[name]
        if anchored is None:
            raise refused(self.line, f"*{name} stands inside of &{name}")
        # All values behind an alias count: aliases of aliases grow exponentially.
        self._count(anchored[1])
        return anchored[0]

    def _scalar(self, text: str) -> object:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _WHOLE.fullmatch(text):
            return self._whole(text)
        if _NOT_FINITE.fullmatch(text):
            return float(text.replace(".", ""))  # which no document may have
        return float(text) if _FLOAT.fullmatch(text) else text

    def _whole(self, text: str) -> int:
        if len(text) > MOST_LENGTH:
            raise too_long(self.line, text)
        base = _BASES.get(text[:2])
        return int(text) if base is None else int(text[2:], base)

    def _count(self, number: int) -> None:
        self.num_values += number
        if self.num_values > MOST_VALUES:
            raise too_many(self.line)


def _is_plain(event: yaml.Event) -> bool:
    return isinstance(event, yaml.ScalarEvent) and event.implicit[0]


def _word(value: object) -> str:
    """Return a value as an error shows it; tables and lists by their kind alone."""
    kinds = {Table: "a table", list: "a list"}
    return kinds.get(type(value)) or shown(value)


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_YAML_1_1_BOOLEANS = "yes", "no", "on", "off", "y", "n"  # booleans of YAML 1.1
_QUOTED = {*_YAML_1_1_BOOLEANS, *(each.lower() for each in _CONSTANTS)}


class _Dumper(yaml.SafeDumper):
    """Texts in quotes, but for words that no reader takes for anything else."""


def _text_node(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _QUOTED
    style = None if is_plain else "'" if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


def _list_node(dumper: yaml.SafeDumper, value: list[object]) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(str, _text_node)
_Dumper.add_representer(list, _list_node)


def dumped(document: Mapping[str, object]) -> str:
    """Return a document as YAML."""
    text: str = yaml.dump(
        document,
        Dumper=_Dumper,
        default_flow_style=False,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
    )
    return text
