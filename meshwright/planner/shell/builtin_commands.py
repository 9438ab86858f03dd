"""Commands of the shell itself, assignments, and small programs whose output is known."""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.planner.shell.conditions import Condition
from meshwright.planner.shell.expansion import fields, fragments, number, word_groups
from meshwright.planner.shell.interpreter import Command, Flow, Interpreter, Status, Variable
from meshwright.planner.shell.parameters import calculated
from meshwright.planner.shell.words import (
    MARKS,
    WHITE,
    Field,
    Text,
    Unknown,
    field_of,
    joined,
    written,
)
from meshwright.simulator import PlanError

if TYPE_CHECKING:
    from tree_sitter import Node

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
ELEMENT = re.compile(r"\[.+?\]\+?=.*", re.DOTALL)
MOST_OF_A_SEQUENCE = 10_000


@dataclass(frozen=True, slots=True)
class Call:
    """A command of the shell with its arguments."""

    shell: Interpreter
    words: Sequence[Field]  # all of them, the name first
    arguments: Sequence[Text]
    text: Text | None  # what it reads, where the script says that
    place: int

    def joined(self, arguments: Sequence[Text] | None = None) -> Text:
        """Return the arguments with a space between each two."""
        parts: list[Text] = []
        for each in self.arguments if arguments is None else arguments:
            parts += [written(" ", each.place or self.place), each] if parts else [each]
        return self.shell.join(parts or [Text()], self.place)

    def plain(self) -> list[Text]:
        """Return the arguments that are no options."""
        return [each for each in self.arguments if not re.match(r"-[A-Za-z-]", each.characters)]

    def refusal(self, why: str = "is not read") -> PlanError:
        """Return the error of a command that does what is not read."""
        words = " ".join(each.text.characters for each in self.words)
        return self.shell.refusal(self.place, f"`{self.shell.unknowns.shown(words)[:40]}` {why}")


def _succeed(call: Call) -> Status:
    del call
    return True


def _exit(call: Call) -> Status:
    shell = call.shell
    if shell.output is None:
        words = tuple(shell.unknowns.word(each.text, call.place) for each in call.words)
        shell.commands.append(Command(words=words, launcher=shell.frame.launcher))
    raise Flow("exit")


def _leave(call: Call) -> Status:
    """Carry out ``return``, ``break`` or ``continue``."""
    kind = call.words[0].text.characters
    text = call.arguments[0].characters if call.arguments else "0" if kind == "return" else "1"
    mark = MARKS.search(text)
    status: Status = mark[0] if mark else text == "0"
    raise Flow(kind, int(text) if text.isdecimal() else 1, status=status)


def _unset(call: Call) -> Status:
    for each in call.plain():
        if not NAME.fullmatch(each.characters):
            raise call.refusal()
        call.shell.state.variables.pop(each.characters, None)
        call.shell.state.functions.pop(each.characters, None)
    return True


def _set(call: Call) -> Status:
    """Carry out ``set -e`` and the like; ``set -- A B`` is not read."""
    # `set --` replaces the arguments of the script.
    if any(each.characters == "--" for each in call.arguments):
        raise call.refusal()
    return True


def _shift(call: Call) -> Status:
    state = call.shell.state
    text = call.arguments[0].characters if call.arguments else "1"
    if MARKS.search(text):
        return text[0]
    number = int(text) if text.isdecimal() else 1
    # bash fails, and leaves the arguments as they are.
    if number > len(state.arguments):
        return False
    state.arguments = state.arguments[number:]
    return True


def _cd(call: Call) -> Status:
    state = call.shell.state
    target = next((each for each in call.plain() if each.characters != "--"), None)
    if call.words[0].text.characters == "popd" or target is None or target.characters == "-":
        name = call.words[0].text.characters
        state.folder = call.shell.unread(call.place, f"the folder after `{name}`", "is not known")
    else:
        state.folder = _path(call, target)
    return True


def _path(call: Call, path: Text, ending: str = "") -> Text:
    """Return a path from the working folder on, normalised; unknown where a part of it is."""
    whole = posixpath.join(call.shell.state.folder.characters, path.characters)
    mark = MARKS.search(whole)
    return written((mark[0] if mark else posixpath.normpath(whole)) + ending, call.place)


def _test(call: Call) -> Status:
    words = call.words[1:-1] if call.words[0].text.characters == "[" else call.words[1:]
    return Condition(call.shell, words, call.place, is_double=False).result()


def _let(call: Call) -> Status:
    value: int | str = 0
    for each in call.arguments:
        value = calculated(call.shell, each.characters, call.place)
    return value if isinstance(value, str) else value != 0


def _read(call: Call) -> Status:
    """Set the variables of ``read``: those of a here-string that is known, or to what is not."""
    shell, where = call.shell, call.shell.unknowns.where(call.place)
    name, flags = call.words[0].text.characters, [each.characters for each in call.arguments]
    # Without -v printf sets no variable.
    if name == "printf" and flags[:1] != ["-v"]:
        return True
    names = [each for each in flags if NAME.fullmatch(each)]
    is_array = any(re.fullmatch("-[er]*a", each) for each in flags)
    is_whole = flags[:3] == ["-r", "-d", ""]  # `read -r -d '' X <<EOF`: not the first line alone
    flags = flags[3:] if is_whole else flags
    is_plain = all(re.fullmatch("-[er]*a?|" + NAME.pattern, each) for each in flags)
    most = 0 if is_array else len(names)
    words = _words_read(call, most, is_whole=is_whole) if is_plain else None
    if name == "read" and words is not None and is_array:
        shell.state.variables[names[0]] = Variable((*words,), is_array=True)
    elif name == "read" and words is not None:
        for each, word in zip(names, [*words, *[Text()] * len(names)], strict=False):
            shell.assign(each, word, call.place)
    else:
        reason = "is read from outside the file" if name == "read" else f"is set by {name}"
        for each in names:
            cause = f"${each} at {where} {reason}"
            unknown = Unknown(f"${each}", cause, each, is_open=name != "read")
            shell.assign(each, shell.mark(call.place, unknown), call.place)
    if name != "read" or call.text is not None:
        return True
    return shell.unknowns.mark(Unknown("read", f"what `read` at {where} finds is not known"))


def _words_read(call: Call, most: int, *, is_whole: bool) -> list[Text] | None:
    """Return the words of the first line of what is read, *most* or any number; None of others."""
    separators = call.shell.state.variables.get("IFS")
    between = joined(separators.texts).characters if separators is not None else WHITE
    is_white = between == WHITE
    if call.text is None or MARKS.search(call.text.characters) or len(between) > 1 + is_white * 9:
        return None
    characters = call.text.characters if is_whole else call.text.characters.partition("\n")[0]
    at, stop = 0, len(characters)
    if is_white:
        at, stop = stop - len(characters.lstrip()), len(characters.rstrip())
    words: list[Text] = []
    for each in re.finditer(f"[{WHITE}]+" if is_white else re.escape(between) or "$.", characters):
        if at <= each.start() < stop and len(words) + 1 != most:
            words.append(call.text.part(at, each.start()))
            at = each.end()
    return [*words, call.text.part(at, stop)]


def _getopts(call: Call) -> Status:
    # Options of the script's own arguments are not parsed.
    if call.shell.state.arguments:
        raise call.refusal("is read only without arguments")
    return False


def _refused(call: Call) -> Status:
    raise call.refusal()


def _echo(call: Call) -> Text | None:
    arguments = list(call.arguments)
    ending = "\n"
    while arguments and re.fullmatch("-[neE]+", arguments[0].characters):
        if "e" in arguments[0].characters and "\\" in call.joined().characters:
            return None
        ending = "" if "n" in arguments[0].characters else ending
        arguments.pop(0)
    return call.shell.join([call.joined(arguments), written(ending, call.place)], call.place)


def _path_part(call: Call) -> Text | None:
    """Return the output of ``dirname`` or ``basename``."""
    if not 1 <= len(call.arguments) <= 2:
        return None
    path, *ending = [each.characters for each in call.arguments]
    mark, name = MARKS.search(path), call.words[0].text.characters
    change = posixpath.basename if name == "basename" else posixpath.dirname
    text = mark[0] if mark else change(path.rstrip("/")) or "."
    return written(text.removesuffix("".join(ending)) + "\n", call.place)


def _realpath(call: Call) -> Text | None:
    paths = call.plain()
    return _path(call, paths[0], "\n") if len(paths) == 1 else None


def _pwd(call: Call) -> Text | None:
    return call.shell.join([call.shell.state.folder, written("\n", call.place)], call.place)


def _seq(call: Call) -> Text | None:
    texts = [each.characters for each in call.arguments]
    if len(texts) not in {1, 2} or not all(re.fullmatch(r"-?[0-9]{1,9}", each) for each in texts):
        return None
    first, last = [1, *map(int, texts)][-2:]
    numbers = range(first, last + 1)[:MOST_OF_A_SEQUENCE]
    return written("\n".join(map(str, numbers)), call.place)


def _no_output(call: Call) -> Text | None:
    """Return nothing: what the command prints is not known."""
    del call
    return None


PRINTING: Mapping[str, Callable[[Call], Text | None]] = {
    "printf": _no_output,
    "cat": lambda call: None if call.arguments else call.text,
    **dict.fromkeys(("dirname", "basename"), _path_part),
    **dict.fromkeys(("realpath", "readlink"), _realpath),
    "echo": _echo,
    "pwd": _pwd,
    "seq": _seq,
}
BUILTINS: Mapping[str, Callable[[Call], Status]] = {
    # None of these changes the words of a command.
    **dict.fromkeys((":", "true", "trap", "wait", "umask", "ulimit", "shopt", "alias"), _succeed),
    **dict.fromkeys(("return", "break", "continue"), _leave),
    **dict.fromkeys(("cd", "pushd", "popd"), _cd),
    **dict.fromkeys(("read", "mapfile", "readarray", "printf"), _read),
    **dict.fromkeys(("test", "["), _test),
    **dict.fromkeys(("coproc", "export", "declare", "typeset", "local", "readonly"), _refused),
    "let": _let,
    "false": lambda call: not _succeed(call),
    "exit": _exit,
    "unset": _unset,
    "set": _set,
    "shift": _shift,
    "getopts": _getopts,
}


def assign(shell: Interpreter, node: "Node", stop: int | None = None) -> str:
    """Carry out an assignment; return the name of the variable.

    It ends before *stop* where the grammar ends it too early.
    """
    place, name = shell.place(node), shell.text(node.children[0])
    operator = next(each for each in node.children if each.type in {"=", "+="})
    if not NAME.fullmatch(name):
        return _assign_element(shell, node, operator)
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
        values = before.texts[:1] if before is not None else (shell.unset(name, place),)
        text = shell.join([*values, text], place)
    shell.assign(name, text, place)
    return name


def _assign_element(shell: Interpreter, node: "Node", operator: "Node") -> str:
    """Carry out ``A[1]=x``, of an element that is there or the next one."""
    place, (name, bracket, index) = shell.place(node), shell.text(node.children[0]).partition("[")
    start = node.start_byte + len(name + bracket)
    at = number(shell, node, start, start + len(index) - 1)
    texts = [*shell.state.variables.get(name, Variable(())).texts]
    if operator.type == "+=" or isinstance(at, str) or not 0 <= at <= len(texts):
        raise shell.refusal(place, f"the assignment to the element {name}[{index[:40]} is not read")
    parts = fragments(shell, node, operator.end_byte, node.end_byte, "word")
    shell.spend(place, steps=1 + len(texts) // 10)
    texts[at : at + 1] = [field_of(parts).text]
    shell.state.variables[name] = Variable((*texts,), is_array=True)
    return name


def _elements(shell: Interpreter, node: "Node") -> list[Text]:
    """Return the elements of ``(a "b c" $D)``."""
    elements: list[Text] = []
    for group in word_groups(
        shell, [each for each in node.named_children if each.type != "comment"]
    ):
        start, stop = group[0].start_byte, group[-1].end_byte
        if ELEMENT.fullmatch(shell.frame.source.characters[start:stop]):
            raise shell.refusal(shell.place(group[0]), "an array with keys is not read")
        elements += [each.text for each in fields(shell, node, group)]
    shell.spend(shell.place(node), steps=1 + len(elements) // 10)
    return elements


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
