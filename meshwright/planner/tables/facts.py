"""Facts of a job and its plan, while a framework's keys are written or read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, TypeAlias, cast

from meshwright.hwprofiles import UNSET, Number, Precision, StackProfile, parsed, shown
from meshwright.simulator import ModelSpec, PlanError
from meshwright.simulator.layout import PLAN_FIELDS, code_of

Keys: TypeAlias = dict[str, object]
"""Values by the framework's keys; a key in a section is written with dots."""


class MissingError(PlanError):
    """Error of a value that a configuration leaves open and a plan needs.

    Args:
        name: Of the field, or of the job's fact.
        why: What of the configuration leaves it open.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} is missing; {why}")
        self.name, self.why = name, why


STACK_FACT, MODEL_FACT = "stack.", "model."  # begin the names of facts


@dataclass(frozen=True, slots=True)
class Facts:
    """Known facts of a job and its plan, by the names of their fields.

    In an export that is everything, in an import what the entries before have read.
    """

    values: Mapping[str, object]
    model: ModelSpec | None = None
    stack: StackProfile | None = None
    notes: list[str] = field(default_factory=list)

    def number(self, name: str) -> int:
        """Return a count; 1 where nothing is known of it."""
        value = self.num_microbatches if name == "num_microbatches" else self.values.get(name)
        # A degree that nobody says is 1.
        return 1 if value is None else cast("int", value)

    def get(self, name: str) -> object:
        """Return a value, or a fact of model or stack; None where nothing is known of it."""
        if name == "num_microbatches":
            return self.num_microbatches
        if name == "storage":
            precision = cast("Precision | None", self.values.get("precision"))
            return None if precision is None else precision.storage
        if name.startswith(STACK_FACT) and self.stack is not None:
            return attrgetter(name.removeprefix(STACK_FACT))(self.stack)
        if name.startswith(MODEL_FACT):
            value: object = self.model
            for word in name.removeprefix(MODEL_FACT).split("."):
                value = getattr(value, word, None)
            return value
        return self.values.get(name)

    def holds(self, text: str) -> bool:
        """Return True if a condition holds; an empty one does."""
        return not text or bool(parsed(text).holds(_Numbers(self)))

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a data-parallel rank in a step."""
        rank = self.number("dp") * self.number("microbatch_size")
        return self.number("global_batch_size") // rank

    @property
    def world_size(self) -> int:
        """Ranks of the job; raises MissingError if neither the file nor the user says."""
        if self.values.get("world_size") is None:
            raise MissingError("world_size", "the file does not say how many")
        return self.number("world_size")

    @property
    def is_launched(self) -> bool:
        """True if the command that starts the job is read, too, not its file alone."""
        return any(self.values.get(each) is not None for each in ("num_nodes", "ranks_per_node"))


class _Numbers(NamedTuple):
    """Numbers that the names of a condition stand for."""

    facts: Facts

    def number(self, name: str) -> Number:
        """Return the number of a field, or a fact; a count of which nothing is known is 1."""
        value, declared = self.facts.get(name), PLAN_FIELDS.get(name)
        return code_of(name, declared.default if declared and value is None else value)

    def code(self, name: str, value: object) -> Number:
        """Return the code of *value* where a condition compares it with *name*."""
        return code_of(name, value)


def spelled(value: object) -> str:
    """Return the spelling of a value in tables of frameworks."""
    if value is None:
        return UNSET
    return str(value).lower() if isinstance(value, bool) else str(value)


def value_of(name: str, word: object) -> object:
    """Return the value of a field, or of a fact, that a table writes as *word*."""
    text, declared = spelled(word), PLAN_FIELDS.get(name)
    if text == UNSET:
        return None
    if name == "precision":
        return Precision(text)
    if declared is None or declared.kind is str:
        return text
    if declared.choices:
        return next(each for each in declared.choices if spelled(each) == text)
    return int(text)


@dataclass(frozen=True, slots=True)
class FileValues:
    """Typed reader of the values of a framework's files.

    Args:
        framework: How it is called in errors.
    """

    framework: str

    def whole(self, keys: Keys, key: str, default: int, *, least: int = 1) -> int:
        """Return the whole number of a file's *key*, or *default* where there is none.

        Raises:
            PlanError: If it is something else, or smaller than *least*.
        """
        value = keys.get(key, default)
        if type(value) is not int or value < least:
            raise self.unknown(key, shown(value), (f"whole numbers from {least}",))
        return value

    def word(self, keys: Keys, key: str, default: str) -> str:
        """Return the word of a file's *key*, or *default* where there is none.

        Raises:
            PlanError: If it is none.
        """
        value = keys.get(key, default)
        if not isinstance(value, str):
            raise self.unknown(key, shown(value), ("a word",))
        return value

    def names(self, keys: Keys, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the words that a file's *key* lists, or *default* where there is none.

        Raises:
            PlanError: If it is no list of words.
        """
        value = keys.get(key, default)
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

    def held(self, keys: Keys, key: str, values: tuple[object, ...]) -> None:
        """Raise PlanError where a key of a file has another value than those of *values*."""
        if key in keys and keys[key] not in values:
            raise self.unknown(key, keys[key], values)

    def unknown(self, key: str, value: object, allowed: Iterable[object]) -> PlanError:
        """Return the error of a framework's value that no plan can have."""
        allowed_text = ", ".join(theirs(each) for each in allowed)
        return PlanError(
            f"{key}={theirs(value)} of {self.framework} is in no plan; allowed: {allowed_text}"
        )


def theirs(value: object) -> str:
    """Return the text of a framework's value."""
    return str(value).lower() if isinstance(value, bool) else str(value)
