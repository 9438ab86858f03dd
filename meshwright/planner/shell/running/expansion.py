"""Expansion of words: quotes, variables, arithmetic, and what a command between ``$(`` prints."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.planner.shell.language import (
    BRACES,
    WHITE,
    Field,
    Fragment,
    Kind,
    Text,
    Unknown,
    braced,
    field_of,
    joined,
    split,
    written,
)
from meshwright.planner.shell.running.interpreter import MOST_NESTED, Flow, Interpreter
from meshwright.planner.shell.running.parameters import (
    Parameter,
    calculated,
    operated,
    parameter_at,
)

if TYPE_CHECKING:
    from tree_sitter import Node

SPECIAL = frozenset(
    {
        "string",
        "raw_string",
        "ansi_c_string",
        "translated_string",
        "simple_expansion",
        "expansion",
        "command_substitution",
        "arithmetic_expansion",
        "process_substitution",
    }
)
DOLLAR = r"|\$([A-Za-z_]\w*|[0-9@*#?!$-])"
ESCAPES = {
    "word": r"\\(\n|.)" + DOLLAR,
    "default": r"\\(\n|.)" + DOLLAR,
    "double": r'\\([\n$`"\\])' + DOLLAR,
    "here": r"\\([\n$`\\])" + DOLLAR,
    "raw": r"\\(\n)" + DOLLAR,
}
ANSI = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)", re.DOTALL)
ANSI_LETTERS = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v",
}  # fmt: skip


def specials(node: "Node", start: int, stop: int) -> list["Node"]:
    """Return the parts between two bytes that are expanded or quoted, the outermost of each."""
    found: list[Node] = []
    waiting = _between(node, start, stop)
    while waiting:
        each = waiting.pop()
        if each.type in SPECIAL and each.start_byte >= start and each.end_byte <= stop:
            found.append(each)
        else:
            waiting.extend(_between(each, start, stop))
    return found


def _between(node: "Node", start: int, stop: int) -> list["Node"]:
    """Return the children that reach into a range, the last first."""
    children = node.children
    first = bisect_right(children, start, key=lambda each: each.end_byte)
    last = bisect_left(children, stop, key=lambda each: each.start_byte)
    return children[first:last][::-1]


def fragments(shell: Interpreter, node: "Node", start: int, stop: int, mode: str) -> list[Fragment]:
    """Return the parts of a word, expanded.

    Args:
        shell: The script.
        node: The part of the tree that holds the word.
        start: Its first byte.
        stop: The byte after it.
        mode: ``word``; ``double`` between quotes; ``here`` in a here-document; ``raw`` in
            arithmetic; ``default`` a word within ``${X:-...}`` that is not quoted.
    """
    shell.budget.depth += 1
    if shell.budget.depth > MOST_NESTED:
        raise shell.unknowns.refusal(shell.frame.source.place(start), "expansions nest too deeply")
    found: list[Fragment] = []
    at = start
    for each in specials(node, start, stop):
        literal = shell.frame.source.part(at, _begin(shell, each))
        if each.type == "string" and literal.characters.endswith("$"):
            literal = literal.part(0, len(literal.characters) - 1)
        found += _literal(shell, literal, mode)
        found += _expanded(shell, each, is_quoted=mode not in {"word", "default", "raw"})
        at = each.end_byte
    found += _literal(shell, shell.frame.source.part(at, stop), mode)
    shell.spend(
        shell.frame.source.place(start),
        characters=sum(len(each.text.characters) for each in found),
    )
    shell.budget.depth -= 1
    return found


def _literal(shell: Interpreter, text: Text, mode: str) -> list[Fragment]:
    """Return the parts of what is neither quoted nor an expansion, by the grammar.

    The grammar takes the second ``$`` of ``$A/$B/c`` for a character: it is expanded here.
    """
    if not text.characters:
        return []
    bare = {"word": Kind.LITERAL, "raw": Kind.LITERAL, "default": Kind.SPLIT}.get(mode, Kind.QUOTED)
    found: list[Fragment] = []
    at = 0
    for each in re.finditer(ESCAPES[mode], text.characters):
        found.append(Fragment(text.part(at, each.start()), bare))
        if each[2]:
            place = text.places[each.start()]
            kind = Kind.QUOTED if bare is Kind.QUOTED else Kind.SPLIT
            found += operated(shell, Parameter("", each[2]), "", None, place, kind)
        elif each[1] != "\n":
            found.append(Fragment(text.part(*each.span(1)), Kind.QUOTED))
        at = each.end()
    found.append(Fragment(text.part(at, len(text.characters)), bare))
    return [each for each in found if each.text.characters or each.begins]


def _begin(shell: Interpreter, node: "Node") -> int:
    """Return the first byte of an expansion: the grammar counts spaces before it as part of it."""
    if node.children and not node.children[0].is_named:
        return node.children[0].end_byte - len(node.children[0].type)
    data = shell.frame.source.data[node.start_byte : node.end_byte]
    return node.end_byte - len(data.lstrip())


def _expanded(shell: Interpreter, node: "Node", *, is_quoted: bool) -> list[Fragment]:
    source = shell.frame.source
    start, stop = _begin(shell, node), node.end_byte
    kind = Kind.QUOTED if is_quoted else Kind.SPLIT
    if node.type in {"string", "translated_string"}:
        return _quoted(shell, node if node.type == "string" else node.children[-1])
    if node.type in {"raw_string", "ansi_c_string"}:
        is_raw = node.type == "raw_string"
        text = source.part(start + 1 if is_raw else start + 2, stop - 1)
        return [Fragment(text if is_raw else _ansi(text), Kind.QUOTED)]
    if node.type == "simple_expansion":
        parameter = Parameter("", source.data[start + 1 : stop].decode())
        return operated(shell, parameter, "", None, source.place(start), kind)
    if node.type == "expansion":
        return _expansion(shell, node, kind)
    if node.type == "arithmetic_expansion":
        is_old = source.data[start : start + 2] == b"$["
        inner = (start + 2, stop - 1) if is_old else (start + 3, stop - 2)
        value = number(shell, node, *inner)
        return [Fragment(written(str(value), source.place(start)), kind)]
    is_command = node.type == "command_substitution"
    return [Fragment(substitution(shell, node) if is_command else _not_run(shell, node), kind)]


def _quoted(shell: Interpreter, node: "Node") -> list[Fragment]:
    found = fragments(shell, node, _begin(shell, node) + 1, node.end_byte - 1, "double")
    if found or specials(node, node.start_byte, node.end_byte):
        return found  # of "$@" without arguments no word is left
    return [Fragment(Text(), Kind.QUOTED)]


def _ansi(text: Text) -> Text:
    def letter(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "xu" and len(code) > 1:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8) % 256)
        return ANSI_LETTERS.get(code, code)

    return written(ANSI.sub(letter, text.characters), text.place)


def _expansion(shell: Interpreter, node: "Node", kind: Kind) -> list[Fragment]:
    """Return what ``${...}`` stands for."""
    source, place = shell.frame.source, shell.place(node)
    start, stop = _begin(shell, node) + 2, node.end_byte - 1
    found = parameter_at(source.data[start:stop])
    if found is None:
        shown = source.part(node.start_byte, node.end_byte).characters
        raise shell.unknowns.refusal(place, f"{shown[:40]!a} is not read")
    prefix, name, index, operator, at = found
    parameter = Parameter(prefix, name)
    if index is not None:
        inner = source.data[start + index[0] : start + index[1]].decode()
        if inner in {"@", "*"}:
            parameter = Parameter(prefix, name, inner)
        else:
            key = key_of(shell, name, node, start + index[0], start + index[1])
            parameter = Parameter(prefix, name, key)

    def word(mode: str = "") -> list[Fragment]:
        default = "double" if kind is Kind.QUOTED else "default"
        return fragments(shell, node, start + at, stop, mode or default)

    return operated(shell, parameter, operator, word, place, kind)


def key_of(shell: Interpreter, name: str, node: "Node", start: int, stop: int) -> int | str:
    """Return the index of an element: a number, of an associative array a text."""
    variable = shell.state.variables.get(name)
    if variable is not None and variable.is_keyed:
        return field_of(fragments(shell, node, start, stop, "word")).text.characters
    return number(shell, node, start, stop)


def number(shell: Interpreter, node: "Node", start: int, stop: int) -> int | str:
    """Return the value of an expression between two bytes, or the mark of what it depends on."""
    text = joined([each.text for each in fragments(shell, node, start, stop, "raw")] or [Text()])
    return calculated(shell, text.characters, shell.frame.source.place(start))


def word_groups(shell: Interpreter, nodes: Sequence["Node"]) -> list[list["Node"]]:
    """Return the parts of each word: those without a space between them."""
    groups: list[list[Node]] = []
    for each in nodes:
        if groups:
            gap = shell.frame.source.data[groups[-1][-1].end_byte : each.start_byte]
            if not gap.replace(b"\\\n", b""):
                groups[-1].append(each)
                continue
        groups.append([each])
    return groups


def fields(shell: Interpreter, parent: "Node", nodes: Sequence["Node"]) -> list[Field]:
    """Return the words that the parts of a command stand for, expanded and split."""
    found: list[Field] = []
    for group in word_groups(shell, nodes):
        start, stop = group[0].start_byte, group[-1].end_byte
        text = shell.frame.source.part(start, stop)
        if "{" in text.characters:
            each = _braced(shell, parent, start, stop)
            if len(each) > 1:
                found += each
                continue
        parts = fragments(shell, parent, start, stop, "word")
        shell.spend(shell.place(group[0]), steps=len(parts) // 2)
        found += split(parts, separators(shell))
    return found


def _braced(shell: Interpreter, parent: "Node", start: int, stop: int) -> list[Field]:
    """Return the words of ``a{b,c}``.

    Raises:
        PlanError: If a part between the braces is quoted or expanded.
    """
    inner = specials(parent, start, stop)
    text = shell.frame.source.part(start, stop)
    if not inner:
        return [Field(one, is_quoted=True, pattern="") for one in braced(text)]
    bare, at = "", start
    for each in inner:
        bare += shell.frame.source.part(at, _begin(shell, each)).characters + "_"
        at = each.end_byte
    bare += shell.frame.source.part(at, stop).characters
    if BRACES.fullmatch(bare):
        raise shell.unknowns.refusal(text.place, "a list in braces with quotes is not read")
    return []


def separators(shell: Interpreter) -> str:
    """Return the characters at which words are split."""
    variable = shell.state.variables.get("IFS")
    return variable.texts[0].characters if variable is not None and variable.texts else WHITE


def single(shell: Interpreter, node: "Node") -> Field:
    """Return a word that is not split: a value, a pattern, the side of a comparison."""
    return within(shell, node, node.start_byte, node.end_byte)


def within(shell: Interpreter, node: "Node", start: int, stop: int) -> Field:
    """Return the word between two bytes, not split."""
    if node.type in SPECIAL:
        return field_of(_expanded(shell, node, is_quoted=False))
    return field_of(fragments(shell, node, start, stop, "word"))


def _not_run(shell: Interpreter, node: "Node") -> Text:
    text = shell.frame.source.part(node.start_byte, node.end_byte).characters
    shown = " ".join(shell.unknowns.shown(text).split())
    shown = shown if len(shown) <= 40 else f"{shown[:36]}...{shown[-1]}"
    place = shell.place(node)
    where = shell.unknowns.where(place)
    return shell.mark(place, Unknown(shown, f"{shown} at {where} is not executed here"))


def substitution(shell: Interpreter, node: "Node") -> Text:
    """Return what commands print, where they are such as ``echo`` and ``dirname``."""
    text = shell.frame.source.data[node.start_byte : node.end_byte].lstrip()
    if text.startswith(b"`") and b"\\" in text:
        return _not_run(shell, node)  # within back quotes a backslash has another meaning
    inner = [each for each in node.named_children if each.type != "comment"]
    outer_state, outer_output, outer_commands = shell.state, shell.output, shell.commands
    shell.state, shell.output, shell.commands = shell.state.copy(), [], []
    shell.budget.depth += 1
    if shell.budget.depth > MOST_NESTED:
        raise shell.unknowns.refusal(shell.place(node), "commands nest too deeply")
    is_known = True
    try:
        for each in inner:
            shell.run(shell, each)
    except Flow as flow:
        is_known = flow.kind == "exit"
    finally:
        shell.budget.depth -= 1
    printed, ran = shell.output, shell.commands
    shell.state, shell.output, shell.commands = outer_state, outer_output, outer_commands
    if ran or not is_known or node.children[0].type not in {"$(", "`"}:
        return _not_run(shell, node)
    whole = shell.join(printed or [Text()], shell.place(node))
    return whole.part(0, len(whole.characters.rstrip("\n")))
