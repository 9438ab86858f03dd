"""Redirections of a command: what it reads, where that stands in the script, and what follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.planner.shell.language import (
    Text,
    field_of,
)
from meshwright.planner.shell.running.expansion import fragments, single
from meshwright.planner.shell.running.interpreter import Interpreter

if TYPE_CHECKING:
    from tree_sitter import Node


@dataclass(slots=True)
class Input:
    """What redirections make of a command.

    Args:
        text: What it reads, where that stands in the script.
        is_quiet: What it prints goes elsewhere.
        words: Those after a file of a redirection: they are arguments.
        after: Statements that stand behind the start of a here-document.
    """

    text: Text | None
    is_quiet: bool
    words: list["Node"]
    after: list["Node"]


def read_redirects(shell: Interpreter, parent: "Node", nodes: Sequence["Node"]) -> Input:
    """Return what redirections make of a command."""
    given = Input(None, is_quiet=False, words=[], after=[])
    waiting = list(nodes)
    while waiting:
        each = waiting.pop(0)
        if each.type == "herestring_redirect":
            given.text = shell.join([single(shell, each.children[-1]).text], shell.place(each))
        elif each.type == "file_redirect":
            _read_file_redirect(each, given)
        elif each.type == "heredoc_redirect":
            given.text = _here_document(shell, each)
            for inner in each.children:
                if inner.type in {"file_redirect", "herestring_redirect"}:
                    waiting.append(inner)
                elif inner.is_named and not inner.type.startswith(("heredoc", "file_desc")):
                    target = given.after if inner.type in STATEMENT_NODES else given.words
                    target.append(inner)
    del parent
    return given


STATEMENT_NODES = frozenset(
    {"pipeline", "list", "command", "redirected_statement", "compound_statement", "subshell"}
)


def _read_file_redirect(node: "Node", given: Input) -> None:
    descriptor = node.child_by_field_name("descriptor")
    number = descriptor.text if descriptor is not None else b"1"
    is_output = any(each.type.startswith((">", "&>")) for each in node.children)
    given.is_quiet = given.is_quiet or (is_output and number == b"1")
    targets = node.children_by_field_name("destination")
    for before, each in pairwise(targets):
        if given.words or before.end_byte < each.start_byte:
            given.words.append(each)


def _here_document(shell: Interpreter, node: "Node") -> Text:
    start = next(each for each in node.children if each.type == "heredoc_start")
    body = next((each for each in node.children if each.type == "heredoc_body"), None)
    end = next((each for each in node.children if each.type == "heredoc_end"), None)
    source = shell.frame.source
    if body is None or end is None:
        return Text()
    first = source.data.rfind(b"\n", 0, max(body.start_byte, start.end_byte)) + 1
    first = source.data.find(b"\n", start.end_byte) + 1 if first <= start.end_byte else first
    before = [each for each in node.children if each.end_byte <= body.start_byte]
    first = source.data.find(b"\n", before[-1].end_byte - 1) + 1 or first
    is_quoted = bool(set(source.data[start.start_byte : start.end_byte]) & set(b"'\"\\"))
    strips = node.children[0].type == "<<-"
    if is_quoted:
        text = source.part(first, end.start_byte)
    else:
        text = field_of(fragments(shell, body, first, end.start_byte, "here")).text
    return _without_tabs(text) if strips else text


def _without_tabs(text: Text) -> Text:
    kept = [
        at
        for at, each in enumerate(text.characters)
        if each != "\t" or text.characters[:at].rpartition("\n")[2].strip("\t")
    ]
    return Text("".join(text.characters[at] for at in kept), tuple(text.places[at] for at in kept))
