"""Commands of the shell itself, and those small programs whose output is known from their words."""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.shell.language import (
    MARKS,
    Field,
    Fragment,
    Kind,
    Text,
    Unknown,
    Variable,
    split,
    written,
)
from meshwright.planner.shell.running.assignments import declare_words
from meshwright.planner.shell.running.conditions import Condition
from meshwright.planner.shell.running.expansion import separators
from meshwright.planner.shell.running.interpreter import Command, Flow, Interpreter, Status
from meshwright.planner.shell.running.parameters import calculated

MOST_OF_A_SEQUENCE = 10_000
NAME = re.compile(r"[A-Za-z_]\w*")
LINE, WHOLE = "line", "whole"  # up to where `read` reads
FORMAT = re.compile(r"%(%|s|0?[0-9]*[di])")


@dataclass(frozen=True, slots=True)
class Call:
    """A command of the shell with its arguments.

    Args:
        shell: The script.
        words: All words, the name first.
        arguments: The texts after the name.
        text: What it reads, where the script says that.
        place: Where it stands.
    """

    shell: Interpreter
    words: Sequence[Field]
    arguments: Sequence[Text]
    text: Text | None
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

    def unknown(self, name: str, cause: str) -> Text:
        """Return the text of a variable that this command sets to what is not known."""
        where = self.shell.unknowns.where(self.place)
        return self.shell.mark(self.place, Unknown(f"${name}", f"${name} at {where} {cause}", name))


def _succeed(call: Call) -> Status:
    del call
    return True


def _exit(call: Call) -> Status:
    shell = call.shell
    if shell.output is None:
        words = tuple(shell.unknowns.word(each.text, call.place) for each in call.words)
        shell.commands.append(Command(words=words, environment={}, launcher=shell.frame.launcher))
    raise Flow("exit")


def _leave(call: Call) -> Status:
    kind, text = call.words[0].text.characters, "1"
    if call.arguments:
        text = call.arguments[0].characters
    elif kind == "return":
        text = "0"
    mark = MARKS.search(text)
    status: Status = mark[0] if mark else text == "0"
    raise Flow(kind, int(text) if text.isdecimal() else 1, status=status)


def _declare(call: Call) -> Status:
    flags = "".join(
        each.characters[1:] for each in call.arguments if each.characters.startswith("-")
    )
    declare_words(call.shell, call.words[0].text.characters, flags, call.plain())
    return True


def _unset(call: Call) -> Status:
    for each in call.plain():
        call.shell.state.variables.pop(each.characters, None)
        call.shell.state.functions.pop(each.characters, None)
    return True


def _set(call: Call) -> Status:
    names = [each.characters for each in call.arguments]
    if "--" in names:
        state = call.shell.state
        state.arguments = tuple(call.arguments[names.index("--") + 1 :])
        state.knows_arguments = True
    return True


def _shift(call: Call) -> Status:
    state = call.shell.state
    text = call.arguments[0].characters if call.arguments else "1"
    if MARKS.search(text):
        return text[0]
    number = int(text) if text.isdecimal() else 1
    if number > len(state.arguments):
        return False
    state.arguments = state.arguments[number:]
    return True


def _cd(call: Call) -> Status:
    state = call.shell.state
    target = next((each for each in call.plain() if each.characters != "--"), None)
    if call.words[0].text.characters == "popd" or target is None or target.characters == "-":
        state.folder = call.unknown("PWD", "is not followed after this")
    else:
        state.folder = _path(call, target)
    return True


def _path(call: Call, path: Text) -> Text:
    unknown = MARKS.search(path.characters + call.shell.state.folder.characters)
    if path.characters.startswith("/") and not MARKS.search(path.characters):
        unknown = None
    if unknown is not None:
        return written(unknown[0], call.place)
    whole = posixpath.join(call.shell.state.folder.characters, path.characters)
    return written(posixpath.normpath(whole), call.place)


def _let(call: Call) -> Status:
    value: int | str = 0
    for each in call.arguments:
        value = calculated(call.shell, each.characters, call.place)
    return value if isinstance(value, str) else value != 0


def _test(call: Call) -> Status:
    words = list(call.words[1:])
    if call.words[0].text.characters == "[":
        words = words[:-1]
    return Condition(call.shell, words, call.place, is_double=False).result()


def _read(call: Call) -> Status:
    """Set the variables of ``read``: from a here-string where one is known."""
    shell = call.shell
    names, array, end = _names_of_read(call)
    if call.text is None or MARKS.search(call.text.characters) or end is None:
        is_known = False
    elif end == WHOLE and len(names) == 1 and not array:
        shell.assign(names[0], _stripped(call.text), call.place)
        is_known = True
    else:
        is_known = end != WHOLE and _read_line(call, names, array)
    if not is_known:
        for name in [*names, *([array] if array else [])]:
            shell.assign(name, call.unknown(name, "is read from outside the file"), call.place)
    if call.text is not None:
        return True
    where = shell.unknowns.where(call.place)
    return shell.unknowns.mark(Unknown("read", f"what `read` at {where} finds is not known"))


def _stripped(text: Text) -> Text:
    """Return a text without white space around it, as ``read`` leaves it out of one variable."""
    characters = text.characters
    start = len(characters) - len(characters.lstrip())
    return text.part(start, len(characters.rstrip()))


def _names_of_read(call: Call) -> tuple[list[str], str, str | None]:
    """Return the variables of ``read``, the array of its ``-a`` and where the text ends.

    That is the end of a line, or with ``-d ''`` of all; None where another option says it.
    """
    names, array = [], ""
    end: str | None = LINE
    waiting = [each.characters for each in call.arguments]
    while waiting:
        each = waiting.pop(0)
        if not each.startswith("-"):
            names.append(each)
        elif each[-1] in "adinNptu" and waiting:
            value = waiting.pop(0)
            array = value if each[-1] == "a" else array
            if each[-1] in "dnNtu":
                end = WHOLE if each[-1] == "d" and not value else None
    return [each for each in names if NAME.fullmatch(each)], array, end


def _read_line(call: Call, names: Sequence[str], array: str) -> bool:
    """Set variables from the first line of a text; False where it is not known how."""
    shell, text = call.shell, call.text or Text()
    line = text.part(0, (text.characters + "\n").index("\n"))
    words = [each.text for each in split([Fragment(line, Kind.SPLIT)], separators(shell))]
    if array:
        shell.state.variables[array] = Variable(dict(enumerate(words)), is_array=True)
        return True
    if len(words) > len(names) != 1:
        return False
    if len(names) == 1:
        words = [written(line.characters.strip(), line.place)]
    for name, word in zip(names, [*words, *[Text()] * len(names)], strict=False):
        shell.assign(name, word, call.place)
    return True


def _mapfile(call: Call) -> Status:
    name = call.plain()[-1].characters if call.plain() else "MAPFILE"
    if NAME.fullmatch(name):
        cause = f"${name} at {call.shell.unknowns.where(call.place)} is read from outside the file"
        mark = call.shell.mark(call.place, Unknown(f"${name}", cause, name, is_open=True))
        call.shell.state.variables[name] = Variable({0: mark}, is_array=True)
    return True


def _getopts(call: Call) -> Status:
    state = call.shell.state
    if not state.arguments:
        return False
    raise call.shell.unknowns.refusal(call.place, "`getopts` is read only without arguments")


def _printf(call: Call) -> Text | None:
    arguments = list(call.arguments)
    if not arguments or arguments[0].characters.startswith("-"):
        return None
    text = arguments.pop(0).characters.replace("\\n", "\n").replace("\\t", "\t")
    if len(FORMAT.findall(text)) != len(arguments) or re.search(r"\\", text):
        return None
    done, at = "", 0
    for found in FORMAT.finditer(text):
        value = "" if found[1] == "%" else arguments.pop(0).characters
        if found[1] not in {"%", "s"}:
            if not re.fullmatch(r"-?[0-9]{1,18}", value) or len(found[1]) > 4:
                return None
            value = f"%{found[1]}" % int(value)
        done += text[at : found.start()] + ("%" if found[1] == "%" else value)
        at = found.end()
    return written(done + text[at:], call.place)


def _printf_command(call: Call) -> Status:
    if len(call.arguments) > 2 and call.arguments[0].characters == "-v":
        name = call.arguments[1].characters
        rest = Call(call.shell, call.words[2:], call.arguments[2:], None, call.place)
        text = _printf(rest)
        call.shell.assign(name, text or call.unknown(name, "is formatted by printf"), call.place)
    return True


def _echo(call: Call) -> Text | None:
    arguments = list(call.arguments)
    ending = "\n"
    while arguments and re.fullmatch("-[neE]+", arguments[0].characters):
        if "e" in arguments[0].characters and "\\" in call.joined().characters:
            return None
        ending = "" if "n" in arguments[0].characters else ending
        arguments.pop(0)
    return call.shell.join([call.joined(arguments), written(ending, call.place)], call.place)


def _line(change: Callable[[Call], Text | None]) -> Callable[[Call], Text | None]:
    def print_line(call: Call) -> Text | None:
        text = change(call)
        if text is None:
            return None
        return call.shell.join([text, written("\n", call.place)], call.place)

    return print_line


def _pathname(change: Callable[[str], str]) -> Callable[[Call], Text | None]:
    def changed(call: Call) -> Text | None:
        if not call.plain():
            return None
        path = call.plain()[0]
        mark = MARKS.search(path.characters)
        return written(mark[0] if mark else change(path.characters), call.place)

    return changed


def _basename(call: Call) -> Text | None:
    if len(call.arguments) not in {1, 2}:
        return None
    name, *ending = [each.characters for each in call.arguments]
    mark = MARKS.search(name)
    text = mark[0] if mark else posixpath.basename(name.rstrip("/"))
    return written(text.removesuffix(ending[0]) if ending else text, call.place)


def _realpath(call: Call) -> Text | None:
    return _path(call, call.plain()[0]) if len(call.plain()) == 1 else None


def _cat(call: Call) -> Text | None:
    return call.text if not call.arguments else None


def _seq(call: Call) -> Text | None:
    texts = [each.characters for each in call.arguments]
    if not 1 <= len(texts) <= 3 or not all(re.fullmatch(r"-?[0-9]{1,9}", each) for each in texts):
        return None
    numbers = [int(each) for each in texts]
    first, step, last = {1: [1, 1, *numbers], 2: [numbers[0], 1, numbers[-1]], 3: numbers}[
        len(numbers)
    ]
    if step == 0:
        return None
    found = range(first, last + (1 if step > 0 else -1), step)[:MOST_OF_A_SEQUENCE]
    return written("\n".join(map(str, found)), call.place)


PRINTING: Mapping[str, Callable[[Call], Text | None]] = {
    "echo": _echo,
    "printf": _printf,
    "pwd": _line(lambda call: call.shell.state.folder),
    "dirname": _line(_pathname(lambda path: posixpath.dirname(path.rstrip("/")) or ".")),
    "basename": _line(_basename),
    "realpath": _line(_realpath),
    "readlink": _line(_realpath),
    "cat": _cat,
    "seq": _line(_seq),
}
BUILTINS: Mapping[str, Callable[[Call], Status]] = {
    ":": _succeed,
    "true": _succeed,
    "false": lambda call: not _succeed(call),
    "trap": _succeed,
    "wait": _succeed,
    "umask": _succeed,
    "ulimit": _succeed,
    "shopt": _succeed,
    "alias": _succeed,
    "exit": _exit,
    "return": _leave,
    "break": _leave,
    "continue": _leave,
    "export": _declare,
    "declare": _declare,
    "typeset": _declare,
    "local": _declare,
    "readonly": _declare,
    "unset": _unset,
    "set": _set,
    "shift": _shift,
    "cd": _cd,
    "pushd": _cd,
    "popd": _cd,
    "let": _let,
    "test": _test,
    "[": _test,
    "read": _read,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "getopts": _getopts,
    "printf": _printf_command,
}
