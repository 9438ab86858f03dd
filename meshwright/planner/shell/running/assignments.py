"""Assignments of a shell: values, arrays, and the commands that declare variables."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.planner.shell.language import Key, Text, Variable, field_of, written
from meshwright.planner.shell.running.expansion import fields, fragments, key_of, word_groups
from meshwright.planner.shell.running.interpreter import Interpreter, Status

if TYPE_CHECKING:
    from tree_sitter import Node

ELEMENT = re.compile(r"\[(.+?)\]\+?=(.*)", re.DOTALL)


def assign(shell: Interpreter, node: "Node", stop: int | None = None) -> str:
    """Carry out an assignment; return the name of the variable.

    Args:
        shell: The script.
        node: The assignment.
        stop: The byte after it, where the grammar ends it too early.
    """
    name_node = node.children[0]
    operator = next(each for each in node.children if each.type in {"=", "+="})
    place, key = shell.place(node), None
    name = shell.frame.source.part(name_node.start_byte, name_node.end_byte).characters
    if name_node.type == "subscript":
        start = name_node.children[2].start_byte
        name = name.partition("[")[0]
        key = key_of(shell, name, node, start, name_node.end_byte - 1)
    value = node.children[-1]
    if value.type == "array" and value is not operator:
        _assign_array(shell, name, value, is_added=operator.type == "+=")
        return name
    whole = node if stop is None else node.parent or node
    parts = fragments(shell, whole, operator.end_byte, stop or node.end_byte, "word")
    text = field_of(parts).text
    if operator.type == "+=":
        before = shell.state.variables.get(name)
        elements = before.elements if before is not None else {}
        old = elements.get(0 if key is None else key)
        if before is None and key is None:
            old = shell.unset(name, place)
        text = shell.join([old or Text(), text], place)
    shell.assign(name, text, place, key=key)
    return name


def _assign_array(shell: Interpreter, name: str, node: "Node", *, is_added: bool) -> None:
    before = shell.state.variables.get(name)
    is_keyed = before is not None and before.is_keyed
    elements: dict[Key, Text] = dict(before.elements) if is_added and before is not None else {}
    following = max((each for each in elements if isinstance(each, int)), default=-1) + 1
    shell.spend(shell.place(node), steps=1 + len(elements) // 10)
    inner = [each for each in node.children[1:-1] if each.type != "comment"]
    for group in word_groups(shell, inner):
        start, stop = group[0].start_byte, group[-1].end_byte
        raw = ELEMENT.fullmatch(shell.frame.source.part(start, stop).characters)
        if raw is not None:
            at = start + len(raw[1].encode()) + 1
            key = key_of(shell, name, node, start + 1, at)
            value = shell.frame.source.part(at, stop).characters.index("=") + at + 1
            text = field_of(fragments(shell, node, value, stop, "word")).text
            elements[key] = text
            following = key + 1 if isinstance(key, int) else following
            continue
        for each in fields(shell, node, group):
            elements[following] = each.text
            following += 1
    shell.state.variables[name] = Variable(elements, is_array=True, is_keyed=is_keyed)


def run_declaration(shell: Interpreter, node: "Node") -> Status:
    """Carry out ``export``, ``declare``, ``local``, ``readonly``."""
    keyword, *rest = node.children
    flags = ""
    for group in word_groups(shell, rest):
        first, stop = group[0], group[-1].end_byte
        text = shell.frame.source.part(first.start_byte, stop).characters
        if first.type == "variable_assignment":
            name_node = first.children[0]
            name = shell.frame.source.part(name_node.start_byte, name_node.end_byte).characters
            declare(shell, keyword.type, flags, name.partition("[")[0], is_assigned=True)
            assign(shell, first, stop if len(group) > 1 else None)
        elif text.startswith("-"):
            flags += text[1:]
        else:
            words = [each.text for each in fields(shell, node, group)]
            declare_words(shell, keyword.type, flags, words)
    return True


def declare_words(shell: Interpreter, keyword: str, flags: str, words: Sequence[Text]) -> None:
    """Carry out a declaration whose assignments are words: ``export "A=$B"``."""
    for word in words:
        name, equals, value = word.characters.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*\+?", name):
            continue
        is_added, name = name.endswith("+"), name.rstrip("+")
        declare(shell, keyword, flags, name, is_assigned=bool(equals))
        if equals:
            text = word.part(len(word.characters) - len(value), len(word.characters))
            old = shell.state.variables.get(name)
            if is_added and old is not None and old.texts:
                text = shell.join([old.texts[0], text], word.place)
            shell.assign(name, text, word.place)


def declare(shell: Interpreter, keyword: str, flags: str, name: str, *, is_assigned: bool) -> None:
    """Make a variable local, exported or an array; it keeps its value until it is assigned to."""
    state = shell.state
    if "n" in flags and keyword != "export":
        cause = f"`{keyword} -n` of {name} is not read"
        raise shell.unknowns.refusal(0, cause)
    is_local = keyword == "local" or (keyword in {"declare", "typeset"} and "g" not in flags)
    if is_local and shell.frame.is_function:
        if name not in state.local:
            state.local[name] = state.variables.get(name)
        if not is_assigned:
            state.variables[name] = Variable({0: written("", 0)})
    if keyword == "export" or "x" in flags:
        if "n" in flags:
            state.exported -= {name}
        else:
            state.exported |= {name}
    if "A" in flags or "a" in flags:
        before = state.variables.get(name)
        is_fresh = before is None or not before.is_array
        if is_fresh:
            state.variables[name] = Variable({}, is_array=True, is_keyed="A" in flags)
