"""Reader of a configuration by its framework's table, with the origin of each value.

Every key is read, or known to change neither time nor memory, or refused; all refusals are told.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from meshwright.hwprofiles import (
    OTHERWISE,
    FieldEntry,
    FrameworkProfile,
    FrameworkTable,
    load_framework,
    nearest_names,
    shown,
)
from meshwright.planner.configuration import Effect, Option, Takes, Unknown, load_options
from meshwright.planner.tables import (
    ANY,
    Codecs,
    Facts,
    FileValues,
    Keys,
    MissingError,
    spelled,
    theirs,
    value_of,
)
from meshwright.simulator import ModelSpec, PlanError, load_model
from meshwright.simulator.layout import PLAN_FIELDS
from meshwright.simulator.model import list_models

ENVIRONMENT = "environment"  # variables that change a step whatever is started
MOST_NEAREST = 3
# Unknown keys of which the nearest are looked for, which takes a hundredth of a second each.
MOST_HINTS = 12
# Whole numbers, and the least that each can be.
COUNTS = dict.fromkeys(("global_batch_size", "seq_len", "world_size", "dp", "dp_shard"), 1) | {
    name: min(each.default, 1) for name, each in PLAN_FIELDS.items() if type(each.default) is int
}
COUNTS |= {"prediction_layers": 0}


class Origin(StrEnum):
    """Origin of the value of a field."""

    FILE = "the file"
    DEFAULT = "the framework's default"
    ALWAYS = "what the framework does"
    OPTION = "an option"


class Complaint(NamedTuple):
    """Mistake in a key of a configuration; the key is empty where it is of none."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Values, origins and mistakes of a configuration.

    Args:
        values: By the names of fields and facts.
        origins: Where each is from, and the keys of the configuration that say it.
        complaints: What no plan can say, or is not understood.
        missing: What the configuration leaves open and the plan needs, and why, by name.
    """

    values: dict[str, object]
    origins: dict[str, tuple[Origin, tuple[str, ...]]] = field(default_factory=dict)
    complaints: list[Complaint] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def table_of(framework: FrameworkProfile, keys: Keys) -> FrameworkTable:
    """Return the table that a configuration is read by.

    Raises:
        PlanError: If it is of none.
    """
    tables = framework.tables.values()
    for table in tables:
        conditions = table.told_by.items()
        if conditions and all(
            key in keys and value in (ANY, keys[key]) for key, value in conditions
        ):
            return table
    for table in tables:
        if not table.told_by:
            return table
    (key, _), *_ = next(iter(tables)).told_by.items()
    allowed = dict.fromkeys(each.told_by[key] for each in tables)
    raise FileValues(framework.name).unknown(key, shown(keys.get(key)), allowed)


def options_of(table: FrameworkTable) -> Mapping[str, Option]:
    """Return the options that a configuration may hold by a table, by key."""
    return _options(table.options, tuple(table.sections.items()))


@cache
def _options(files: tuple[str, ...], sections: tuple[tuple[str, str], ...]) -> Mapping[str, Option]:
    names = (ENVIRONMENT, *files)
    options = {key: each for name in names for key, each in load_options(name).items()}
    for section, framework in sections:
        for other in load_framework(framework).tables.values():
            inner = options_of(other).items()
            options |= {f"{section}.{key}": _in_section(section, each) for key, each in inner}
    return options


def _in_section(section: str, option: Option) -> Option:
    """Return an option of another framework that stands in a section."""
    is_old = option.effect is Effect.RENAMED
    allowed = tuple(f"{section}.{each}" for each in option.allowed) if is_old else option.allowed
    return option._replace(key=f"{section}.{option.key}", allowed=allowed)


def read_keys(
    framework: FrameworkProfile, table: FrameworkTable, keys: Keys, facts: Facts, codecs: Codecs
) -> Reading:
    """Return the reading of the *keys* of a configuration.

    Args:
        framework: Whose configuration it is.
        table: By which it is read.
        keys: Of the configuration, by their present names.
        facts: What is known beside it.
        codecs: Of the framework.
    """
    read_by_table = frozenset(table.keys)
    sections = frozenset(
        key[: dot.start()]
        for key in {*options_of(table), *read_by_table}
        for dot in re.finditer(r"\.", key)
    )
    reading = Reading(dict(facts.values))
    reader = _Reader(framework, table, facts, codecs, reading, read_by_table, sections)
    accepted = {key: value for key, value in keys.items() if reader.takes(key, value)}
    reader.check_held(accepted, whatever=True)
    # What a framework does in any case depends on what it is told.
    for name, entry in sorted(table.fields.items(), key=lambda each: not each[1].all_keys):
        reader.read_entry(name, entry, accepted)
    reader.check_held(accepted, whatever=False)
    return reader.found


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of one configuration."""

    framework: FrameworkProfile
    table: FrameworkTable
    beside: Facts
    codecs: Codecs
    found: Reading
    read: frozenset[str]
    sections: frozenset[str]

    def takes(self, key: str, value: object) -> bool:
        """Return True if a key is one to read; complain of what is not understood."""
        if key in self.read:
            if not isinstance(value, Unknown):
                return True
            self.found.complaints.append(Complaint(key, value.why))
            return False
        # Only keys that no table reads are looked up among the options.
        options, name = options_of(self.table), self.framework.name
        if (value is None or value == {}) and key in self.sections and key not in options:
            return False  # a section without a word in it
        is_hinted = len(self.found.complaints) < MOST_HINTS
        text = mistake(name, key, value, options, self.read, is_hinted=is_hinted)
        if text:
            self.found.complaints.append(Complaint(key, text))
        return False

    def check_held(self, keys: Keys, *, whatever: bool) -> None:
        """Complain of keys of no plan: first of those held *whatever* the plan is."""
        # Held keys depend on fields that are read by now.
        facts, words = self._known(), FileValues(self.framework.name)
        for key, rule in self.table.held.items():
            if bool(rule.when) == whatever or not facts.holds(rule.when):
                continue
            try:
                if rule.is_required and key not in keys:
                    allowed = ", ".join(map(theirs, rule.values))
                    self.found.complaints.append(
                        Complaint(key, f"{key} of {words.framework} is missing; allowed: {allowed}")
                    )
                elif keys.get(key) is not None:
                    words.held(keys, key, rule.values)
            except PlanError as error:
                self.found.complaints.append(Complaint(key, str(error)))

    def read_entry(self, name: str, entry: FieldEntry, keys: Keys) -> None:
        """Read one entry of the table."""
        facts = self._known()
        if not facts.holds(entry.when):
            return
        words, own_keys = (
            FileValues(self.framework.name),
            [key for key in entry.all_keys if key in keys],
        )
        reader = self.codecs[entry.codec].read if entry.codec else None
        try:
            values = (
                _read_plain(name, entry, keys, facts, words)
                if reader is None
                else reader(entry.roles, keys, facts, words)
            )
            _check_counts(values, entry, keys, self.framework.name)
        except MissingError as error:
            self.found.missing[error.name] = error.why
            return
        except PlanError as error:
            # Of several keys the error names the one at fault.
            key = next(
                (each for each in own_keys if each in str(error)), own_keys[0] if own_keys else ""
            )
            self.found.complaints.append(Complaint(key, str(error)))
            return
        if entry.asks and name not in {**self.found.values, **values}:
            self.found.missing[name] = entry.why
        self._keep(values, entry, tuple(own_keys))

    def _keep(self, values: Keys, entry: FieldEntry, own_keys: tuple[str, ...]) -> None:
        origin = Origin.FILE if own_keys else Origin.DEFAULT if entry.all_keys else Origin.ALWAYS
        for name, value in values.items():
            self.found.values[name] = value
            # A default does not replace the origin of a value that the file says.
            if name not in self.found.origins or own_keys:
                self.found.origins[name] = origin, own_keys

    def _known(self) -> Facts:
        """Return the facts that are known so far: the file's model where no other is given."""
        model, said = self.beside.model, self.found.values.get("model")
        if isinstance(said, ModelSpec):
            model = model or said
        if model is None and isinstance(said, str) and said in list_models():
            built_in = load_model(said)
            model = built_in if isinstance(built_in, ModelSpec) else None
        return Facts(self.found.values, model, self.beside.stack)


def mistake(
    framework: str,
    key: str,
    value: object,
    options: Mapping[str, Option],
    keys: Collection[str],
    *,
    is_hinted: bool = True,
) -> str:
    """Return the mistake of a key that no table reads; empty where it may stand there."""
    option = options.get(key) or _section(key, options)
    if option is None:
        unknown_key = f"{shown(key)} of {framework} is unknown, and may change the plan"
        if not is_hinted:
            return unknown_key
        nearest = ", ".join(nearest_names(key, {*options, *keys})[:MOST_NEAREST])
        return (
            f"{unknown_key}; nearest: {nearest}"
            if nearest
            else f"{unknown_key}; no known one is near"
        )
    if option.effect is not Effect.HELD:
        return ""
    if isinstance(value, Unknown):
        return value.why
    spelling = spelled(value)
    if spelling in option.allowed or (not option.allowed and value in (False, None, "", [])):
        return ""
    allowed = ", ".join(option.allowed) or "leave it out"
    why = f" ({option.why})" if option.why else ""
    return f"{key}={theirs(value)} of {framework} is in no plan{why}; allowed: {allowed}"


def _section(key: str, options: Mapping[str, Option]) -> Option | None:
    """Return the section of the user's own keys that a key stands in."""
    section, _, _ = key.rpartition(".")
    while section:
        option = options.get(section)
        if option is not None and option.takes is Takes.TABLE:
            return option
        section, _, _ = section.rpartition(".")
    return None


def _read_plain(name: str, entry: FieldEntry, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    if entry.values and not entry.key:
        word = _matched_value(entry, keys, words)
        return {} if word is None else {name: value_of(name, word)}
    if entry.key and not entry.tells:
        return _read_one_key(name, entry, keys, facts, words)
    if entry.same_as:
        is_world = entry.same_as == "world_size"
        return {name: facts.world_size if is_world else facts.get(entry.same_as)}
    # The first condition that holds decides, `otherwise` the rest.
    for word, condition in entry.always.items():
        if condition == OTHERWISE or facts.holds(condition):
            return {name: value_of(name, word)}
    return {name: value_of(name, entry.only[0])} if entry.only and not entry.script else {}


def _read_one_key(
    name: str, entry: FieldEntry, keys: Keys, facts: Facts, words: FileValues
) -> Keys:
    value = keys.get(entry.key)
    if value is None or value in entry.nothing:
        if entry.absent_as:
            default = facts.get(entry.absent_as)
            return {} if default is None else {name: value_of(name, default)}
        # Variables of a launch are absent only where a launch is read.
        value = None if entry.of_launch and not facts.is_launched else entry.absent
    if value is None:
        return {}
    if spelled(value) in entry.also:
        return {name: value_of(name, entry.also[spelled(value)])}
    if not entry.values:
        return {name: value}
    for word, told in entry.values.items():
        if told == value:
            return {name: value_of(name, word)}
    raise words.unknown(entry.key, value, (*entry.values.values(), *entry.also))


def _matched_value(entry: FieldEntry, keys: Keys, words: FileValues) -> str | None:
    """Return the value of a field by keys that a file has, all of them; None where it has none.

    A key that the file lacks, or that a value says nothing of, is as where it is absent.
    """
    absent: Keys = {**entry.absent} if isinstance(entry.absent, dict) else {}
    tables: dict[str, Keys] = {
        word: {**told} for word, told in entry.values.items() if isinstance(told, dict)
    }
    names = dict.fromkeys(key for each in tables.values() for key in each)
    nothing = (None, *entry.nothing)
    given_keys = {key: keys[key] for key in names if key in keys and keys[key] not in nothing}
    for word, told in tables.items():
        is_told = all(given_keys.get(key, absent.get(key)) == value for key, value in told.items())
        if is_told and all(key in told or given_keys[key] == absent.get(key) for key in given_keys):
            return word
    if not given_keys and not absent:
        return None
    given_keys = given_keys or absent
    for key, value in given_keys.items():
        allowed = dict.fromkeys(
            str(each[key]) for each in [*tables.values(), absent] if key in each
        )
        if str(value) not in allowed:
            raise words.unknown(key, value, allowed)
    given = ", ".join(f"{key}={theirs(value)}" for key, value in given_keys.items())
    listed = [
        ", ".join(f"{key}={theirs(value)}" for key, value in told.items()) or "none"
        for told in tables.values()
    ]
    raise PlanError(f"{given} of {words.framework} is in no plan; allowed: {'; or '.join(listed)}")


def _check_counts(values: Keys, entry: FieldEntry, keys: Keys, framework: str) -> None:
    """Raise PlanError where a count is out of range, naming the keys of an entry."""
    key_texts = ", ".join(f"{key}={shown(keys[key])}" for key in entry.all_keys if key in keys)
    for name, value in values.items():
        if name not in COUNTS or value is None:
            continue
        if type(value) is not int:
            raise PlanError(f"{key_texts} of {framework} is in no plan; allowed: a whole number")
        if value < COUNTS[name]:
            raise PlanError(f"{key_texts or name} of {framework} leaves {name}={shown(value)}")
