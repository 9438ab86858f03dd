"""A table of correspondences: what a field of a plan is called in a framework, read both ways.

A row says it once: `write` turns values of the plan into keys of the framework, `read` turns keys
back into values. What no row of a table speaks of is refused, in a plan and in a file.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias, cast

from meshwright.hwprofiles import StackProfile, shown, suggestion
from meshwright.simulator import ModelSpec, PlanError
from meshwright.simulator.layout import PLAN_FIELDS

Keys: TypeAlias = dict[str, object]
"""Values by the framework's keys; a key in a section is written with dots."""

STACK_FACT = "stack."  # begins the name of a fact of the stack
ABSENT = object()  # the default of a key that a file has to hold


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a job and its plan, by the names of their fields.

    In an export that is everything, in an import what the rows before have read.
    """

    values: Mapping[str, object]
    model: ModelSpec | None = None
    stack: StackProfile | None = None
    notes: list[str] = field(default_factory=list)

    def number(self, name: str) -> int:
        """Return a count; 1 where nothing is known of it."""
        value = self.values.get(name)
        return 1 if value is None else cast("int", value)

    def get(self, name: str) -> object:
        """Return a value, or a fact of the stack; None where nothing is known of it."""
        if name.startswith(STACK_FACT) and self.stack is not None:
            return cast("object", getattr(self.stack, name.removeprefix(STACK_FACT)))
        return self.values.get(name)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a data-parallel rank in a step."""
        rank = self.number("dp") * self.number("microbatch_size")
        return self.number("global_batch_size") // rank

    @property
    def world_size(self) -> int:
        """Ranks of the job; raises PlanError if neither the file nor the user says."""
        if self.values.get("world_size") is None:
            raise PlanError("--gpus is missing; the file does not say how many")
        return self.number("world_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A fact that plan and framework both tell.

    Args:
        fields: Of the job and the plan, that it speaks of.
        keys: Of the framework.
        write: From all values to those of the keys.
        read: From the keys of a file and what is known so far to the values of the fields.
    """

    fields: tuple[str, ...]
    keys: tuple[str, ...]
    write: Callable[[Facts], Keys]
    read: Callable[[Keys, Facts], Mapping[str, object]]


def not_offered(field: str, value: object, framework: str, allowed: Iterable[object]) -> PlanError:
    """Return the error of a value that a framework cannot express."""
    known = ", ".join(_word(each) for each in allowed)
    return PlanError(
        f"{field}={_word(value)} cannot be expressed for {framework}; allowed: {known}"
    )


# Whole numbers, and the least that each can be.
COUNTS = dict.fromkeys(("global_batch_size", "seq_len", "world_size", "dp", "dp_shard"), 1) | {
    name: min(each.default, 1) for name, each in PLAN_FIELDS.items() if type(each.default) is int
}
# What a model has that no framework needs to know.
_LABELS = {"name", "title", "source", "seq_len", "scored_fraction", "spelling", "head_dim"}


def check_model(model: ModelSpec, framework: str, told: Iterable[str]) -> None:
    """Refuse a model with facts that a framework is not told of, unless they are as usual.

    Raises:
        PlanError: Naming the first such fact.
    """
    known = {"positions", *told}
    facts: dict[str, object] = {}
    if "head_dim" not in known:
        facts["head_dim"] = model.hidden_size // model.num_heads
    facts["positions"] = "rotary" if model.positions == "rotary" else "learned"
    declared = type(model).model_fields.items()
    facts |= {name: each.default for name, each in declared if name not in _LABELS | known}
    for name, usual in facts.items():
        value = getattr(model, name)
        if value != usual:
            said = f"{name}={value}" if _is_plain(value) else name
            raise PlanError(
                f"model={model.name} has {said}, which cannot be expressed for {framework}; "
                f"allowed: {_word(usual)}"
            )


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none of its own" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class FileWords:
    """Reads values of one framework's files that are of a kind.

    Args:
        framework: How it is called in errors.
    """

    framework: str

    def whole(self, keys: Keys, key: str, usual: int, *, least: int = 1) -> int:
        """Return the whole number of a file's *key*, or *usual* where there is none.

        Raises:
            PlanError: If it is something else, or smaller than *least*.
        """
        value = keys.get(key, usual)
        if type(value) is not int or value < least:
            raise self.unknown(key, shown(value), (f"whole numbers from {least}",))
        return value

    def word(self, keys: Keys, key: str, usual: str) -> str:
        """Return the word of a file's *key*, or *usual* where there is none.

        Raises:
            PlanError: If it is none.
        """
        value = keys.get(key, usual)
        if not isinstance(value, str):
            raise self.unknown(key, shown(value), ("a word",))
        return value

    def names(self, keys: Keys, key: str, usual: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words that a file's *key* lists, or *usual* where there is none.

        Raises:
            PlanError: If it is no list of words.
        """
        value = keys.get(key, usual)
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self.unknown(key, shown(value), ("a list of words",))
        return tuple(value)

    def lists(self, keys: Keys, key: str) -> list[list[str]]:
        """Return the lists of words of a file's *key*.

        Raises:
            PlanError: If it is something else, or empty.
        """
        value = keys[key]
        if not isinstance(value, list) or not value:
            raise self.unknown(key, shown(value), ("lists of words",))
        return [[*self.names({key: each}, key, ())] for each in value]

    def unknown(self, key: str, value: object, allowed: Iterable[object]) -> PlanError:
        """Return the error of a framework's value that no plan can have."""
        known = ", ".join(_theirs(each) for each in allowed)
        return PlanError(
            f"{key}={_theirs(value)} of {self.framework} is in no plan; allowed: {known}"
        )


@dataclass(frozen=True, slots=True)
class Words(FileWords):
    """Makes the rows of one framework."""

    def same(self, field: str, key: str, default: object = ABSENT) -> Row:
        """Return the row of a value that both write the same way."""
        return Row(
            fields=(field,),
            keys=(key,),
            write=lambda facts: {key: facts.get(field)},
            read=lambda keys, _: (
                {} if key not in keys and default is ABSENT else {field: keys.get(key, default)}
            ),
        )

    def choice(
        self,
        field: str,
        key: str,
        choices: Mapping[object, object],
        *,
        default: object = ABSENT,
        also: Mapping[object, object] | None = None,
    ) -> Row:
        """Return the row of a value that has other words in the framework.

        Args:
            field: Of the plan.
            key: Of the framework.
            choices: The framework's value by the plan's; None is written by leaving the key out.
            default: The framework's value where a file does not have the key.
            also: Plan's value by further values of the framework, which are only read.
        """
        back = {**{theirs: ours for ours, theirs in choices.items()}, **(also or {})}

        def write(facts: Facts) -> Keys:
            value = self.known(field, facts, choices)
            return {} if choices[value] is None else {key: choices[value]}

        def read(keys: Keys, _: Facts) -> Keys:
            absent = None if None in back else default
            theirs = keys.get(key, absent)
            if theirs is ABSENT:
                return {}
            if not _is_plain(theirs) or theirs not in back:
                raise self.unknown(key, theirs, (each for each in back if each is not None))
            return {field: back[theirs]}

        return Row(fields=(field,), keys=(key,), write=write, read=read)

    def together(
        self, field: str, choices: Mapping[object, Keys], *, absent: tuple[object, ...] = ()
    ) -> Row:
        """Return the row of a value that several keys tell together, as *choices* say.

        Values of *absent* say as little in a file as no key.
        """
        names = tuple(dict.fromkeys(key for each in choices.values() for key in each))

        def read(keys: Keys, _: Facts) -> Keys:
            theirs = {key: keys[key] for key in names if key in keys and keys[key] not in absent}
            for ours, each in choices.items():
                if each == theirs:
                    return {field: ours}
            raise self.unknown(" ".join(theirs), " ".join(map(str, theirs.values())), choices)

        return Row(
            fields=(field,),
            keys=names,
            write=lambda facts: dict(choices[self.known(field, facts, choices)]),
            read=read,
        )

    def rule(self, field: str, value: Callable[[Facts], object]) -> Row:
        """Return the row of what the framework does in any case, as *value* says.

        A field that has no effect in a plan is None, and anything goes.
        """

        def write(facts: Facts) -> Keys:
            if facts.get(field) is not None:
                self.known(field, facts, (value(facts),))
            return {}

        return Row(
            fields=(field,), keys=(), write=write, read=lambda _, facts: {field: value(facts)}
        )

    def only(self, field: str, *values: object) -> Row:
        """Return the row of a field of which the framework has these values; the first is read."""

        def write(facts: Facts) -> Keys:
            self.known(field, facts, values)
            return {}

        return Row(fields=(field,), keys=(), write=write, read=lambda *_: {field: values[0]})

    def told(self, fields: tuple[str, ...], line: Callable[[Facts], str | None]) -> Row:
        """Return the row of what the user's own script says; *line* is how, None for nothing."""

        def write(facts: Facts) -> Keys:
            text = line(facts)
            if text is not None:
                facts.notes.append(f"your script: {text}")
            return {}

        return Row(fields=fields, keys=(), write=write, read=lambda *_: {})

    def one_stage(self) -> tuple[Row, ...]:
        """Return the rows of a framework whose files know no pipelines."""
        return (
            self.only("pp", 1),
            self.only("num_virtual_stages", 1),
            self.told(("stages", "schedule"), lambda _: None),
        )

    def held(self, key: str, values: tuple[object, ...]) -> Row:
        """Return the row of a key that no plan speaks of, and that may have these values alone."""

        def read(keys: Keys, _: Facts) -> Keys:
            if key in keys and keys[key] not in values:
                raise self.unknown(key, keys[key], values)
            return {}

        return Row(fields=(), keys=(key,), write=lambda _: {}, read=read)

    def known(self, field: str, facts: Facts, allowed: Iterable[object]) -> object:
        """Return the value of *field* where it is one of *allowed*.

        A field whose axis has one rank has no effect: then the first goes for any.

        Raises:
            PlanError: If it is none of them.
        """
        value, choices = facts.get(field), list(allowed)
        if value in choices:
            return value
        declared = PLAN_FIELDS.get(field)
        axis = None if declared is None else declared.declaration.acts_on
        if axis is not None and facts.number(axis) == 1:
            return choices[0]
        raise not_offered(field, value, self.framework, choices)


def _theirs(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | None)


def write_keys(table: Iterable[Row], facts: Facts, framework: str) -> Keys:
    """Return the keys that a table makes of *facts*.

    Raises:
        PlanError: If the framework cannot express a value, or a field that is not at its default
            stands in no row.
    """
    rows = tuple(table)
    spoken = {name for row in rows for name in row.fields}
    for name, declared in PLAN_FIELDS.items():
        if name not in spoken and facts.get(name) != declared.default:
            raise not_offered(name, facts.get(name), framework, (declared.default,))
    found: Keys = {}
    for row in rows:
        found |= row.write(facts)
    return found


def read_keys(
    table: Iterable[Row], keys: Keys, facts: Facts, *, framework: str, harmless: tuple[str, ...]
) -> dict[str, object]:
    """Return the values that *keys* of a file stand for.

    Args:
        table: Of the framework.
        keys: Of the file.
        facts: What is known beside the file.
        framework: How it is called in errors.
        harmless: Patterns of keys that leave a layout as it is.

    Raises:
        PlanError: If there is a key that no row has, or a value that no plan can have.
    """
    rows = tuple(table)
    known = {key for row in rows for key in row.keys}
    for key in keys:
        if key not in known and not any(fnmatchcase(key, each) for each in harmless):
            raise PlanError(
                f"{shown(key)} of {framework} is unknown, and may change the layout; "
                f"{suggestion(key, known)}"
            )
    values = dict(facts.values)
    # Keys of no plan are refused first; what a framework does in any case depends on the others.
    for row in sorted(rows, key=lambda row: 0 if not row.fields else 1 if row.keys else 2):
        so_far = Facts(values, facts.model, facts.stack)
        values |= _read(row, keys, so_far, framework)
    return values


def _read(row: Row, keys: Keys, facts: Facts, framework: str) -> Mapping[str, object]:
    """Return what a row reads.

    Raises:
        PlanError: As the row does, or naming its keys and their values where a count is none.
    """
    found = row.read(keys, facts)
    said = ", ".join(f"{key}={shown(keys[key])}" for key in row.keys if key in keys)
    for name, value in found.items():
        if name not in COUNTS or value is None:
            continue
        if type(value) is not int:
            raise PlanError(f"{said} of {framework} is in no plan; allowed: a whole number")
        if value < COUNTS[name]:
            raise PlanError(f"{said or name} of {framework} leaves {name}={shown(value)}")
    return found
