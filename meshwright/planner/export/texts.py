"""Texts of the formats that frameworks read, from keys and back."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from meshwright.hwprofiles import FileKind, quoted, shown, single_line
from meshwright.planner.export.facts import Keys
from meshwright.simulator import PlanError

FRAMEWORK_FILE = FileKind(
    title="configuration of a framework", most_bytes=1_000_000, error=PlanError
)
PLACE = "content"  # of the file that who reads it names

# A list of digits, and how often it is repeated, as "[0,1]*12".
LISTS = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")


def nested(keys: Keys) -> dict[str, object]:
    """Return *keys* with a table for each section.

    >>> nested({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    found: dict[str, object] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        table = found
        for section in sections:
            table = cast("dict[str, object]", table.setdefault(section, {}))
        table[name] = value
    return found


def flat(document: Mapping[str, object], prefix: str = "") -> Keys:
    """Return the keys of a document of tables; the opposite of `nested`."""
    found: Keys = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def remarks(lines: Iterable[str]) -> str:
    """Return *lines* as comments of TOML, YAML and shells, each on one line whatever it holds."""
    return "".join(f"# {single_line(line)}\n" for line in lines)


def toml_text(keys: Keys) -> str:
    """Return *keys* as TOML, a table for each section.

    >>> print(toml_text({"a.b": 1, "a.c": ["x"]}), end="")
    [a]
    b = 1
    c = ["x"]
    """
    tables: dict[str, list[str]] = {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        tables.setdefault(section, []).append(f"{name} = {_toml_value(value)}")
    return "\n".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in tables.items())


def _toml_value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def read_toml(text: str) -> Keys:
    """Return the keys of a TOML text."""
    return flat(FRAMEWORK_FILE.parse_toml(text.encode(), PLACE))


def read_json(text: str) -> Keys:
    """Return the keys of a JSON text."""
    document = FRAMEWORK_FILE.parse_json(text, PLACE)
    if not isinstance(document, dict):
        raise PlanError(f"must hold a JSON object, not {shown(document)}")
    return flat(document)


def json_keys(keys: Keys) -> str:
    """Return *keys* as JSON, a table for each section.

    >>> print(json_keys({"a.b": 1}), end="")
    {
      "a": {
        "b": 1
      }
    }
    """
    return json.dumps(nested(keys), indent=2) + "\n"


def yaml_text(keys: Keys) -> str:
    """Return *keys* as YAML, a block for each section.

    >>> print(yaml_text({"a": "no", "b.c": True}), end="")
    a: 'no'
    b:
      c: true
    """

    def lines(document: Mapping[str, object], indent: str) -> Iterator[str]:
        for key, value in document.items():
            if isinstance(value, Mapping):
                yield f"{indent}{key}:"
                yield from lines(value, indent + "  ")
            else:
                yield f"{indent}{key}: {_yaml_word(value)}"

    return "".join(f"{line}\n" for line in lines(nested(keys), ""))


# What YAML 1.1, which PyYAML reads, would not take for a text.
_YAML_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_YAML_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("null", "~", ""), None),
}


def _yaml_word(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    is_plain = _YAML_PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS
    if is_plain:
        return value
    return "'" + value.replace("'", "''") + "'" if value.isprintable() else quoted(value)


_YAML_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][A-Za-z0-9_.-]*):(?: +(?P<value>.*))?")


def read_yaml(text: str) -> Keys:
    """Return the keys of YAML as a configuration has it: words, numbers and blocks of them.

    Raises:
        PlanError: If a line is of another kind, as a list, an anchor or a block of text.
    """
    found: Keys = {}
    blocks: list[tuple[int, str]] = []  # indent and prefix of the blocks around a line
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        if not line or line == "---":
            continue
        match = _YAML_LINE.fullmatch(line)
        if match is None:
            raise PlanError(f"line {number}: {shown(line.strip())} is not KEY: VALUE")
        indent = len(match["indent"])
        while blocks and indent <= blocks[-1][0]:
            blocks.pop()
        key = (blocks[-1][1] if blocks else "") + match["key"]
        if key in found:
            raise PlanError(f"line {number}: key {shown(key)} appears twice")
        if match["value"] is None:
            blocks.append((indent, f"{key}."))
        elif match["value"] != "{}":
            found[key] = _yaml_value(match["value"], number)
    return found


def _yaml_value(text: str, number: int) -> object:
    if text[0] in "'\"":
        if len(text) < 2 or text[-1] != text[0]:
            raise PlanError(f"line {number}: {shown(text)} has no closing quote")
        return text[1:-1].replace("''", "'") if text[0] == "'" else json.loads(text)
    if text[0] in "[{&*!|>%@`":
        raise PlanError(f"line {number}: {shown(text)} is not a word or a number")
    if text.lower() in _YAML_WORDS:
        return _YAML_WORDS[text.lower()]
    return _number(text)


def flags(keys: Keys) -> list[str]:
    """Return *keys* as options of a command; True is a flag alone, a list several words.

    >>> flags({"bf16": True, "lr": 0.1, "modules": ["a", "b"]})
    ['--bf16', '--lr 0.1', '--modules a b']
    """
    return [
        f"--{key}" if value is True else f"--{key} {_shell_words(value)}"
        for key, value in keys.items()
    ]


def _shell_words(value: object) -> str:
    words = value if isinstance(value, list) else [value]
    return " ".join(shlex.quote(str(each)) for each in words)


def single_quoted(word: str) -> str:
    """Return *word* in single quotes, which a shell reads as it stands.

    >>> print(single_quoted("a=$b"), single_quoted("it's"))
    'a=$b' 'it'"'"'s'
    """
    return "'" + word.replace("'", "'\"'\"'") + "'"


def tyro_options(keys: Keys) -> list[str]:
    """Return *keys* as options of a command that tyro parses.

    >>> tyro_options({"a.b_c": False, "a.d_e": [["x", "y"], ["z"]]})
    ['--a.no-b-c', '--a.d_e x,y z']
    """
    found = []
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        if isinstance(value, bool):
            found.append(f"--{section}.{'' if value else 'no-'}{name.replace('_', '-')}")
        elif isinstance(value, list):
            parts = [each if isinstance(each, str) else ",".join(each) for each in value]
            found.append(f"--{key} {_shell_words(parts)}")
        else:
            found.append(f"--{key} {_shell_words(value)}")
    return found


def _number(text: str) -> object:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def layout_text(
    stages: tuple[int, ...], num_predictions: int = 0, prediction_stage: int | None = None
) -> str:
    """Return stages as Megatron-Core's PipelineParallelLayerLayout has them.

    >>> layout_text((3, 4, 0)), layout_text((3, 2), 1), layout_text((3, 2, 0, 0), 1, 2)
    ('Et*3|t*4|L', 'Et*3|t*2mL', 'Et*3|t*2|m|L')
    """
    parts = [f"t*{count}" if count else "" for count in stages]
    parts[-1 if prediction_stage is None else prediction_stage] += "m" * num_predictions
    return f"E{'|'.join(parts)}L"


def layer_numbers(value: object, num_layers: int) -> list[int]:
    """Return the number of each layer that a frequency, or a sum of lists, stands for.

    So Megatron-LM spells which layers have experts (``moe_freq_type`` of its arguments.py): one in
    so many, from the first on, or ``([0]*3+[1]*58)``. Empty where it is neither,
    or of another number of layers.

    >>> layer_numbers("([0]*1+[1]*3)", 4), layer_numbers(2, 4), layer_numbers("some", 4)
    ([0, 1, 1, 1], [1, 0, 1, 0], [])
    """
    if isinstance(value, int) and value > 0:
        return [int(layer % value == 0) for layer in range(num_layers)]
    text = str(value).replace(" ", "").removeprefix("(").removesuffix(")")
    parts = [LISTS.fullmatch(each) for each in text.split("+")]
    counted = [(each[1], int(each[2] or 1)) for each in parts if each is not None]
    if len(counted) < len(parts) or sum(times for _, times in counted) > num_layers:
        return []
    numbers = [int(each) for listed, times in counted for each in times * listed.split(",")]
    return numbers if len(numbers) == num_layers else []
