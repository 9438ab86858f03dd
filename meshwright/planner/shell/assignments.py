"""Assignments of a shell: values, arrays, and the commands that declare variables."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.planner.shell.expansion import fields, fragments, word_groups
from meshwright.planner.shell.interpreter import Interpreter, Status, Variable
from meshwright.planner.shell.words import MARKS, Text, field_of

if TYPE_CHECKING:
    from tree_sitter import Node

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
ELEMENT = re.compile(r"\[.+?\]\+?=.*", re.DOTALL)


def assign(shell: Interpreter, node: "Node", stop: int | None = None) -> str:
    """Carry out an assignment; return the name of the variable.

    It ends before *stop* where the grammar ends it too early; one to an element is refused.
    """
    place, name = shell.place(node), shell.text(node.children[0])
    operator = next(each for each in node.children if each.type in {"=", "+="})
    if not NAME.fullmatch(name):
        raise shell.refusal(place, f"the assignment to the element {name[:40]} is not read")
    before = shell.state.variables.get(name) if operator.type == "+=" else None
    value = node.children[-1]
    if value.type == "array":
        texts = _elements(shell, value)
        shell.state.variables[name] = Variable(
            (*(before.texts if before is not None else ()), *texts), is_array=True
        )
        return name
    whole = node if stop is None else node.parent or node
    parts = fragments(shell, whole, operator.end_byte, stop or node.end_byte, "word")
    text = field_of(parts).text
    if operator.type == "+=":
        old = before.texts[:1] if before is not None else (shell.unset(name, place),)
        text = shell.join([*old, text], place)
    shell.assign(name, text, place)
    return name


def _elements(shell: Interpreter, node: "Node") -> list[Text]:
    """Return the elements of ``(a "b c" $D)``."""
    found: list[Text] = []
    for group in word_groups(
        shell, [each for each in node.named_children if each.type != "comment"]
    ):
        start, stop = group[0].start_byte, group[-1].end_byte
        if ELEMENT.fullmatch(shell.frame.source.characters[start:stop]):
            raise shell.refusal(shell.place(group[0]), "an array with keys is not read")
        found += [each.text for each in fields(shell, node, group)]
    shell.spend(shell.place(node), steps=1 + len(found) // 10)
    return found


def run_declaration(shell: Interpreter, node: "Node") -> Status:
    """Carry out ``export``, ``declare``, ``local``, ``readonly``."""
    keyword, *rest = node.children
    flags = ""
    for group in word_groups(shell, rest):
        first, stop = group[0], group[-1].end_byte
        if first.type == "variable_assignment":
            name = shell.text(first.children[0])
            declare(shell, keyword.type, flags, name, shell.place(first), is_assigned=True)
            assign(shell, first, stop if len(group) > 1 else None)
        else:
            words = [each.text for each in fields(shell, node, group)]
            flags = declare_words(shell, keyword.type, flags, words, shell.place(first))
    return True


def declare_words(
    shell: Interpreter, keyword: str, flags: str, words: Sequence[Text], place: int
) -> str:
    """Carry out a declaration whose assignments are words (``export "A=$B"``); return its flags."""
    for word in words:
        name, equals, _ = word.characters.partition("=")
        if name.startswith("-"):
            flags += name[1:]
            continue
        if NAME.fullmatch(name):
            declare(shell, keyword, flags, name, place, is_assigned=bool(equals))
            if equals:
                shell.assign(name, word.part(len(name) + 1, len(word.characters)), place)
        elif MARKS.search(name) or NAME.fullmatch(name.removesuffix("+")):
            shown = shell.unknowns.shown(name)[:40]
            raise shell.refusal(place, f"the declaration of {shown} is not read")
    return flags


def declare(
    shell: Interpreter, keyword: str, flags: str, name: str, place: int, *, is_assigned: bool
) -> None:
    """Make a variable local, exported or an array; it keeps its value until it is assigned to."""
    state = shell.state
    if set(flags) - set("aefgiprtx"):
        raise shell.refusal(place, f"`{keyword} -{flags}` of {name} is not read")
    is_local = keyword == "local" or (keyword in {"declare", "typeset"} and "g" not in flags)
    if is_local and shell.frame.is_function:
        state.local.setdefault(name, state.variables.get(name))
        if not is_assigned:
            shell.state.variables[name] = Variable((Text(),))
    if keyword == "export" or "x" in flags:
        state.exported |= {name}
    before = state.variables.get(name)
    if "a" in flags and not (before is not None and before.is_array):
        state.variables[name] = Variable((), is_array=True)
