"""What a shell holds while it runs: variables, functions, arguments; and two of them made one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshwright.planner.shell.language.grammar import Source
from meshwright.planner.shell.language.texts import Text, Unknown, Unknowns, written

if TYPE_CHECKING:
    from tree_sitter import Node

DEPENDS = " depends on a test: "
Key = int | str  # of an element: a number, in an associative array a text


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: its elements; one that is no array has the element 0.

    Args:
        elements: By index, or by key.
        is_array: It was declared or assigned as one.
        is_keyed: An associative one.
    """

    elements: Mapping[Key, Text]
    is_array: bool = False
    is_keyed: bool = False

    @property
    def texts(self) -> tuple[Text, ...]:
        """The elements in order."""
        keys = self.elements if self.is_keyed else sorted(self.elements, key=int)
        return tuple(self.elements[key] for key in keys)

    def same(self, other: "Variable | None") -> bool:
        """Return whether another has the same characters, wherever they were written."""
        if other is None or (self.is_array, self.is_keyed) != (other.is_array, other.is_keyed):
            return False
        if self.elements.keys() != other.elements.keys():
            return False
        return all(
            each.characters == other.elements[key].characters for key, each in self.elements.items()
        )


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a script, with the text it stands in."""

    body: "Node"
    source: Source


@dataclass(slots=True)
class State:
    """What a shell holds.

    Args:
        variables: By name; those that are not there are unset.
        exported: Names of variables that commands see.
        functions: By name.
        name: Of the script, as ``$0``.
        arguments: The positional parameters.
        knows_arguments: There are no other arguments than these.
        folder: The working folder.
        local: Variables of the function that runs, with what they were outside.
        missing: A file of settings that the script reads and that is not there.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()
    functions: dict[str, Function] = field(default_factory=dict)
    name: Text = field(default_factory=Text)
    arguments: tuple[Text, ...] = ()
    knows_arguments: bool = False
    folder: Text = field(default_factory=Text)
    local: dict[str, Variable | None] = field(default_factory=dict)
    missing: str = ""

    def copy(self) -> "State":
        """Return a state that changes on its own."""
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            local=dict(self.local),
        )

    def same(self, other: "State") -> bool:
        """Return whether another has the same variables, arguments and folder."""
        return (
            self.variables.keys() == other.variables.keys()
            and self.exported == other.exported
            and [each.characters for each in self.arguments]
            == [each.characters for each in other.arguments]
            and self.folder.characters == other.folder.characters
            and all(each.same(other.variables[name]) for name, each in self.variables.items())
        )


def merged(
    states: Sequence[State], cause: Unknown, unknowns: Unknowns, told: Callable[[str], Text | None]
) -> State:
    """Return the state after branches of which it is not known which one ran.

    Args:
        states: After each branch, one at least.
        cause: Why it is not known.
        unknowns: Those of the script.
        told: Returns what the user says of a variable; None where nothing.
    """
    first, *others = states
    result = first.copy()
    names = dict.fromkeys(name for state in states for name in state.variables)
    for name in names:
        each = [state.variables.get(name) for state in states]
        known = next(one for one in each if one is not None)
        if all(one is known for one in each):
            continue
        if all(known.same(one) for one in each):
            result.variables[name] = known
            continue
        text = told(name)
        if text is None:
            result.variables[name] = _uncertain(name, each, cause, unknowns)
        else:
            result.variables[name] = Variable({0: text})
    for state in others:
        result.exported |= state.exported
        result.functions.update(state.functions)
        result.local = state.local | result.local
        result.missing = result.missing or state.missing
        if state.arguments != first.arguments:
            mark = unknowns.mark(Unknown("$@", f"$@{DEPENDS}{cause.cause}", cause.name))
            result.arguments, result.knows_arguments = (written(mark, 0),), False
    return result


def _uncertain(
    name: str, each: Sequence[Variable | None], cause: Unknown, unknowns: Unknowns
) -> Variable:
    """Return a variable that has one of several values."""
    texts = [one.texts if one is not None else () for one in each]
    is_open = any(
        len(one) != 1 or len(one[0].characters.split()) != 1 or one[0].characters.startswith("-")
        for one in texts
    )
    root = cause.cause.rpartition(DEPENDS)[2]
    why = root if name == cause.name else f"${name}{DEPENDS}{root}"
    unknown = Unknown(f"${name}", why, cause.name or name, is_open=is_open)
    longest = max((text for one in texts for text in one), key=lambda text: text.place)
    element = written(unknowns.mark(unknown), longest.place)
    if not any(one is not None and one.is_array for one in each):
        return Variable({0: element})
    if any(one is not None and one.is_keyed for one in each):
        return Variable({"?": element}, is_array=True, is_keyed=True)
    kept = 0
    while all(kept < len(one) for one in texts) and all(
        one[kept].characters == texts[0][kept].characters for one in texts
    ):
        first = unknowns.first(texts[0][kept].characters)
        if first is not None and first.is_open:
            break  # what follows in a loop, of which it is not known how often it runs
        kept += 1
    return Variable(dict(enumerate([*texts[0][:kept], element])), is_array=True)
