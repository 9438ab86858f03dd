"""Parameters: variables, elements of arrays, arguments, and the operators of ``${...}``."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshwright.planner.shell.language import (
    MARKS,
    WHITE,
    Fragment,
    Key,
    Kind,
    Text,
    Unknown,
    Variable,
    escaped,
    evaluate,
    field_of,
    is_match,
    joined,
    pieces_of,
    written,
)
from meshwright.planner.shell.running.interpreter import Interpreter
from meshwright.simulator import PlanError

HEAD = re.compile(rb"([!#]?)([A-Za-z_]\w*|[0-9]+|[@*?$!#-])")
OPERATOR = re.compile(rb":?[-=?+]|##?|%%?|//|/[#%]?|\^\^?|,,?|:|@")
CASES: Mapping[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


class Parameter(NamedTuple):
    """What stands between ``${`` and an operator.

    Args:
        prefix: ``#`` a length or a count, ``!`` the variable that the value names, or nothing.
        name: Of the variable, or the number of an argument.
        key: Of an element; ``@`` or ``*`` all; None where none is written.
    """

    prefix: str
    name: str
    key: Key | None = None

    @property
    def is_all(self) -> bool:
        """Whether it stands for several values."""
        return self.name in {"@", "*"} or self.key in {"@", "*"}


def parameter_at(
    data: bytes,
) -> tuple[str, str, tuple[int, int] | None, str, int] | None:
    """Return prefix, name, the bytes of the index, the operator, and where the word after it is."""
    if re.fullmatch(rb"[#@*?$!-]", data):
        return "", data.decode(), None, "", 1
    head = HEAD.match(data)
    if head is None:
        return None
    at, index = head.end(), None
    if data[at : at + 1] == b"[":
        depth, start = 0, at
        while at < len(data):
            depth += {b"[": 1, b"]": -1}.get(data[at : at + 1], 0)
            at += 1
            if depth == 0:
                break
        index = (start + 1, at - 1)
    rest = OPERATOR.match(data, at)
    if rest is None and at < len(data):
        return None
    operator = rest[0].decode() if rest else ""
    return head[1].decode(), head[2].decode(), index, operator, rest.end() if rest else at


def values(shell: Interpreter, parameter: Parameter, place: int) -> tuple[Text, ...] | None:
    """Return the values of a parameter; None of one that nothing sets."""
    name, state = parameter.name, shell.state
    if name in {"@", "*"}:
        return state.arguments
    if name == "#":
        first = shell.unknowns.first("".join(each.characters for each in state.arguments))
        if first is not None and first.shown == "$@":
            return (shell.mark(place, first),)
        return (written(str(len(state.arguments)), place),)
    if name.isdigit():
        return _argument(shell, int(name))
    if name in {"PWD", "BASH_SOURCE"} and name not in state.variables:
        return (state.folder if name == "PWD" else state.name,)
    return _variable(shell, parameter, place)


def _variable(shell: Interpreter, parameter: Parameter, place: int) -> tuple[Text, ...] | None:
    name = parameter.name
    variable = shell.state.variables.get(name)
    if variable is None:
        # What nothing sets here, but a file that is not there may, is no reason for a default.
        mark = shell.unset(name, place)
        return None if shell.unknowns.meaning(mark.characters).is_unset else (mark,)
    if name in shell.defines and any(not each.place for each in variable.texts):
        shell.used.add(name)
    if parameter.is_all:
        texts = variable.texts
        if not variable.is_array and name in shell.defines and not texts[0].place:
            # No array can be given: its words are.
            return tuple(written(each, 0) for each in texts[0].characters.split())
        return texts
    return (_element(variable, parameter.key, place),)


def _argument(shell: Interpreter, number: int) -> tuple[Text, ...] | None:
    if number == 0:
        return (shell.state.name,)
    arguments = shell.state.arguments
    if str(number) in shell.defines:
        shell.used.add(str(number))
    if number <= len(arguments):
        return (arguments[number - 1],)
    return (Text(),) if shell.state.knows_arguments else None


def _element(variable: Variable, key: Key | None, place: int) -> Text:
    if isinstance(key, str) and MARKS.search(key):
        return written(MARKS.findall(key)[0], place)
    key = 0 if key is None else key
    if isinstance(key, int) and key < 0 and variable.elements:
        key += max(each for each in variable.elements if isinstance(each, int)) + 1
    if key in variable.elements:
        return variable.elements[key]
    unknown = next((each for each in variable.texts if MARKS.search(each.characters)), None)
    is_open = unknown is not None and variable.is_array
    return unknown if is_open and unknown is not None else Text()


def element(shell: Interpreter, name: str, place: int) -> Text:
    """Return the value of a variable of arithmetic, or of an element as ``A[1]``."""
    name, _, index = name.rstrip("]").partition("[")
    key: Key | None = None
    if index:
        key = int(index) if index.isdigit() else index
    found = values(shell, Parameter("", name, key), place)
    return shell.unset(name, place) if found is None else joined(found or (Text(),))


def set_element(shell: Interpreter, name: str, text: Text, place: int) -> None:
    """Assign to a variable of arithmetic, or to an element as ``A[1]``."""
    name, _, index = name.rstrip("]").partition("[")
    key: Key | None = None
    if index:
        key = int(index) if index.isdigit() else index
    shell.assign(name, text, place, key=key)


def calculated(shell: Interpreter, characters: str, place: int) -> int | str:
    """Return the value of an expression, or the mark of what it depends on."""
    try:
        return evaluate(
            characters.replace("\\\n", "").replace('"', ""),
            lambda name: element(shell, name, place).characters,
            lambda name, value: set_element(shell, name, written(value, place), place),
        )
    except PlanError as error:
        raise shell.unknowns.refusal(place, str(error)) from None


def operated(
    shell: Interpreter,
    parameter: Parameter,
    operator: str,
    word: Callable[[str], list[Fragment]] | None,
    place: int,
    kind: Kind,
) -> list[Fragment]:
    """Return what a parameter with an operator stands for.

    Args:
        shell: The script.
        parameter: What stands before the operator.
        operator: ``:-`` for instance; empty where there is none.
        word: Expands what stands after it, in a mode.
        place: Where it was written.
        kind: The quoting of the whole.
    """
    found = _prefixed(shell, parameter, place)
    if operator in {"-", ":-", "=", ":=", "?", ":?", "+", ":+"} and word is not None:
        fallback = _conditional(shell, parameter, operator, found, word)
        if fallback is not None:
            return fallback or [Fragment(Text(), kind)]
    if found is None:
        found = (shell.unset(parameter.name, place),)
    if word is not None and operator in {"#", "##", "%", "%%", "/", "//", "/#", "/%", ":", "@"}:
        pattern = _pattern(word("raw" if operator == ":" else "word"), operator)
        if operator == ":" and parameter.is_all:
            found = _slice_of_list(shell, parameter, found, pattern, place)
        else:
            found = tuple(_changed(shell, each, operator, pattern, place) for each in found)
    elif operator in CASES:
        found = tuple(Text(CASES[operator](each.characters), each.places) for each in found)
    if not parameter.is_all or parameter.prefix == "#":
        return [Fragment(each, kind) for each in found]
    if "*" in (parameter.name, parameter.key) and kind is Kind.QUOTED:
        separator = written(_first_separator(shell), place)
        parts = [part for each in found for part in (separator, each)][1:]
        return [Fragment(shell.join(parts, place) if parts else Text(), kind)]
    return [Fragment(each, kind, begins=number > 0) for number, each in enumerate(found)]


def _pattern(fragments: list[Fragment], operator: str) -> str:
    if operator[0] != "/":
        return field_of(fragments).pattern
    found = ""
    for each in fragments:
        characters = each.text.characters
        if each.kind is Kind.QUOTED:
            characters = escaped(characters)
        # Only a slash that stands there itself divides the pattern from what replaces it.
        found += characters if each.kind is Kind.LITERAL else characters.replace("/", "\\/")
    return found


def _first_separator(shell: Interpreter) -> str:
    variable = shell.state.variables.get("IFS")
    return (variable.texts[0].characters if variable is not None else WHITE)[:1]


def _prefixed(shell: Interpreter, parameter: Parameter, place: int) -> tuple[Text, ...] | None:
    name = parameter.name
    if parameter.prefix == "!" and parameter.is_all:
        variable = shell.state.variables.get(name)
        keys = variable.elements if variable is not None else ()
        return tuple(written(str(each), place) for each in keys)
    found = values(shell, parameter, place)
    if parameter.prefix == "!":
        target = found[0].characters if found else ""
        if not re.fullmatch(r"\w+", target):
            cause = f"${{!{name}}} at {shell.unknowns.where(place)} names no variable known here"
            return (shell.mark(place, Unknown(f"${{!{name}}}", cause)),)
        return values(shell, Parameter("", target), place)
    if parameter.prefix == "#" and found is not None:
        first = shell.unknowns.first("".join(each.characters for each in found))
        is_counted = parameter.is_all and not (first is not None and first.is_open)
        if first is not None and not is_counted:
            return (shell.mark(place, first),)
        count = len(found) if parameter.is_all else len(found[0].characters)
        return (written(str(count), place),)
    return found


def _conditional(
    shell: Interpreter,
    parameter: Parameter,
    operator: str,
    found: tuple[Text, ...] | None,
    word: Callable[[str], list[Fragment]],
) -> list[Fragment] | None:
    """Return the word after an operator where it counts; None where the value does."""
    characters = "".join(each.characters for each in found or ())
    is_empty = not found
    if operator[0] == ":":
        is_empty = not shell.unknowns.without_unset(characters)
    if operator[-1] == "+":
        return [] if is_empty else word("")
    if not is_empty or operator[-1] == "?":
        return None
    default = word("")
    if operator[-1] == "=":
        text = field_of(default).text
        shell.assign(parameter.name, text, text.place, key=parameter.key)
    return default


def _slice_of_list(
    shell: Interpreter, parameter: Parameter, found: tuple[Text, ...], text: str, place: int
) -> tuple[Text, ...]:
    bounds = [part.strip().strip("()") for part in text.split(":")]
    if not all(re.fullmatch(r"-?\d+", each) for each in bounds):
        cause = f"a part of ${parameter.name} at {shell.unknowns.where(place)} is not read"
        unknown = Unknown(f"${parameter.name}", cause, parameter.name, is_open=True)
        return (shell.mark(place, unknown),)
    start = int(bounds[0])
    if parameter.name in {"@", "*"}:
        start = max(start - 1, 0) if start >= 0 else start
    if start < 0:
        start = max(len(found) + start, 0)
    stop = start + int(bounds[1]) if len(bounds) > 1 else len(found)
    return found[start:stop]


def _changed(shell: Interpreter, text: Text, operator: str, pattern: str, place: int) -> Text:
    """Return a value after an operator that cuts or replaces."""
    mark = MARKS.search(text.characters + pattern)
    if mark is not None:
        return written(mark[0], place)
    if operator == ":":
        return _substring(shell, text, pattern, place)
    if operator == "@":
        cause = f"`@` of an expansion at {shell.unknowns.where(place)} is not read"
        return shell.mark(place, Unknown("${...@}", cause))
    if operator[0] == "/":
        return _replaced(shell, text, operator, pattern, place)
    return _cut(shell, text, operator, pattern, place)


def _cut(shell: Interpreter, text: Text, operator: str, pattern: str, place: int) -> Text:
    """Return a value without what a pattern matches at its start or its end."""
    pieces, length = pieces_of(pattern), len(text.characters)
    shell.spend(place, steps=1 + length * (length + len(pieces)) // 100)
    ends = range(length + 1)
    is_longest = len(operator) == 2
    if operator[0] == "#":
        for stop in reversed(ends) if is_longest else ends:
            if is_match(text.characters[:stop], pieces):
                return text.part(stop, length)
    else:
        for start in ends if is_longest else reversed(ends):
            if is_match(text.characters[start:], pieces):
                return text.part(0, start)
    return text


def _substring(shell: Interpreter, text: Text, bounds: str, place: int) -> Text:
    first, _, second = bounds.partition(":")
    start, size = calculated(shell, first, place), len(text.characters)
    count = calculated(shell, second, place) if second else size
    if isinstance(start, str) or isinstance(count, str):
        return written(start if isinstance(start, str) else str(count), place)
    start = max(size + start, 0) if start < 0 else start
    return text.part(start, size + count if count < 0 else start + count)


def _replaced(shell: Interpreter, text: Text, operator: str, pattern: str, place: int) -> Text:
    halves = re.fullmatch(r"((?:\\.|[^\\/])*)/?(.*)", pattern, re.DOTALL)
    if halves is None or not halves[1]:
        return text
    pieces, new = pieces_of(halves[1]), re.sub(r"\\(.)", r"\1", halves[2])
    found, at, length = "", 0, len(text.characters)
    is_plain = all(each.kind == "" for each in pieces)
    while at < length:
        shell.spend(place, steps=1 if is_plain else 1 + (length - at) ** 2 // 1_000)
        ends = (at + len(pieces),) if is_plain else range(length, at, -1)
        if operator == "/%":
            ends = (length,)
        stop = next((end for end in ends if is_match(text.characters[at:end], pieces)), None)
        if stop is not None:
            found, at = found + new, stop
        elif operator == "/#":
            break
        else:
            found, at = found + text.characters[at], at + 1
            continue
        if operator != "//":
            break
    return written(found + text.characters[at:], text.place or place)
