"""Texts of configurations: what is read, from which line, and what is refused, soon."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.configuration import (
    Document,
    json_keys,
    read_json,
    read_toml,
    read_yaml,
    toml_text,
    yaml_text,
)
from meshwright.simulator import PlanError

READERS: Mapping[str, Callable[[str], Document]] = {
    "json": read_json,
    "toml": read_toml,
    "yaml": read_yaml,
}
SCALARS: tuple[tuple[str, object], ...] = (
    *(("1e-5", 1e-5), ("5e8", 5e8), ("-.5", -0.5), ("1.", 1.0), ("12e3", 12e3), ("+1.5", 1.5)),
    *(("0o17", 15), ("017", 17), ("0x1F", 31), ("+5", 5), ("-0", 0), ("0b11", "0b11")),
    *((word, word) for word in ("on", "off", "yes", "no", "y", "n", "NO", "tRue", "nULL", "=")),
    *(("1:30", "1:30"), ("1_000", "1_000"), ("2001-12-14", "2001-12-14"), ("1.2.3", "1.2.3")),
    *(("true", True), ("True", True), ("FALSE", False), ("~", None), ("", None), ("Null", None)),
    *(("'5'", "5"), ('"\\x41"', "A"), ("'it''s'", "it's"), ("${a.b:c}", "${a.b:c}")),
    *(("|\n  x\n  y\n", "x\ny\n"), (">-\n  x\n  y", "x y"), ("[1, {b: no}]", [1, {"b": "no"}])),
    *(("{}", {}), ("[]", []), ("inf", "inf")),
)


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_of_yaml_are_those_of_its_version_1_2(text: str, value: object) -> None:
    found = read_yaml(f"a: {text}").keys["a"]
    assert (type(found), found) == (type(value), value)


READ = (
    ("yaml", "", {}),
    ("yaml", "--- # x\n...\n# y\n", {}),
    ("yaml", "a: 1\n---\n", {"a": 1}),
    ("yaml", "on: 1\n? b\n: 2", {"on": 1, "b": 2}),
    ("yaml", "a.b: 1\na: {c: 2}", {"a.b": 1, "a.c": 2}),
    ("yaml", "a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}", {"a.b": 1, "a.c": 2, "d.b": 1, "d.c": 3}),
    ("yaml", "d: {c: 3, <<: [{c: 1, b: 1}, {b: 2, e: 2}]}", {"d.b": 1, "d.e": 2, "d.c": 3}),
    ("yaml", "a: &x [1]\nb: *x\nc: [&x {d: 2}, *x]", {"a": [1], "b": [1], "c": [{"d": 2}] * 2}),
    ("yaml", "'<<': 1", {"<<": 1}),
    ("json", '{"a": {"b": {}}, "c": [{"d.e": null}]}', {"a.b": {}, "c": [{"d.e": None}]}),
    ("json", '{ // "x\n# y\n"a#": /* {"*\n/ */1}', {"a#": 1}),
    ("toml", "[a]\n[[b.c]]\n[b.c.d]\n", {"a": {}, "b.c": [{"d": {}}]}),
    ("toml", "a = 1979-05-27", {"a": "1979-05-27"}),
)


@pytest.mark.parametrize(("kind", "text", "keys"), READ)
def test_keys_are_joined_with_dots_and_empty_sections_stay(
    kind: str, text: str, keys: dict[str, object]
) -> None:
    assert READERS[kind](text).keys == keys


def test_a_name_with_a_dot_of_its_own_is_told() -> None:
    assert read_toml('a.b = 1\na."c.d" = 2').dotted == {"a.c.d"}


def test_lists_of_lists_and_keys_of_several_lines_hide_no_line() -> None:
    assert read_toml("a = [[\n1], [[2]]]\nb.c = 2").lines == {"a": 1, "b": 3, "b.c": 3}
    assert read_yaml('? "a\n  a"\n: 1\nb: 2').lines == {"a a": 1, "b": 4}


TWICE = "key 'a' appears twice, first on line 1"
REFUSED = (
    ("yaml", "\na: b: c", "line 2: not valid YAML: mapping values are not allowed in this"),
    ("yaml", "a: 1\n\ta: 1", "line 2: not valid YAML: "),
    ("yaml", "a:\n - \x01", "line 2: not valid YAML: "),
    ("yaml", "a:\n - \ud800", "line 2: not valid YAML: surrogates not allowed"),
    ("yaml", "a: .inf", "line 1: a: inf is not allowed; it must be a finite number"),
    ("yaml", "a:\n - -.INF", "line 1: a: -inf is not allowed"),
    ("yaml", "a: .NaN", "line 1: a: nan is not allowed"),
    ("yaml", f"a: {10**30}", "line 1: a: 1000000000000000000000000000000 is too long; allowed: at"),
    ("yaml", "b:\n a: !!python/object:os.system x", "line 2: tag 'tag:yaml.org,2002:python/object"),
    ("yaml", "a: !x 1", "line 1: tag '!x' is not allowed"),
    ("yaml", "a: ! 1", "line 1: tag '!' is not allowed"),
    ("yaml", "%TAG ! x\n---\na: 1", "line 1: %TAG is not allowed"),
    ("yaml", "a: 1\nb: 2\na: 3", f"line 3: {TWICE}"),
    ("yaml", "&x a: 1\n*x : 2", f"line 2: {TWICE}"),
    ("yaml", "a: [{b: 1,\n b: 2}]", "line 2: key 'a.b' appears twice, first on line 1"),
    ("yaml", "a.b: 1\na:\n  b: 2", "line 3: key 'a.b' appears twice, first on line 1"),
    ("yaml", "a: 1\na.b: 2", f"line 2: {TWICE}"),
    ("yaml", "a.b: 2\na: 1", f"line 2: {TWICE}"),
    ("yaml", "a..b: 2", "line 1: key 'a..b' is no name"),
    ("yaml", "1: x", "line 1: key 1 is not a text"),
    ("yaml", "a:\n  no: 1\n  true: x", "line 3: key True is not a text"),
    ("yaml", "? [a]\n: 1", "line 1: key a list is not a text"),
    ("yaml", "a: 1\n--- {b: 1}\n", "line 2: a second document"),
    ("yaml", "a: *b", "line 1: *b stands for nothing"),
    ("yaml", "a: &a [*a]", "line 1: *a stands inside of &a"),
    ("yaml", "<<: [1]", "line 1: << of 1; allowed: tables"),
    ("yaml", "<<: {}\n<<: {}", "line 2: key << appears twice"),
    ("yaml", "- a", "line 1: must hold KEY: VALUE"),
    ("json", '{"a": 1,\n"a": 2}', f"line 2: {TWICE}"),
    ("json", '{"a.b": 1,\n"a": {"b": 2}}', "line 2: key 'a.b' appears twice, first on line 1"),
    ("json", '{"a": [{"b": 1,\n"b": 2}]}', "line 2: key 'a.b' appears twice, first on line 1"),
    ("json", '{\n"a": NaN}', "line 2: a: nan is not allowed"),
    ("json", '{\n"a": 1', "line 2: not valid JSON: Expecting ',' delimiter"),
    ("json", '{// "\n/*\n*/#\n"a": ]', "line 4: not valid JSON: Expecting value"),
    ("json", "[1]", "line 1: must hold a JSON object"),
    ("json", '{"": 1}', "line 1: key '' is no name"),
    ("toml", "a = 1\na = 2", "line 2: not valid TOML: Cannot overwrite a value"),
    ("toml", "\na = inf", "line 2: a: inf is not allowed"),
    ("toml", f"\na = [{10**30}]", "line 2: a: 1000000000000000000000000000000 is too long"),
    ("toml", "\na = ", "line 2: not valid TOML: Invalid value"),
    ("toml", 'a = 1\n"a.b" = 1', f"line 2: {TWICE}"),
)


@pytest.mark.parametrize(("kind", "text", "said"), REFUSED)
def test_what_is_not_understood_is_refused_by_its_line(kind: str, text: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        READERS[kind](text)
    assert str(caught.value).startswith(said)
    assert str(caught.value).isprintable()


# Before, repeated, after; a number that counts stands for {}.
LAUGHS = "a: &a0 [1, 1]\n" + "".join(f"b{i}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40))
HOSTILE = (
    *(("yaml", "", each, "") for each in ("- ", "[", "{", "? ", "a: &x ", "[a,", "'", '"', "*a ")),
    *(("yaml", "", each, "") for each in ("--- 1\n", "---\n", "k{}: 1\n", "\t", "\u2028", "a: ")),
    *(("yaml", "", each, "---\n") for each in ("%TAG !a{}! b\n", "%a\n")),
    *(("yaml", "a: ", each, "") for each in ("x ", "1", " x\n", "!", "[[],", "&a{} ")),
    *(("yaml", "a: [", each, "]") for each in ("&a{} 1,", "[],", "'a'\n,", "{x: 1},")),
    ("yaml", LAUGHS, "#\n", ""),
    ("yaml", "a: &a {b: 1, c: 2}\nd: [", "{<<: [*a, *a, *a]},", "]"),
    ("yaml", f'? "{"k" * 400_000}"\n:', "\n a{}: 1", ""),
    *(("json", "", each, "") for each in ("[", '{"a":', '"', '\\"', '["\\" ', " ", '["a",')),
    *(("json", "", each, "{}") for each in ("#\n", "/**/", "/*", "/ ", '"#"', "//")),
    *(("json", '{"a":[', each, "0]}") for each in ("[],", "{},", "1,", '{"a":1},', '"",')),
    *(("json", '{"a":', each, "}") for each in ("1", "1e9", "-", '"a" ')),
    *(("json", "{", each, '"z":1}') for each in ('"k{}":1,', f'"a{".a" * 40}{{}}":1,', "\n")),
    ("json", f'{{"{"k" * 500_000}":{{', '"a{}":1,', '"z":1}}'),
    *(("toml", "", each, "") for each in ("[", '"', "'", '"\\"', "k{}=1\n", "[k{}]\n", "[[a]]\n")),
    *(("toml", "", each, "") for each in (f"a{{}}{'.a' * 45}=1\n", "#\n", "\n", "a.", "a ")),
    *(("toml", "a=", each, "") for each in ("1", "[", "{a=", "1_", "0.", '"\\"', "'''a", '"""a"')),
    *(("toml", "a=[", each, "]") for each in ("1,", "[],", "{},", "1979-05-27,", '"",', "#\n")),
    ("toml", f"[{'k' * 500_000}]\n", "a{}=1\n", ""),
    ("toml", f"[{'a.' * 45}a]\n", "a{}=1\n", ""),
)
WATCH = """
import json, resource, sys, time
from meshwright.planner.configuration import read_json, read_toml, read_yaml
from meshwright.simulator import PlanError
try:
    read_yaml("a: !x 1")  # imports what it needs
except PlanError:
    pass
cases = json.load(sys.stdin)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for kind, before, part, after in cases:
    room = 1_000_000 - len(before) - len(after)
    middle = "".join(part.replace("{}", str(n)) for n in range(room // (len(part) + 4)))
    if "{}" not in part:
        middle = part * (room // len(part))
    text = before + middle + after
    started = time.process_time()
    try:
        globals()[f"read_{kind}"](text)
        said = ""
    except PlanError as error:
        said = str(error)
    time_s = time.process_time() - started
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    print(json.dumps([kind, before[:20], part, said, time_s, more]))
"""


def test_a_megabyte_of_anything_is_read_or_refused_in_a_second_and_a_hundred_megabytes() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WATCH],
        input=json.dumps(HOSTILE),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == len(HOSTILE)
    for kind, before, part, said, time_s, more_kib in lines:
        what = (kind, before, part, said, time_s, more_kib)
        assert not said or (said.startswith("line ") and said.isprintable()), what
        assert len(said) < 200, what
        assert time_s < 1, what
        assert more_kib < 100_000, what


@pytest.mark.parametrize("read", READERS.values())
def test_a_text_of_ten_megabytes_is_refused(read: Callable[[str], Document]) -> None:
    with pytest.raises(PlanError, match="allowed: at most 1,000,000 characters"):
        read(" " * 10_000_000)


# Names of one document are all different, so that each is on one line; texts are their likes.
TEXTS = (
    "k1: 2",
    "k1 = 2",
    '"k1": 2',
    "[k1]",
    "{ # }",
    '"""',
    "'''",
    '\\"',
    "a\nk2 = 3\n[k3]\n",
    "",
)
LEAVES = st.one_of(
    st.integers(-(10**29), 10**29),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.sampled_from(TEXTS),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
TREES = st.recursive(
    st.one_of(LEAVES, st.lists(st.one_of(LEAVES, st.just({"in a list": 1})), max_size=3)),
    lambda inner: st.dictionaries(st.sampled_from(["-", "é", " ", "'", '"', "\t"]), inner),
    max_leaves=12,
)


def flat(tree: Mapping[str, object], before: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def numbered(tree: Mapping[str, object], numbers: Iterator[int]) -> dict[str, object]:
    """Return *tree* with a number in each name."""
    return {
        f"k{next(numbers)}{name}k": numbered(value, numbers) if isinstance(value, dict) else value
        for name, value in tree.items()
    }


def json_like(value: object, random: Random) -> str:
    """Return a value as JSON, with spaces and line ends wherever they may stand."""
    space = "".join(random.choices(["", " ", "\n", "\r\n", "\t"], k=2))
    if isinstance(value, dict):
        items = (
            f"{space}{json_like(k, random)}{space}:{json_like(v, random)}" for k, v in value.items()
        )
        return f"{space}{{{','.join(items)}{space}}}"
    if isinstance(value, list):
        return f"[{','.join(json_like(each, random) for each in value)}{space}]"
    return space * (not isinstance(value, str)) + json.dumps(
        value, ensure_ascii=random.random() < 0.5
    )


def yaml_value(value: object) -> str:
    if isinstance(value, str):  # where JSON has two escapes for one character, YAML has one
        each = (c if c.isalnum() and c.isascii() else f"\\U{ord(c):08x}" for c in value)
        return f'"{"".join(each)}"'
    if isinstance(value, dict):
        return f"{{{', '.join(f'{yaml_value(k)}: {yaml_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_value, value))}]"
    return json.dumps(value)


def yaml_like(tree: Mapping[str, object], random: Random, indent: str = "") -> str:
    """Return a table as YAML, of blocks and of JSON on one line, which is YAML."""
    lines = []
    for name, value in tree.items():
        key = f"{indent}{yaml_value(name)}:"
        if isinstance(value, dict) and value and random.random() < 0.7:
            lines.append(f"{key} # k1: 1\n{yaml_like(value, random, indent + ' ')}")
        elif value == TEXTS[-2] and random.random() < 0.5:
            lines.append(f"{key} |\n{indent}   a\n{indent}   k2 = 3\n{indent}   [k3]\n")
        else:
            lines.append(f"{key} {yaml_value(value)}\n" + random.choice(["", "# k1: 1\n", "\n"]))
    return "".join(lines)


def toml_value(value: object, random: Random) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(toml_line(k, v, random) for k, v in value.items()) + "}"
    if isinstance(value, list):
        space = random.choice(["", "\n", " # k1 = ]\n", "\r\n\t"])
        return f"[{space}{''.join(f'{toml_value(each, random)}{space},' for each in value)}{space}]"
    if value == TEXTS[-2] and random.random() < 0.7:
        return random.choice([f'"""\n{value}"""', f"'''{value}'''"])
    quoted = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return quoted if isinstance(value, str) else repr(value).lower()


def toml_name(name: str, random: Random) -> str:
    plain = "'" not in name and "\t" not in name
    return random.choice([json.dumps(name), f"'{name}'" if plain else json.dumps(name)])


def toml_line(name: str, value: object, random: Random, before: str = "") -> str:
    return f"{before}{toml_name(name, random)} = {toml_value(value, random)}"


def toml_like(tree: Mapping[str, object], random: Random, section: str = "") -> str:
    """Return a table as TOML: sections, dotted keys and tables in braces, as it comes."""
    first, last = "", ""
    for name, value in tree.items():
        key, style = toml_name(name, random), random.randrange(3)
        if isinstance(value, dict) and style == 0:
            last += f"[{section}{key}] # [k1]\n" + toml_like(value, random, f"{section}{key} . ")
        elif isinstance(value, dict) and value and style == 1:
            first += "".join(f"{toml_line(k, v, random, f'{key} .')}\n" for k, v in value.items())
        elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            last += "".join(f"[[{section}{key}]]\n'in a list' = 1\n" for _ in value)
        else:
            first += toml_line(name, value, random) + random.choice(["\n", " # k1 = 1\n", "\r\n\n"])
    return first + last


LIKE: Mapping[str, Callable[[dict[str, object], Random], str]] = {
    "json": json_like,
    "toml": toml_like,
    "yaml": yaml_like,
}


@pytest.mark.parametrize("kind", READERS)
@given(
    tree=st.dictionaries(st.just(""), TREES, max_size=6), random=st.randoms(use_true_random=False)
)
def test_each_key_stands_on_its_line(kind: str, tree: dict[str, object], random: Random) -> None:
    names = numbered({"x": tree, "y": tree}, iter(range(10_000)))
    text = LIKE[kind](names, random)
    document, lines = READERS[kind](text), text.split("\n")
    assert document.keys == flat(names)
    assert document.keys.keys() <= document.lines.keys()
    for key, number in document.lines.items():
        name = re.match(r"k\d+", key.rpartition(".")[2])
        assert name is not None
        assert re.search(rf"{name[0]}\D", lines[number - 1]), (key, number, text)


WRITERS: Mapping[str, Callable[[Mapping[str, object]], str]] = {
    "json": json_keys,
    "toml": toml_text,
    "yaml": yaml_text,
}
ANY_TEXT = st.characters(exclude_categories=["Cs"], exclude_characters=".")
WORDS = (
    "a",
    "no",
    "1",
    "~",
    "<<",
    "null",
    "1e5",
    "'",
    '"',
    "#",
    "\n",
    "\x7f",
    "\u2028",
    "x: y",
    "on",
)
NAMES = st.one_of(st.sampled_from(WORDS), st.text(ANY_TEXT, min_size=1, max_size=4))
VALUES = st.one_of(LEAVES, st.sampled_from((*WORDS, "1e-5", ".5", "\x85", "\ufeff", "\x1b", "-")))


@pytest.mark.parametrize("kind", READERS)
@given(
    tree=st.recursive(
        st.one_of(VALUES, st.lists(VALUES, max_size=3)),
        lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=4),
        max_leaves=10,
    )
)
def test_what_is_written_is_read_again(kind: str, tree: object) -> None:
    keys = flat({"a": tree})
    assert READERS[kind](WRITERS[kind](keys)).keys == keys
