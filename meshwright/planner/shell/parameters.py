"""Parameters: variables, elements of arrays, arguments, and the operators of ``${...}``."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshwright.planner.shell.arithmetic import evaluate
from meshwright.planner.shell.interpreter import Interpreter, Variable
from meshwright.planner.shell.words import (
    MARKS,
    WHITE,
    Fragment,
    Kind,
    Text,
    field_of,
    joined,
    written,
)
from meshwright.simulator import PlanError

PARAMETER = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*?$!#-])"
    r"(?:\[(?P<index>(?:[^][]|\[[^]]*\])*)\])?(?P<operator>:?[-=?+]|##?|%%?|\^\^?|,,?|$)",
    re.ASCII,
)
CASES: Mapping[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}


class Parameter(NamedTuple):
    """What stands between ``${`` and an operator."""

    name: str  # of the variable, or the number of an argument
    element: int | str = 0  # its index, or the mark of what that depends on; `@` or `*` all
    is_length: bool = False  # a `#` stands before it: a length, or a count

    @property
    def is_all(self) -> bool:
        """Whether it stands for several values."""
        return self.name in {"@", "*"} or self.element in {"@", "*"}


def values(shell: Interpreter, parameter: Parameter, place: int) -> tuple[Text, ...] | None:
    """Return the values of a parameter; None of one that nothing sets."""
    name, state = parameter.name, shell.state
    if name in {"@", "*"}:
        return state.arguments
    if name == "#" or name.isdigit():
        return _of_arguments(shell, name, place)
    variable = state.variables.get(name)
    if variable is not None:
        return _of_variable(shell, parameter, variable, place)
    places = {"PWD": state.folder, "BASH_SOURCE": state.name, "IFS": written(WHITE, place)}
    # What nothing sets here, but a file that is not there may, is no reason for a default.
    found = places[name] if name in places else shell.unset(name, place)
    first = shell.unknowns.first(found.characters) if name not in places else None
    return None if first is not None and first.is_unset else (found,)


def _of_variable(
    shell: Interpreter, parameter: Parameter, variable: Variable, place: int
) -> tuple[Text, ...]:
    name, index, texts = parameter.name, parameter.element, variable.texts
    if name in shell.defines and any(not each.place for each in texts):
        shell.used.add(name)
    if parameter.is_all:
        if not variable.is_array and name in shell.defines and not texts[0].place:
            # No array can be given: its words are.
            return tuple(written(each, 0) for each in texts[0].characters.split())
        return texts
    if isinstance(index, str):
        return (written(index, place),)
    if -len(texts) <= index < len(texts):
        return (texts[index],)
    unknown = [each for each in texts if variable.is_array and MARKS.search(each.characters)]
    return (unknown[0] if unknown else Text(),)


def _of_arguments(shell: Interpreter, name: str, place: int) -> tuple[Text, ...] | None:
    """Return an argument of the script or the function, ``$1``, or how many there are, ``$#``."""
    arguments = shell.state.arguments
    if name == "#":
        first = shell.unknowns.first("".join(each.characters for each in arguments))
        is_open = first is not None and first.shown == "$@"
        return (
            shell.mark(place, first) if first and is_open else written(str(len(arguments)), place),
        )
    shell.used |= {name} & {*shell.defines}
    found = (shell.state.name, *arguments)[int(name) :][:1]
    return found or ((Text(),) if shell.state.knows_arguments else None)


def calculated(shell: Interpreter, characters: str, place: int) -> int | str:
    """Return the value of an expression, or the mark of what it depends on."""

    def value_of(name: str) -> str:
        shell.spend(place)
        found = values(shell, Parameter(name), place)
        return (shell.unset(name, place) if found is None else joined(found)).characters

    def assign(name: str, value: str) -> None:
        shell.assign(name, written(value, place), place)

    try:
        return evaluate(characters.replace("\\\n", "").replace('"', ""), value_of, assign)
    except PlanError as error:
        raise shell.refusal(place, str(error)) from None


def operated(
    shell: Interpreter,
    parameter: Parameter,
    operator: str,
    word: Callable[[], list[Fragment]],
    place: int,
    kind: Kind,
) -> list[Fragment]:
    """Return what a parameter with an operator (``:-``, or none) stands for.

    *word* expands what stands after the operator; *kind* is the quoting of the whole.
    """
    found = values(shell, parameter, place)
    if parameter.is_length and found is not None:
        found = (_length(shell, parameter, found, place),)
    if operator.lstrip(":") in {"-", "=", "?", "+"}:
        fallback = _conditional(shell, parameter, operator, found, word)
        if fallback is not None:
            return fallback or [Fragment(Text(), kind)]
    if found is None:
        found = (shell.unset(parameter.name, place),)
    if operator[:1] in {"#", "%"}:
        pattern = word()
        found = tuple(_changed(shell, each, operator, pattern, place) for each in found)
    elif operator in CASES:
        if word():
            raise shell.refusal(place, f"a pattern after `{operator}` is not read")
        found = tuple(Text(CASES[operator](each.characters), each.places) for each in found)
    if not parameter.is_all or parameter.is_length:
        return [Fragment(each, kind) for each in found]
    if "*" in (parameter.name, parameter.element) and kind is Kind.QUOTED:
        shell.spend(place, characters=sum(len(each.characters) for each in found))
        return [Fragment(field_of([Fragment(e, kind, begins=True) for e in found]).text, kind)]
    return [Fragment(each, kind, begins=number > 0) for number, each in enumerate(found)]


def _length(shell: Interpreter, parameter: Parameter, found: tuple[Text, ...], place: int) -> Text:
    first = shell.unknowns.first("".join(each.characters for each in found))
    if first is not None and (first.is_open or not parameter.is_all):
        return shell.mark(place, first)
    return written(str(len(found) if parameter.is_all else len(found[0].characters)), place)


def _conditional(
    shell: Interpreter,
    parameter: Parameter,
    operator: str,
    found: tuple[Text, ...] | None,
    word: Callable[[], list[Fragment]],
) -> list[Fragment] | None:
    """Return the word after an operator where it counts; None where the value does."""
    is_empty = not found
    if operator[0] == ":":
        characters = "".join(each.characters for each in found or ())
        is_empty = not shell.unknowns.without_unset(characters)
    if operator[-1] == "+":
        return [] if is_empty else word()
    if not is_empty or operator[-1] == "?":
        return None
    default = word()
    if operator[-1] == "=":
        text = field_of(default).text
        shell.assign(parameter.name, text, text.place)
    return default


def _changed(
    shell: Interpreter, text: Text, operator: str, pattern: list[Fragment], place: int
) -> Text:
    """Return a value after an operator that cuts (``#``, ``%``)."""
    characters = text.characters
    mark = MARKS.search(characters + field_of(pattern).text.characters)
    if mark is not None:
        return written(mark[0], place)
    form, star = {
        "#": ("{}(.*)", ".*?"), "##": ("{}(.*)", ".*"), "%": ("(.*){}", ".*"), "%%": ("(.*?){}", ".*"),
    }[operator]  # fmt: skip
    found = shell.matched(pattern, characters, place, form, star)
    return text.part(*found.span(1)) if found else text
