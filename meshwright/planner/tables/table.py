"""Writer of a plan by a framework's table.

A table says how each field of a plan is spelled (`meshwright.hwprofiles.FrameworkTable`); what is
irregular has a codec. What it does not speak of is refused, in a plan and in a file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from meshwright.hwprofiles import (
    FieldEntry,
    FrameworkProfile,
    FrameworkTable,
)
from meshwright.planner.configuration import Options, OptionWord
from meshwright.planner.tables.facts import Facts, FileValues, Keys, spelled
from meshwright.planner.tables.launch import Starter

Roles: TypeAlias = Mapping[str, str]
"""Keys of a framework, by what they are to a codec."""
ANY, NO_NOTE = "*", "-"
IN_BRACES = re.compile(r"\{([a-z_]+)\}")


class Codec(NamedTuple):
    """Writer and reader of what no table can say; None where the table does.

    Args:
        write: From the keys' names and all values to those of the keys.
        read: From the keys' names, the keys of a file and what is known so far to values of fields.
    """

    write: Callable[[Roles, Facts], Keys] | None = None
    read: Callable[[Roles, Keys, Facts, FileValues], Keys] | None = None


Codecs: TypeAlias = Mapping[str, Codec]


def write_keys(table: FrameworkTable, facts: Facts, codecs: Codecs) -> Keys:
    """Return the keys of *facts* by a table, of which no gap holds."""
    declared = {key for entry in table.fields.values() for key in entry.all_keys}
    keys: Keys = {
        key: value for key, value in table.told_by.items() if value != ANY and key not in declared
    }
    for name, entry in table.fields.items():
        keys |= _write_entry(name, entry, facts, codecs)
    return keys


def _write_entry(name: str, entry: FieldEntry, facts: Facts, codecs: Codecs) -> Keys:
    if not facts.holds(entry.when):
        return {} if entry.otherwise is None else {entry.key: entry.otherwise}
    for each in entry.script:
        if facts.holds(each.when):
            if each.line != NO_NOTE:
                facts.notes.append(f"your script: {_filled(each.line, facts)}")
            break
    write = codecs[entry.codec].write if entry.codec else None
    keys = _write_plain(name, entry, facts) if write is None else write(entry.roles, facts)
    return {**keys, **entry.beside}


def _write_plain(name: str, entry: FieldEntry, facts: Facts) -> Keys:
    value = facts.get(entry.tells or name)
    if entry.values:
        # A field without effect may have a value that the framework lacks: then any goes.
        written = entry.values.get(spelled(value), next(iter(entry.values.values())))
        if isinstance(written, dict):
            return dict(written)
        return {} if entry.leaves_out and written == entry.absent else {entry.key: written}
    default = facts.get(entry.absent_as) if entry.absent_as else entry.absent
    return {} if not entry.key or (entry.leaves_out and value == default) else {entry.key: value}


def _filled(line: str, facts: Facts) -> str:
    """Return a line with values in the place of names in braces."""
    return IN_BRACES.sub(lambda match: str(facts.get(match[1])), line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Content of an export.

    Args:
        keys: What the framework is told.
        facts: What the plan says.
        remarks: Lines that stand at the head of a file.
        version: Of the framework.
    """

    keys: Keys
    facts: Facts
    remarks: list[str]
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Code of a framework: its files, its command, and the codecs of what no table can say.

    Args:
        files: Text of each file of an export, by its name.
        command: Words that start its program, a line of a script each; none of one that is only
            read.
        starter: What starts it.
        is_script: Whether an export of a version is a script that starts the job.
        has_remarks: Whether its other files have lines that the framework does not read.
        read_words: From the words of its command, behind the program, to its keys; None where
            they are options as others have them.
        included: Keys of a configuration, and its folder, to the keys with those of the files that
            it names; None where it names none.
        launched: Keys of a configuration, and those of Accelerate's, whose launcher starts it, to
            keys that say both; None where Accelerate may say nothing.
        codecs: By the names that the framework's table has for them.
    """

    command: Callable[[Export], tuple[str, ...]] = lambda _: ()
    files: Callable[[Export], Mapping[str, str]] = lambda _: {}
    starter: Starter = Starter.TORCHRUN
    is_script: Callable[[str], bool] = lambda _: False
    has_remarks: bool = True
    read_words: Callable[[Sequence[OptionWord]], Options] | None = None
    included: Callable[[Keys, Path], Keys] | None = None
    launched: Callable[[Keys, Keys], Keys] | None = None
    codecs: Mapping[str, Codec] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """Framework that plans are exported to, or imported from: its table and its program."""

    profile: FrameworkProfile
    program: Program

    @property
    def name(self) -> str:
        """As ``--to`` and ``--from`` have it."""
        return self.profile.name

    @property
    def versions(self) -> tuple[str, ...]:
        """Those that can be asked for, the usual one first."""
        return self.profile.versions

    @property
    def is_read(self) -> bool:
        """True if files of it are read."""
        return self.profile.format is not None
