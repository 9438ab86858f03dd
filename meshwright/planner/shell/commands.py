"""Commands of a script: assignments before them, what they read, functions, and those that run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.planner.shell.assignments import assign
from meshwright.planner.shell.builtin_commands import BUILTINS, PRINTING, Call
from meshwright.planner.shell.expansion import fields, fragments, single, word_groups
from meshwright.planner.shell.fields import Field, field_of
from meshwright.planner.shell.grammar import MOST_BYTES, parse, source_of
from meshwright.planner.shell.interpreter import Command, Flow, Frame, Interpreter, Status
from meshwright.planner.shell.state import Function, State
from meshwright.planner.shell.texts import FILE_STRIDE, MARKS, Text, Unknown, Word
from meshwright.planner.shell.wrappers import environment_of, wrapped_at
from meshwright.simulator import PlanError

if TYPE_CHECKING:
    from tree_sitter import Node

SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "zsh", "dash"})
# What a script asks before it decides: `grep -q x file && ...`.
QUESTIONS = frozenset(
    [
        "grep",
        "egrep",
        "fgrep",
        "command",
        "which",
        "type",
        "hash",
        "diff",
        "cmp",
        "pgrep",
        "pidof",
        "nvidia-smi",
        "rocm-smi",
        "id",
        "getent",
        "ping",
        "nc",
        "mountpoint",
        "kill",
        "ls",
        "stat",
        "scontrol",
        "lspci",
        "lsmod",
        "pip",
        "python",
        "python3",
        "nvcc",
    ]
)
BAD = re.compile("[\0\ud800-\udfff\U000f0000-\U000ffffd]")
MOST_CALLS = 30  # functions within functions


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


def run_command(shell: Interpreter, node: "Node") -> Status:
    """Run a command, with or without redirections."""
    if node.type != "redirected_statement":
        return _run_simple(shell, node, [])
    body = node.child_by_field_name("body")
    redirects = [each for each in node.children if each != body]
    if body is not None and body.type == "command":
        return _run_simple(shell, body, redirects)
    given = _read_redirects(shell, node, redirects)
    output = shell.output
    if given.is_quiet and output is not None:
        shell.output = []
    status = shell.run(shell, body) if body is not None else True
    shell.output = output
    for each in given.after:
        shell.run(shell, each)
    return status


def _read_redirects(shell: Interpreter, parent: "Node", nodes: Sequence["Node"]) -> Input:
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
    for before, each in zip(targets, targets[1:], strict=False):
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
    for before, each in zip(parts, parts[1:], strict=False):
        if _is_divided(shell, before.end_byte, each.start_byte):
            raise shell.unknowns.refusal(shell.place(each), "where this command begins is not read")
    words = fields(shell, node, parts)
    given = _read_redirects(shell, node, [*inner, *redirects])
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
        if printed is not None:
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
    """Run a command that is no part of the shell: it is noted down, or read where it is a script."""
    words = tuple(
        shell.unknowns.word(each.text, place, is_quoted=each.is_quoted) for each in fields_
    )
    at = wrapped_at(words)
    inner = list(fields_[at:])
    name = words[at].text if at < len(words) else ""
    shell.spend(place, steps=1 + len(shell.state.exported) // 4)
    seen = {**environment(shell, place), **environment_of(words[:at])}
    if name in SHELLS and _run_script(shell, inner, text, (words[:at], place)):
        return True
    shell.commands.append(Command(words=words, environment=seen, launcher=shell.frame.launcher))
    where = shell.unknowns.where(place)
    shown = " ".join(each.text for each in words[:3])[:40]
    cause = f"whether `{shown}` at {where} succeeds is not known"
    is_usual = words[0].text not in QUESTIONS
    return shell.unknowns.mark(Unknown(shown, cause, is_usual=is_usual))


def environment(shell: Interpreter, place: int) -> Mapping[str, Word]:
    """Return the variables that a command sees."""
    found = {}
    for name in sorted(shell.state.exported):
        variable = shell.state.variables.get(name)
        if variable is not None and not variable.is_array:
            found[name] = shell.unknowns.word(variable.texts[0], place)
    return found


def _run_script(
    shell: Interpreter,
    words: Sequence[Field],
    text: Text | None,
    outside: tuple[tuple[Word, ...], int],
) -> bool:
    """Read what ``bash -c TEXT``, ``bash FILE`` or ``bash <<EOF`` runs; False where it is not there."""
    launcher, place = outside
    arguments = [each.text for each in words[1:]]
    flags = ""
    while arguments and arguments[0].characters.startswith("-"):
        flag = arguments.pop(0).characters
        flags += flag[1:] if flag[1:2] != "-" else ""
    name = words[0].text
    script: Text | None
    if "c" in flags and arguments:
        script, name, *rest = [*arguments[:1], *(arguments[1:] or [name])]
    elif arguments and "s" not in flags:
        script, (name, *rest) = read_beside(shell, arguments[0]), arguments
    else:
        script, rest = text, arguments
    if script is None:
        return False
    outer = shell.state
    exported = {each: value for each, value in outer.variables.items() if each in outer.exported}
    shell.state = State(
        exported,
        outer.exported,
        name=name,
        arguments=tuple(rest),
        knows_arguments=True,
        folder=outer.folder,
    )
    try:
        run_text(shell, script, place, launcher)
    except Flow:
        pass
    finally:
        shell.state = outer
    return True


def run_text(shell: Interpreter, text: Text, place: int, launcher: tuple[Word, ...] = ()) -> Status:
    """Read a text as statements of the shell."""
    shell.budget.depth += 4
    if shell.budget.depth > 70:
        raise shell.unknowns.refusal(place, "scripts nest too deeply")
    if place:  # a text within the script
        shell.spend(place, characters=len(text.characters))
    source = source_of(text)
    root = parse(source, shell.unknowns)
    frame, shell.frame = (
        shell.frame,
        replace(shell.frame, source=source, launcher=shell.frame.launcher + launcher),
    )
    try:
        return shell.run(shell, root)
    finally:
        shell.frame = frame
        shell.budget.depth -= 4


def read_beside(shell: Interpreter, path: Text) -> Text | None:
    """Return the text of a file in the folder of the script; None where there is none."""
    if shell.file is None or MARKS.search(path.characters) or "\0" in path.characters:
        return None
    root = shell.file.parent.resolve()
    file = (root / _known_folder(shell) / path.characters).resolve()
    if not file.is_relative_to(root) or not file.is_file() or file.stat().st_size > MOST_BYTES:
        return None
    if len(shell.unknowns.files) > 50:
        raise shell.unknowns.refusal(path.place, "the script reads over 50 files")
    try:
        characters = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    shell.unknowns.files.append(str(file.relative_to(root)))
    return placed(characters, len(shell.unknowns.files) - 1)


def _known_folder(shell: Interpreter) -> str:
    folder = shell.state.folder.characters
    return "" if MARKS.search(folder) else folder


def placed(characters: str, number: int) -> Text:
    """Return the text of a file, with its lines.

    Raises:
        PlanError: If it has characters that no script has.
    """
    if BAD.search(characters):
        raise PlanError("the script has characters that no text has")
    characters = characters.replace("\r\n", "\n")
    places: list[int] = []
    for line, each in enumerate(characters.split("\n"), 1):
        places.extend([number * FILE_STRIDE + line] * (len(each) + 1))
    return Text(characters, tuple(places[:-1]))


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
