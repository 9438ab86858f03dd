"""An interpreter of bash that executes nothing: what the shell holds, and how much it may do."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.planner.shell.words import (
    MOST_CHARACTERS,
    Fragment,
    Text,
    Unknown,
    Unknowns,
    Word,
    joined,
    regex_of,
    written,
)
from meshwright.simulator import PlanError

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_STEPS = 12_000
MOST_TEXT = 4_000_000  # characters of all values together
CUTS = {"": "{}", "#": "{}(.*)", "##": "{}(.*)", "%": "(.*){}", "%%": "(.*?){}"}
DEPENDS = " depends on a test: "
Status = bool | str  # whether a command succeeds; the mark of what that depends on
# Always set where a script runs, to what no script tells.
SET_EVERYWHERE = {
    "HOME", "HOSTNAME", "LOGNAME", "PATH", "SHELL", "USER", "PPID", "RANDOM", "SECONDS", "UID",
    "EUID", "BASHPID", "EPOCHSECONDS", "HOSTTYPE", "OSTYPE", "MACHTYPE", "BASH", "BASH_VERSION",
    "LINENO", "$", "!", "-", "_", "?",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command that a script runs.

    Args:
        words: The name and the arguments.
        environment: The variables that it sees, those before it included.
        launcher: The words of the command that starts it, with their own options: of srun where
            ``srun ... bash -c "..."`` holds it.
        unknown: Why it is not known whether it runs, with the remedy; empty where it is.
    """

    words: tuple[Word, ...]
    environment: Mapping[str, Word] = field(default_factory=dict)
    launcher: tuple[Word, ...] = ()
    unknown: str = ""


class Flow(Exception):  # noqa: N818 - no error: how the shell leaves a loop, a function, a script
    """The end of a list of commands before its last one."""

    def __init__(self, kind: str, levels: int = 1, *, status: Status = True) -> None:
        """Leave *levels* loops (``break``, ``continue``), a function (``return``) or all."""
        super().__init__(kind)
        self.kind = kind
        self.levels = levels
        self.status = status


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: its elements in order; one that is no array has one."""

    texts: tuple[Text, ...]
    is_array: bool = False

    def same(self, other: "Variable | None") -> bool:
        """Return True if another has the same characters, wherever they were written."""
        return (
            other is not None
            and self.is_array == other.is_array
            and [each.characters for each in self.texts]
            == [each.characters for each in other.texts]
        )


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a script, with the text it stands in."""

    body: "Node"
    source: Text


@dataclass(slots=True)
class State:
    """State of a shell: variables, functions, arguments and working folder."""

    variables: dict[str, Variable] = field(default_factory=dict)  # no others are set
    exported: frozenset[str] = frozenset()  # names of variables that commands see
    functions: dict[str, Function] = field(default_factory=dict)
    name: Text = field(default_factory=Text)  # of the script: `$0`
    arguments: tuple[Text, ...] = ()
    knows_arguments: bool = False  # there are no other arguments than these
    folder: Text = field(default_factory=Text)  # the working folder
    local: dict[str, Variable | None] = field(default_factory=dict)  # what they were outside
    missing: str = ""  # a file of settings that the script reads and that is not there

    def copy(self) -> "State":
        """Return a state that changes on its own."""
        return replace(
            self,
            variables=dict(self.variables),
            functions=dict(self.functions),
            local=dict(self.local),
        )

    def restore(self, variables: Mapping[str, Variable | None]) -> None:
        """Set variables to what they were before; None of one that was unset."""
        for name, old in variables.items():
            self.variables.pop(name, None)
            if old is not None:
                self.variables[name] = old


@dataclass(slots=True)
class Frame:
    """Text that is being read, and the states of branches that may have left it early."""

    source: Text
    launcher: tuple[Word, ...] = ()
    is_function: bool = False
    left: list[tuple[str, State, Unknown]] = field(default_factory=list)


@dataclass(slots=True)
class Interpreter:
    """Interpreter of a script: the state of the shell, and the commands that were found."""

    run: Callable[["Interpreter", "Node"], Status]  # statements hold words, words statements
    state: State
    frame: Frame
    file: Path | None
    defines: Mapping[str, str]  # variables that the user gave
    unknowns: Unknowns = field(default_factory=Unknowns)
    steps: int = MOST_STEPS  # statements and expansions that may still be done
    characters: int = MOST_TEXT  # that values may still have
    commands: list[Command] = field(default_factory=list)  # those found
    output: list[Text] | None = None  # what commands between `$(` and `)` print
    used: set[str] = field(default_factory=set)  # names among *defines* that were asked for

    def place(self, node: "Node") -> int:
        """Return the place at which a part of the text was written."""
        return self.place_at(node.start_byte)

    def place_at(self, start: int) -> int:
        """Return the place at which a character of the text was written."""
        places = self.frame.source.places
        return places[min(start, len(places) - 1)] if places else 0

    def text(self, node: "Node") -> str:
        """Return the characters of a part of the text."""
        return self.frame.source.characters[node.start_byte : node.end_byte]

    def refusal(self, place: int, problem: str) -> PlanError:
        """Return the error of a script that cannot be read on."""
        return self.unknowns.refusal(place, problem)

    def spend(self, place: int, *, steps: int = 1, characters: int = 0) -> None:
        """Count what is done; refuse a script that does more than one needs."""
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise self.refusal(place, f"the script takes over {MOST_STEPS:,} steps")
        if self.characters < 0 or characters > MOST_CHARACTERS:
            raise self.refusal(
                place, f"values have over {MOST_CHARACTERS:,} characters, or {MOST_TEXT:,} together"
            )

    def join(self, parts: Sequence[Text], place: int) -> Text:
        """Return texts after each other, counted."""
        self.spend(place, steps=0, characters=sum(len(part.characters) for part in parts))
        return joined(parts)

    def matched(
        self, pattern: Sequence[Fragment], characters: str, place: int, cut: str = ""
    ) -> re.Match[str] | None:
        """Match a text with a pattern, or what a cut (``#``, ``%%``) leaves, and count the cost."""
        try:
            # `#` cuts the shortest match, `##` the longest.
            star = ".*?" if cut == "#" else ".*"
            regex = re.compile(CUTS[cut].format(regex_of(pattern, star)), re.DOTALL)
        except (PlanError, re.error) as error:
            raise self.refusal(place, f"a pattern is not read: {error}") from None
        # Each `.*` multiplies the backtracking by the length of the text.
        self.spend(place, steps=1 + len(characters) ** (regex.pattern.count(".*") + 1) // 10_000)
        return regex.fullmatch(characters)

    def mark(self, place: int, unknown: Unknown) -> Text:
        """Return the text of an unknown."""
        return written(self.unknowns.mark(unknown), place)

    def unread(
        self, place: int, characters: str, why: str = "is not read", *, is_open: bool = False
    ) -> Text:
        """Return the text of a construct whose value is not found, with its name and line."""
        shown = " ".join(self.unknowns.shown(characters).split())
        shown = shown if len(shown) <= 40 else f"{shown[:36]}...{shown[-1]}"
        cause = f"{shown} at {self.unknowns.where(place)} {why}"
        return self.mark(place, Unknown(shown, cause, is_open=is_open))

    def merge(self, states: Sequence[State], cause: Unknown) -> None:
        """Go on with what the states after several branches have in common."""
        self.state = merged(states, cause, self.unknowns, self.told)

    def told(self, name: str) -> Text | None:
        """Return the user's value of a variable, None where there is none."""
        if name not in self.defines:
            return None
        self.used.add(name)
        return written(self.defines[name], 0)

    def unset(self, name: str, place: int) -> Text:
        """Return the text of a variable that nothing sets."""
        # In a job Slurm sets its variables where the script runs.
        is_unset = name not in SET_EVERYWHERE and not (
            name.startswith("SLURM_") and "SLURM_JOB_ID" in self.state.variables
        )
        reason = "is not set in the file" if is_unset else "is known only where the script runs"
        if is_unset and self.state.missing and not name.isdigit():
            is_unset, reason = False, f"may be set in {self.state.missing}, which is not there"
        where = self.unknowns.where(place)
        # Of `$?` and the like it is the variable that it is assigned to that can be given.
        told_by = name if name.isalnum() or name.isidentifier() else ""
        unknown = Unknown(f"${name}", f"${name} at {where} {reason}", told_by, is_unset)
        return self.mark(place, unknown)

    def assign(self, name: str, text: Text, place: int) -> None:
        """Set a variable; the user's value takes the place of an unknown one."""
        named = self._named(name, text, place)
        before = self.state.variables.get(name)
        rest = before.texts[1:] if before is not None and before.is_array else ()
        is_array = before is not None and before.is_array
        self.state.variables[name] = Variable((named, *rest), is_array)

    def _named(self, name: str, text: Text, place: int) -> Text:
        """Return a text to be assigned: what is unknown of it can be told by the variable."""
        unknown_part = self.unknowns.first(text.characters)
        if unknown_part is None:
            return text
        user_value = (
            self.told(name) if not unknown_part.is_unset or unknown_part.name != name else None
        )
        if user_value is not None:
            return user_value
        if unknown_part.name:
            return text
        where = self.unknowns.where(place)
        unknown = Unknown(f"${name}", f"${name} at {where}: {unknown_part.cause}", name)
        mark = re.escape(self.unknowns.mark(unknown_part))
        return Text(re.sub(mark, self.unknowns.mark(unknown), text.characters), text.places)


def merged(
    states: Sequence[State], cause: Unknown, unknowns: Unknowns, told: Callable[[str], Text | None]
) -> State:
    """Return the state after branches of which it is not known which one ran, and why.

    What the user has *told* of a variable stands where it differs.
    """
    first, *others = states
    result = first.copy()
    names = dict.fromkeys(name for state in states for name in state.variables)
    for name in names:
        each = [state.variables.get(name) for state in states]
        first_value = next(one for one in each if one is not None)
        if all(one is first_value for one in each):
            continue
        if all(first_value.same(one) for one in each):
            result.variables[name] = first_value
            continue
        text = told(name)
        variable = _uncertain(name, each, cause, unknowns) if text is None else Variable((text,))
        result.variables[name] = variable
    # What any branch exports or defines may be seen by what follows.
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
    # A value that may be no word, or several, may hold options.
    is_open = any(
        len(one) != 1 or len(one[0].characters.split()) != 1 or one[0].characters.startswith("-")
        for one in texts
    )
    root = cause.cause.rpartition(DEPENDS)[2]
    reason = root if name == cause.name else f"${name}{DEPENDS}{root}"
    unknown = Unknown(f"${name}", reason, cause.name or name, is_open=is_open)
    last = max((text.place for one in texts for text in one), default=0)
    element = written(unknowns.mark(unknown), last)
    if not any(one is not None and one.is_array for one in each):
        return Variable((element,))
    kept: list[Text] = []
    for column in zip(*texts, strict=False):
        opened = unknowns.first(column[0].characters)
        is_same = all(one.characters == column[0].characters for one in column)
        if not is_same or (opened is not None and opened.is_open):
            break  # what follows in a loop, of which it is not known how often it runs
        kept.append(column[0])
    return Variable((*kept, element), is_array=True)
