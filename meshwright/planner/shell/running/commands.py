"""Commands of a script: assignments before them, what they read, functions, and those that run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.planner.shell.language import (
    Field,
    Function,
    Text,
    Unknown,
    Word,
    environment_of,
    wrapped_at,
)
from meshwright.planner.shell.running.assignments import assign
from meshwright.planner.shell.running.builtin_commands import BUILTINS, PRINTING, Call
from meshwright.planner.shell.running.expansion import fields, word_groups
from meshwright.planner.shell.running.interpreter import Command, Flow, Frame, Interpreter, Status
from meshwright.planner.shell.running.redirections import Input, read_redirects
from meshwright.planner.shell.running.scripts_within import read_beside, run_script, run_text

if TYPE_CHECKING:
    from tree_sitter import Node

SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "zsh", "dash"})
# What a script asks before it decides: `grep -q x file && ...`.
QUESTIONS = {
    "grep", "egrep", "fgrep", "command", "which", "type", "hash", "diff", "cmp", "pgrep", "pidof",
    "nvidia-smi", "rocm-smi", "id", "getent", "ping", "nc", "mountpoint", "kill", "ls", "stat",
    "scontrol", "lspci", "lsmod", "nvcc",
}  # fmt: skip
MOST_CALLS = 30  # functions within functions


def run_command(shell: Interpreter, node: "Node") -> Status:
    """Run a command, with or without redirections."""
    if node.type != "redirected_statement":
        return _run_simple(shell, node, [])
    body = node.child_by_field_name("body")
    redirects = [each for each in node.children if each != body]
    if body is not None and body.type == "command":
        return _run_simple(shell, body, redirects)
    given = read_redirects(shell, node, redirects)
    output = shell.output
    if given.is_quiet and output is not None:
        shell.output = []
    status = shell.run(shell, body) if body is not None else True
    shell.output = output
    for each in given.after:
        shell.run(shell, each)
    return status


def _run_simple(shell: Interpreter, node: "Node", redirects: Sequence["Node"]) -> Status:
    """Run a command that has words, or only assignments."""
    place = shell.place(node)
    inner = [each for each in node.children if each.type.endswith("_redirect")]
    prefix = [each for each in node.children if each.type == "variable_assignment"]
    parts = [
        each
        for each in node.children
        if each.type not in {"variable_assignment", "comment"}
        and not each.type.endswith("_redirect")
    ]
    if prefix and parts and prefix[-1].end_byte == parts[0].start_byte:
        group = word_groups(shell, parts)[0]  # `A=$B/$C/d` is cut at the second dollar
        parts, last = parts[len(group) :], group[-1].end_byte
        if not parts or _is_divided(shell, last, parts[0].start_byte):
            for each in prefix:
                assign(shell, each, last if each is prefix[-1] else None)
            prefix = []
        else:
            raise shell.unknowns.refusal(place, "the assignment before this command is not read")
    if prefix and parts and _is_divided(shell, prefix[-1].end_byte, parts[0].start_byte):
        for each in prefix:  # the grammar joins such a line to the next one
            assign(shell, each)
        prefix = []
    for before, each in pairwise(parts):
        if _is_divided(shell, before.end_byte, each.start_byte):
            raise shell.unknowns.refusal(shell.place(each), "where this command begins is not read")
    words = fields(shell, node, parts)
    given = read_redirects(shell, node, [*inner, *redirects])
    for each in given.words:
        words += fields(shell, each.parent or node, [each])
    status = _run_words(shell, words, prefix, given, place)
    for each in given.after:
        shell.run(shell, each)
    return status


def _is_divided(shell: Interpreter, start: int, stop: int) -> bool:
    return b"\n" in shell.frame.source.data[start:stop].replace(b"\\\n", b"")


def _run_words(
    shell: Interpreter,
    words: Sequence[Field],
    prefix: Sequence["Node"],
    given: Input,
    place: int,
) -> Status:
    if not words:
        for each in prefix:
            assign(shell, each)
        return True
    kept = {}
    exported = shell.state.exported
    for each in prefix:
        name = (each.children[0].text or b"").decode()
        kept[name] = shell.state.variables.get(name)
        shell.state.exported |= {assign(shell, each)}
    output = shell.output
    if given.is_quiet and output is not None:
        shell.output = []
    try:
        return run_words(shell, words, given.text, place)
    finally:
        shell.output = output
        if prefix:
            shell.state.exported = exported
        for name, old in kept.items():
            if old is None:
                shell.state.variables.pop(name, None)
            else:
                shell.state.variables[name] = old


def run_words(shell: Interpreter, words: Sequence[Field], text: Text | None, place: int) -> Status:
    """Run a command of expanded words; *text* is what it reads."""
    name = words[0].text.characters
    function = shell.state.functions.get(name)
    if function is not None:
        return _call(shell, function, [each.text for each in words[1:]], place)
    call = Call(shell, words, [each.text for each in words[1:]], text, place)
    if name in PRINTING and shell.output is not None:
        printed = PRINTING[name](call)
        if printed is None:
            return _external(shell, words, text, place)
        shell.output.append(printed)
        return True
    builtin = RUNNING.get(name) or BUILTINS.get(name)
    if builtin is not None:
        return builtin(call)
    return _external(shell, words, text, place)


def _call(shell: Interpreter, function: Function, arguments: Sequence[Text], place: int) -> Status:
    frame, outer = shell.frame, shell.state
    saved = outer.arguments, outer.knows_arguments, outer.local
    shell.budget.depth += 2
    if shell.budget.depth > 2 * MOST_CALLS:
        raise shell.unknowns.refusal(place, "functions call each other too deeply")
    shell.frame = Frame(function.source, frame.launcher, is_function=True)
    outer.arguments, outer.knows_arguments, outer.local = tuple(arguments), True, {}
    status: Status = True
    try:
        status = shell.run(shell, function.body)
    except Flow as flow:
        if flow.kind != "return":
            raise
        status = flow.status
    finally:
        for kind, state, cause in shell.frame.left:
            if kind == "return":
                shell.merge(state, cause)
        shell.budget.depth -= 2
        shell.frame = frame
        state = shell.state
        for name, old in state.local.items():
            if old is None:
                state.variables.pop(name, None)
            else:
                state.variables[name] = old
        state.arguments, state.knows_arguments, state.local = saved
    return status


def _external(
    shell: Interpreter, fields_: Sequence[Field], text: Text | None, place: int
) -> Status:
    """Run a command that is no part of the shell: it is noted, or read if it is a script."""
    words = tuple(
        shell.unknowns.word(each.text, place, is_quoted=each.is_quoted) for each in fields_
    )
    at = wrapped_at(words)
    inner = list(fields_[at:])
    name = words[at].text if at < len(words) else ""
    shell.spend(place, steps=1 + len(shell.state.exported) // 4)
    seen = {**environment(shell, place), **environment_of(words[:at])}
    if name in SHELLS and run_script(shell, inner, text, (words[:at], place)):
        return True
    shell.commands.append(Command(words=words, environment=seen, launcher=shell.frame.launcher))
    where = shell.unknowns.where(place)
    shown = " ".join(each.text for each in words[:3])[:40]
    cause = f"whether `{shown}` at {where} succeeds is not known"
    asks = words[0].text in QUESTIONS or [each.text for each in words[1:2]] == ["-c"]
    return shell.unknowns.mark(Unknown(shown, cause, is_usual=not asks))


def environment(shell: Interpreter, place: int) -> Mapping[str, Word]:
    """Return the variables that a command sees."""
    found = {}
    for name in sorted(shell.state.exported):
        variable = shell.state.variables.get(name)
        if variable is not None and not variable.is_array:
            found[name] = shell.unknowns.word(variable.texts[0], place)
    return found


def _source(call: Call) -> Status:
    shell = call.shell
    if not call.arguments:
        return False
    text = read_beside(shell, call.arguments[0])
    shown = shell.unknowns.shown(call.arguments[0].characters)
    if text is None:
        # An activated environment sets no variable of the script.
        if not any(each in shown for each in ("activate", "bashrc", "profile", "conda")):
            shell.state.missing = shell.state.missing or shown[:60]
        return True
    state = shell.state
    saved = state.arguments, state.knows_arguments
    if call.arguments[1:]:
        state.arguments, state.knows_arguments = tuple(call.arguments[1:]), True
    try:
        return run_text(shell, text, call.place)
    except Flow as flow:
        if flow.kind != "return":
            raise
        return True
    finally:
        if call.arguments[1:]:
            shell.state.arguments, shell.state.knows_arguments = saved


def _eval(call: Call) -> Status:
    if not call.arguments:
        return True
    return run_text(call.shell, call.joined(), call.place)


def _exec(call: Call) -> Status:
    if not call.arguments:
        return True
    _external(call.shell, call.words[1:], call.text, call.place)
    raise Flow("exit")


def _command(call: Call) -> Status:
    if not call.arguments or call.arguments[0].characters.startswith("-"):
        return _external(call.shell, call.words, call.text, call.place)
    return run_words(call.shell, call.words[1:], call.text, call.place)


RUNNING = {"source": _source, ".": _source, "eval": _eval, "exec": _exec, "command": _command}
