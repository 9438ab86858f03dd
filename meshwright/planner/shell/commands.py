"""Commands of a script: what they read, functions, scripts within, and those that are noted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.planner.shell.builtin_commands import BUILTINS, PRINTING, Call, assign
from meshwright.planner.shell.expansion import (
    MOST_BYTES,
    fields,
    fragments,
    parse,
    single,
    text_of_file,
    word_groups,
)
from meshwright.planner.shell.interpreter import (
    Command,
    Flow,
    Frame,
    Function,
    Interpreter,
    State,
    Status,
)
from meshwright.planner.shell.words import MARKS, Field, Text, Unknown, Word, field_of
from meshwright.planner.shell.wrappers import environment_of, wrapped_at

if TYPE_CHECKING:
    from tree_sitter import Node

SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "zsh", "dash"})
# What a script asks before it decides: `grep -q x file && ...`.
QUESTIONS = {
    "grep", "egrep", "fgrep", "command", "which", "type", "hash", "diff", "cmp", "pgrep", "pidof",
    "nvidia-smi", "rocm-smi", "id", "getent", "ping", "nc", "mountpoint", "kill", "ls", "stat",
    "scontrol", "lspci", "lsmod", "nvcc",
}  # fmt: skip
# An activated environment sets no variable of the script.
ENVIRONMENTS = ("activate", "bashrc", "profile", "conda")
STATEMENTS = frozenset(
    {"pipeline", "list", "command", "redirected_statement", "compound_statement", "subshell"}
)


@dataclass(slots=True)
class Redirections:
    """Redirections of a command: its input, and whether its output is seen."""

    text: Text | None = None  # what it reads, where that stands in the script
    is_quiet: bool = False  # what it prints goes elsewhere
    words: list["Node"] = field(default_factory=list)  # arguments behind a redirection


def run_command(shell: Interpreter, node: "Node") -> Status:
    """Run a command, with or without redirections."""
    body = node if node.type != "redirected_statement" else node.child_by_field_name("body")
    redirects = [] if body == node else [each for each in node.children if each != body]
    if body is not None and body.type in {"command", "unset_command"}:
        return _run_simple(shell, body, redirects)
    output, redirections = shell.output, _redirections(shell, redirects)
    shell.output = [] if redirections.is_quiet and output is not None else output
    status = shell.run(shell, body) if body is not None else True
    shell.output = output
    return status


def _redirections(shell: Interpreter, nodes: Sequence["Node"]) -> Redirections:
    redirections = Redirections()
    waiting = list(nodes)
    for each in waiting:
        if each.type == "herestring_redirect":
            redirections.text = single(shell, each.children[-1]).text
        elif each.type == "file_redirect":
            descriptor = each.child_by_field_name("descriptor")
            is_output = any(inner.type.startswith((">", "&>")) for inner in each.children)
            is_first = descriptor is None or shell.text(descriptor) == "1"
            redirections.is_quiet = redirections.is_quiet or (is_output and is_first)
            groups = word_groups(shell, each.children_by_field_name("destination"))
            redirections.words += [inner for group in groups[1:] for inner in group]
        elif each.type == "heredoc_redirect":
            redirections.text = _here_document(shell, each)
            for inner in each.named_children:
                if inner.type in {"file_redirect", "herestring_redirect"}:
                    waiting.append(inner)
                elif inner.type in STATEMENTS:
                    raise shell.refusal(shell.place(inner), "a command behind `<<` is not read")
                elif not inner.type.startswith(("heredoc", "file_desc")):
                    redirections.words.append(inner)
    return redirections


def _here_document(shell: Interpreter, node: "Node") -> Text:
    """Return the lines of ``<<EOF``, expanded if no part of EOF is quoted."""
    parts = {each.type: each for each in node.children}
    start, body, end = (parts.get(f"heredoc_{each}") for each in ("start", "body", "end"))
    if start is None or body is None or end is None or "<<-" in parts:
        return shell.unread(shell.place(node), "this here-document")
    last = max(each.end_byte for each in node.children if each.end_byte <= body.start_byte)
    first = shell.frame.source.characters.find("\n", last - 1) + 1
    if set(shell.text(start)) & set("'\"\\"):
        return shell.frame.source.part(first, end.start_byte)
    return field_of(fragments(shell, body, first, end.start_byte, "here")).text


def _run_simple(shell: Interpreter, node: "Node", redirects: Sequence["Node"]) -> Status:
    """Run a command that has words, or only assignments."""
    children = [each for each in node.children if each.type != "comment"]
    inner = [each for each in children if each.type.endswith("_redirect")]
    prefix = [each for each in children if each.type == "variable_assignment"]
    parts = [each for each in children if each not in inner and each not in prefix]
    last: int | None = None
    if prefix and parts and prefix[-1].end_byte == parts[0].start_byte:
        group = word_groups(shell, parts)[0]  # `A=$B/$C/d` is cut at the second dollar
        parts, last = parts[len(group) :], group[-1].end_byte
    end = last or (prefix[-1].end_byte if prefix else 0)
    if prefix and (not parts or _is_divided(shell, end, parts[0].start_byte)):
        for each in prefix:  # the grammar joins such a line to the next one
            assign(shell, each, last if each is prefix[-1] else None)
        prefix, last = [], None
    if last is not None or any(
        _is_divided(shell, before.end_byte, each.start_byte) for before, each in pairwise(parts)
    ):
        raise shell.refusal(shell.place(node), "where this command begins is not read")
    words = fields(shell, node, parts)
    redirections = _redirections(shell, [*inner, *redirects])
    for each in redirections.words:
        words += fields(shell, each.parent or node, [each])
    return _run_words(shell, words, prefix, redirections, shell.place(node)) if words else True


def _is_divided(shell: Interpreter, start: int, stop: int) -> bool:
    return "\n" in shell.frame.source.characters[start:stop].replace("\\\n", "")


def _run_words(
    shell: Interpreter,
    words: Sequence[Field],
    prefix: Sequence["Node"],
    given: Redirections,
    place: int,
) -> Status:
    """Run a command with the variables that are assigned before it."""
    before, exported, output = dict(shell.state.variables), shell.state.exported, shell.output
    names = [assign(shell, each) for each in prefix]
    # `A=1 python x` exports A to this command alone.
    shell.state.exported |= {*names}
    shell.output = [] if given.is_quiet and output is not None else output
    try:
        return run_words(shell, words, given.text, place)
    finally:
        shell.output = output
        if names:
            shell.state.exported = exported
            shell.state.restore({name: before.get(name) for name in names})


def run_words(shell: Interpreter, words: Sequence[Field], text: Text | None, place: int) -> Status:
    """Run a command of expanded words; *text* is what it reads."""
    name = words[0].text.characters
    function = shell.state.functions.get(name)
    call = Call(shell, words, [each.text for each in words[1:]], text, place)
    if function is not None:
        return _call(call, function)
    # Output counts only within `$(`.
    if name in PRINTING and shell.output is not None:
        printed = PRINTING[name](call)
        shell.output += [] if printed is None else [printed]
        return _external(call, words) if printed is None else True
    builtin = RUNNING.get(name) or BUILTINS.get(name)
    return builtin(call) if builtin is not None else _external(call, words)


def _call(call: Call, function: Function) -> Status:
    """Run a function; its local variables are those of the functions that it calls, too."""
    shell = call.shell
    frame, outer = shell.frame, shell.state
    saved = outer.arguments, outer.knows_arguments, outer.local
    shell.frame = Frame(function.source, frame.launcher, is_function=True)
    outer.arguments, outer.knows_arguments, outer.local = tuple(call.arguments), True, {}
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
                shell.merge([shell.state, state], cause)
        shell.frame = frame
        shell.state.restore(shell.state.local)
        shell.state.arguments, shell.state.knows_arguments, shell.state.local = saved
    return status


def _external(call: Call, fields_: Sequence[Field]) -> Status:
    """Run a command that is no part of the shell: it is noted, or read if it is a script."""
    shell, place = call.shell, call.place
    words = tuple(
        shell.unknowns.word(each.text, place, is_quoted=each.is_quoted) for each in fields_
    )
    at = wrapped_at(words)
    name = words[at].text if at < len(words) else ""
    # Each command takes a copy of the variables that it sees.
    shell.spend(place, steps=1 + len(shell.state.exported) // 4)
    if name in SHELLS and _run_script(call, [each.text for each in fields_[at:]], words[:at]):
        return True
    variables = {name: shell.state.variables.get(name) for name in sorted(shell.state.exported)}
    environment = {
        name: shell.unknowns.word(variable.texts[0], place)
        for name, variable in variables.items()
        if variable is not None and not variable.is_array
    }
    environment |= environment_of(words[:at])
    shell.commands.append(
        Command(words=words, environment=environment, launcher=shell.frame.launcher)
    )
    where = shell.unknowns.where(place)
    shown = " ".join(each.text for each in words[:3])[:40]
    cause = f"whether `{shown}` at {where} succeeds is not known"
    asks = words[0].text in QUESTIONS or [each.text for each in words[1:2]] == ["-c"]
    return shell.unknowns.mark(Unknown(shown, cause, is_usual=not asks))


def _run_script(call: Call, arguments: list[Text], launcher: tuple[Word, ...]) -> bool:
    """Read what ``bash -c``, ``bash FILE`` or ``bash <<EOF`` runs; False if that is not there."""
    shell, saved_state, flags = call.shell, call.shell.state, ""
    name = arguments.pop(0)
    while arguments and arguments[0].characters.startswith("-"):
        flag = arguments.pop(0).characters
        flags += flag[1:] if flag[1:2] != "-" else ""
    script = call.text
    if "c" in flags and arguments:
        script, name, *arguments = [*arguments[:1], *(arguments[1:] or [name])]
    elif arguments and "s" not in flags:
        name, *arguments = arguments
        script = _read_beside(shell, name)
    if script is None:
        return False
    # A new shell sees exported variables alone.
    exported = {
        each: value for each, value in saved_state.variables.items() if each in saved_state.exported
    }
    shell.state = State(exported, saved_state.exported, name=name, folder=saved_state.folder)
    shell.state.arguments, shell.state.knows_arguments = tuple(arguments), True
    try:
        run_text(shell, script, call.place, launcher)
    except Flow:
        pass
    finally:
        shell.state = saved_state
    return True


def run_text(shell: Interpreter, text: Text, place: int, launcher: tuple[Word, ...] = ()) -> Status:
    """Read a text as statements of the shell."""
    if place:  # a text within the script
        shell.spend(place, characters=len(text.characters))
    root, frame = parse(text, shell.unknowns), shell.frame
    shell.frame = replace(frame, source=text, launcher=frame.launcher + launcher)
    try:
        return shell.run(shell, root)
    finally:
        shell.frame = frame


def _read_beside(shell: Interpreter, path: Text) -> Text | None:
    """Return the text of a file in the folder of the script; None where there is none."""
    if shell.file is None or MARKS.search(path.characters) or "\0" in path.characters:
        return None
    root, folder = shell.file.parent.resolve(), shell.state.folder.characters
    file = (root / ("" if MARKS.search(folder) else folder) / path.characters).resolve()
    if not file.is_relative_to(root) or not file.is_file() or file.stat().st_size > MOST_BYTES:
        return None
    # Files that source each other would be read for ever.
    if len(shell.unknowns.files) > 50:
        raise shell.refusal(path.place, "the script reads over 50 files")
    try:
        characters = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    shell.unknowns.files.append(str(file.relative_to(root)))
    return text_of_file(characters, len(shell.unknowns.files) - 1)


def _source(call: Call) -> Status:
    """Read a file beside the script; one that is not there may set any variable."""
    shell, state = call.shell, call.shell.state
    if not call.arguments:
        return False
    text = _read_beside(shell, call.arguments[0])
    if text is None:
        shown = shell.unknowns.shown(call.arguments[0].characters)
        if not any(each in shown for each in ENVIRONMENTS):
            state.missing = state.missing or shown[:60]
        return True
    if call.arguments[1:]:
        raise call.refusal("with arguments is not read")
    try:
        return run_text(shell, text, call.place)
    except Flow as flow:
        if flow.kind != "return":
            raise
        return flow.status


def _eval(call: Call) -> Status:
    return run_text(call.shell, call.joined(), call.place) if call.arguments else True


def _exec(call: Call) -> Status:
    if call.arguments:
        _external(call, call.words[1:])
        raise Flow("exit")
    return True


def _command(call: Call) -> Status:
    if not call.arguments or call.arguments[0].characters.startswith("-"):
        return _external(call, call.words)
    return run_words(call.shell, call.words[1:], call.text, call.place)


RUNNING = {"source": _source, ".": _source, "eval": _eval, "exec": _exec, "command": _command}
