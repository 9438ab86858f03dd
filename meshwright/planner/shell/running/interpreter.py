"""An interpreter of a script that executes nothing: what it holds, and how much it may do."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.planner.shell.language import (
    MOST_CHARACTERS,
    Key,
    Source,
    State,
    Text,
    Unknown,
    Unknowns,
    Variable,
    Word,
    joined,
    merged,
    written,
)

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_STEPS = 12_000
MOST_TEXT = 4_000_000  # characters of all values together
MOST_NESTED = 40
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
    environment: Mapping[str, Word]
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


@dataclass(slots=True)
class Budget:
    """How much a script may still do."""

    steps: int = MOST_STEPS
    characters: int = MOST_TEXT
    depth: int = 0


@dataclass(slots=True)
class Frame:
    """The text that is read, and the states of branches that may have left it early."""

    source: Source
    launcher: tuple[Word, ...] = ()
    is_function: bool = False
    left: list[tuple[str, State, Unknown]] = field(default_factory=list)


@dataclass(slots=True)
class Interpreter:
    """A script that is being read.

    Args:
        run: Runs a statement; it is given because statements hold words and words statements.
        state: What the shell holds.
        frame: The text that is read.
        file: The script.
        defines: Variables that the user gave.
        unknowns: What the script does not tell.
        budget: How much may still be done.
        commands: Those found.
        output: What the commands between ``$(`` and ``)`` print; None outside.
        used: The names among *defines* that the script asked for.
    """

    run: Callable[["Interpreter", "Node"], Status]
    state: State
    frame: Frame
    file: Path | None
    defines: Mapping[str, str]
    unknowns: Unknowns = field(default_factory=Unknowns)
    budget: Budget = field(default_factory=Budget)
    commands: list[Command] = field(default_factory=list)
    output: list[Text] | None = None
    used: set[str] = field(default_factory=set)

    def place(self, node: "Node") -> int:
        """Return where a part of the text was written."""
        return self.frame.source.place(node.start_byte)

    def spend(self, place: int, *, steps: int = 1, characters: int = 0) -> None:
        """Count what is done.

        Raises:
            PlanError: If it is more than a script needs.
        """
        self.budget.steps -= steps
        self.budget.characters -= characters
        if self.budget.steps < 0:
            raise self.unknowns.refusal(place, f"the script takes over {MOST_STEPS:,} steps")
        if self.budget.characters < 0 or characters > MOST_CHARACTERS:
            raise self.unknowns.refusal(
                place, f"values have over {MOST_CHARACTERS:,} characters, or {MOST_TEXT:,} together"
            )

    def join(self, parts: Sequence[Text], place: int) -> Text:
        """Return texts after each other, counted."""
        self.spend(place, steps=0, characters=sum(len(part.characters) for part in parts))
        return joined(parts)

    def mark(self, place: int, unknown: Unknown) -> Text:
        """Return the text of an unknown."""
        return written(self.unknowns.mark(unknown), place)

    def decision(self, mark: str) -> Unknown:
        """Return what a status depends on."""
        return self.unknowns.meaning(mark)

    def merge(self, state: State, cause: Unknown) -> None:
        """Go on with what another state, that may be the one, has in common with this."""
        self.state = merged([self.state, state], cause, self.unknowns, self.told)

    def told(self, name: str) -> Text | None:
        """Return what the user says of a variable, None where nothing."""
        if name not in self.defines:
            return None
        self.used.add(name)
        return written(self.defines[name], 0)

    def unset(self, name: str, place: int) -> Text:
        """Return the text of a variable that nothing sets."""
        is_unset = name not in SET_EVERYWHERE and not (
            name.startswith("SLURM_") and "SLURM_JOB_ID" in self.state.variables
        )
        what = "is not set in the file" if is_unset else "is known only where the script runs"
        if is_unset and self.state.missing and not name.isdigit():
            is_unset, what = False, f"may be set in {self.state.missing}, which is not there"
        where = self.unknowns.where(place)
        # Of `$?` and the like it is the variable that it is assigned to that can be given.
        told_by = name if name.isalnum() or name.isidentifier() else ""
        unknown = Unknown(f"${name}", f"${name} at {where} {what}", told_by, is_unset)
        return self.mark(place, unknown)

    def assign(self, name: str, text: Text, place: int, *, key: Key | None = None) -> None:
        """Set a variable, or an element; what the user says stands where *text* is unknown."""
        named = self._named(name, text, place)
        before = self.state.variables.get(name)
        if key is None and not (before is not None and before.is_array):
            self.state.variables[name] = Variable({0: named})
            return
        elements = dict(before.elements) if before is not None else {}
        self.spend(place, steps=1 + len(elements) // 10)
        elements[0 if key is None else key] = named
        is_keyed = before is not None and before.is_keyed
        self.state.variables[name] = Variable(elements, is_array=True, is_keyed=is_keyed)

    def _named(self, name: str, text: Text, place: int) -> Text:
        """Return a text to be assigned: what is unknown of it can be told by the variable."""
        found = self.unknowns.first(text.characters)
        if found is None:
            return text
        told = self.told(name) if not found.is_unset or found.name != name else None
        if told is not None:
            return told
        if found.name:
            return text
        where = self.unknowns.where(place)
        unknown = Unknown(f"${name}", f"${name} at {where}: {found.cause}", name)
        mark = re.escape(self.unknowns.mark(found))
        return Text(re.sub(mark, self.unknowns.mark(unknown), text.characters), text.places)

    def job_number(self) -> Text:
        """Return the text of a number that Slurm gives to a job."""
        return self.mark(1, Unknown("$SLURM_JOB_ID", "$SLURM_JOB_ID is given by Slurm"))

    def unset_names(self) -> list[str]:
        """Return the variables that the script asked for and nothing sets."""
        return sorted({each.name for each in self.unknowns.listed if each.is_unset})
