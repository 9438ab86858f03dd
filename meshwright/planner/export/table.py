"""Writes a plan by a framework's table, and reads a file of it back.

A table says how each field of a plan is spelled (`meshwright.hwprofiles.FrameworkTable`); what is
irregular has a codec. What it does not speak of is refused, in a plan and in a file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from meshwright.hwprofiles import (
    OTHERWISE,
    FieldEntry,
    FrameworkProfile,
    FrameworkTable,
    shown,
    suggestion,
)
from meshwright.planner.export.facts import Facts, FileWords, Keys, spelled, theirs, value_of
from meshwright.planner.export.launch import Starter
from meshwright.simulator import ModelSpec, PlanError, load_model
from meshwright.simulator.layout import PLAN_FIELDS
from meshwright.simulator.model import list_models

Roles: TypeAlias = Mapping[str, str]
"""Keys of a framework, by what they are to a codec."""
ANY, NO_NOTE = "*", "-"
IN_BRACES = re.compile(r"\{([a-z_]+)\}")
# Whole numbers, and the least that each can be.
COUNTS = dict.fromkeys(("global_batch_size", "seq_len", "world_size", "dp", "dp_shard"), 1) | {
    name: min(each.default, 1) for name, each in PLAN_FIELDS.items() if type(each.default) is int
}
COUNTS |= {"prediction_layers": 0}


class Codec(NamedTuple):
    """Writes, or reads, what no table can say; None where the table does.

    Args:
        write: From the keys' names and all values to those of the keys.
        read: From the keys' names, the keys of a file and what is known so far to values of fields.
    """

    write: Callable[[Roles, Facts], Keys] | None = None
    read: Callable[[Roles, Keys, Facts, FileWords], Keys] | None = None


Codecs: TypeAlias = Mapping[str, Codec]


def write_keys(table: FrameworkTable, facts: Facts, codecs: Codecs) -> Keys:
    """Return the keys that a table makes of *facts*, of which no gap holds."""
    known = {key for entry in table.fields.values() for key in entry.all_keys}
    found: Keys = {
        key: value for key, value in table.told_by.items() if value != ANY and key not in known
    }
    for name, entry in table.fields.items():
        found |= _written(name, entry, facts, codecs)
    return found


def _written(name: str, entry: FieldEntry, facts: Facts, codecs: Codecs) -> Keys:
    if not facts.holds(entry.when):
        return {} if entry.otherwise is None else {entry.key: entry.otherwise}
    for each in entry.script:
        if facts.holds(each.when):
            if each.line != NO_NOTE:
                facts.notes.append(f"your script: {_filled(each.line, facts)}")
            break
    write = codecs[entry.codec].write if entry.codec else None
    found = _plainly_written(name, entry, facts) if write is None else write(entry.roles, facts)
    return {**found, **entry.beside}


def _plainly_written(name: str, entry: FieldEntry, facts: Facts) -> Keys:
    value = facts.get(entry.tells or name)
    if entry.values:
        # A field without effect may have a value that the framework lacks: then any goes.
        told = entry.values.get(spelled(value), next(iter(entry.values.values())))
        return dict(told) if isinstance(told, dict) else {entry.key: told}
    usual = facts.get(entry.absent_as) if entry.absent_as else entry.absent
    return {} if not entry.key or (entry.leaves_out and value == usual) else {entry.key: value}


def _filled(line: str, facts: Facts) -> str:
    """Return a line with values in the place of names in braces."""
    return IN_BRACES.sub(lambda match: str(facts.get(match[1])), line)


def table_of(framework: FrameworkProfile, keys: Keys) -> FrameworkTable:
    """Return the table of a framework by which a file is read.

    Raises:
        PlanError: If it is of none.
    """
    tables = framework.tables.values()
    for table in tables:
        told = table.told_by.items()
        if told and all(key in keys and value in (ANY, keys[key]) for key, value in told):
            return table
    for table in tables:
        if not table.told_by:
            return table
    (key, _), *_ = next(iter(tables)).told_by.items()
    known = dict.fromkeys(each.told_by[key] for each in tables)
    raise FileWords(framework.name).unknown(key, shown(keys.get(key)), known)


def read_keys(
    framework: FrameworkProfile, table: FrameworkTable, keys: Keys, facts: Facts, codecs: Codecs
) -> dict[str, object]:
    """Return the values that *keys* of a file stand for.

    Args:
        framework: Whose file it is.
        table: By which it is read.
        keys: Of the file.
        facts: What is known beside the file.
        codecs: Of the framework.

    Raises:
        PlanError: If there is a key that the table does not have, or a value that no plan can have.
    """
    words = FileWords(framework.name)
    for key in keys:
        if key not in table.keys and not any(fnmatchcase(key, each) for each in framework.harmless):
            raise PlanError(
                f"{shown(key)} of {framework.name} is unknown, and may change the layout; "
                f"{suggestion(key, table.keys)}"
            )
    _check_held(table, keys, facts, words, whatever=True)
    values = dict(facts.values)
    # What a framework does in any case depends on what it is told.
    for name, entry in sorted(table.fields.items(), key=lambda each: not each[1].all_keys):
        so_far = _known(values, facts)
        if so_far.holds(entry.when):
            read = codecs[entry.codec].read if entry.codec else None
            found = (
                _plainly_read(name, entry, keys, so_far, words)
                if read is None
                else read(entry.roles, keys, so_far, words)
            )
            _check_counts(found, entry, keys, framework.name)
            values |= found
    _check_held(table, keys, _known(values, facts), words, whatever=False)
    return values


def _known(values: Mapping[str, object], beside: Facts) -> Facts:
    """Return what is known by now: the model is the one that a file names, if nobody else does."""
    model, name = beside.model, values.get("model")
    if model is None and isinstance(name, str) and name in list_models():
        found = load_model(name)
        model = found if isinstance(found, ModelSpec) else None
    return Facts(values, model, beside.stack)


def _check_held(
    table: FrameworkTable, keys: Keys, facts: Facts, words: FileWords, *, whatever: bool
) -> None:
    """Raise PlanError for keys of no plan: first for those that are held *whatever* the plan is."""
    for key, held in table.held.items():
        if bool(held.when) != whatever and facts.holds(held.when):
            if held.is_required and key not in keys:
                raise words.unknown(key, value=False, allowed=held.values)
            words.held(keys, key, (*held.values, None))


def _plainly_read(name: str, entry: FieldEntry, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    if entry.values and not entry.key:
        word = _matched(entry, keys, words)
        return {} if word is None else {name: value_of(name, word)}
    if entry.key and not entry.tells:
        return _of_one_key(name, entry, keys, facts, words)
    if entry.same_as:
        is_world = entry.same_as == "world_size"
        return {name: facts.world_size if is_world else facts.get(entry.same_as)}
    for word, condition in entry.always.items():
        if condition == OTHERWISE or facts.holds(condition):
            return {name: value_of(name, word)}
    return {name: value_of(name, entry.only[0])} if entry.only and not entry.script else {}


def _of_one_key(name: str, entry: FieldEntry, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    said = keys.get(entry.key)
    if said is None or said in entry.nothing:
        if entry.absent_as:
            usual = facts.get(entry.absent_as)
            return {} if usual is None else {name: value_of(name, usual)}
        said = entry.absent
    if said is None:
        return {}
    if spelled(said) in entry.also:
        return {name: value_of(name, entry.also[spelled(said)])}
    if not entry.values:
        return {name: said}
    for word, told in entry.values.items():
        if told == said:
            return {name: value_of(name, word)}
    raise words.unknown(entry.key, said, (*entry.values.values(), *entry.also))


def _matched(entry: FieldEntry, keys: Keys, words: FileWords) -> str | None:
    """Return the value whose keys a file has, and no others of them; None where it has none.

    A key that the file lacks, or that a value says nothing of, is as where it is absent.
    """
    absent = entry.absent if isinstance(entry.absent, dict) else {}
    tables = {word: told for word, told in entry.values.items() if isinstance(told, dict)}
    names = dict.fromkeys(key for each in tables.values() for key in each)
    nothing = (None, *entry.nothing)
    said = {key: keys[key] for key in names if key in keys and keys[key] not in nothing}
    for word, told in tables.items():
        is_told = all(said.get(key, absent.get(key)) == value for key, value in told.items())
        if is_told and all(key in told or said[key] == absent.get(key) for key in said):
            return word
    if not said:
        return None
    for key, value in said.items():
        known = dict.fromkeys(str(each[key]) for each in tables.values() if key in each)
        if str(value) not in known:
            raise words.unknown(key, value, known)
    given = ", ".join(f"{key}={theirs(value)}" for key, value in said.items())
    listed = [
        ", ".join(f"{key}={theirs(value)}" for key, value in told.items()) or "none"
        for told in tables.values()
    ]
    raise PlanError(f"{given} of {words.framework} is in no plan; allowed: {'; or '.join(listed)}")


def _check_counts(found: Keys, entry: FieldEntry, keys: Keys, framework: str) -> None:
    """Raise PlanError where a count is none, naming the keys of an entry and their values."""
    said = ", ".join(f"{key}={shown(keys[key])}" for key in entry.all_keys if key in keys)
    for name, value in found.items():
        if name not in COUNTS or value is None:
            continue
        if type(value) is not int:
            raise PlanError(f"{said} of {framework} is in no plan; allowed: a whole number")
        if value < COUNTS[name]:
            raise PlanError(f"{said or name} of {framework} leaves {name}={shown(value)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What is to be written of a plan.

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
    """The code of a framework: its texts, and what no table can say.

    Args:
        files: Text of each file of an export, by its name.
        command: Words that start its program, a line of a script each.
        starter: What starts it.
        is_script: Whether an export of a version is a script that starts the job.
        read: From the text of a file to keys; None where nothing is read.
        codecs: By the names that the framework's table has for them.
    """

    command: Callable[[Export], tuple[str, ...]]
    files: Callable[[Export], Mapping[str, str]] = lambda _: {}
    starter: Starter = Starter.TORCHRUN
    is_script: Callable[[str], bool] = lambda _: False
    read: Callable[[str], Keys] | None = None
    codecs: Mapping[str, Codec] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """A framework that plans are handed to, or read from: its table and its program."""

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
        """Whether files of it are read."""
        return self.program.read is not None
