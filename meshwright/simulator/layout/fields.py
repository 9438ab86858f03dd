"""How the field of a plan is declared: once, for everyone who reads or writes plans.

The command line makes options of fields, plan files and JSON their keys, the search its columns,
reports and CSV files theirs; `docs/plan.md` lists them. A new field is one declaration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from meshwright.hwprofiles import ContextParallel, Dispatcher, ExpertOverlap
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.axes import AXES, Axis

T = TypeVar("T")
DECLARATION = "declaration"


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What is known of a field beside its name, type and default.

    Args:
        help: What its option says.
        option: Name of its option where it is not the field's own.
        metavar: What stands for its value in help; by default what its type says.
        group: Which commands take the option: ``layout`` is of both search and simulate.
        after: Field behind which the option stands in help, where it is not the one before.
        heading: Head of its column in tables of plans; such a field is searched.
        is_limited: Whether a search takes a largest value.
        is_rare: Whether files leave it out where it has its default.
        is_asked: Whether a search has other values than the habit only where it is asked to.
        is_basic: Whether every plan file and every row of a CSV file has it.
        choices: Values of a text, by name.
        members: What a list may have, each once and in this order.
        offered_by: Trait of the stacks that offer it, or that lists which values they offer.
        acts_on: Axis without which it has no effect, or the number of ranks that share parameters.
        without_attention: Values that a model without attention may have; None for all, empty where
            the field says nothing of such a model.
        axis: The axis whose degree it is.
        of_experts: It lays routed experts out: a model without them has its default.
    """

    help: str = ""
    option: str | None = None
    metavar: str | None = None
    group: str = "layout"
    after: str | None = None
    heading: str | None = None
    is_limited: bool = False
    is_basic: bool = False
    is_rare: bool = False
    is_asked: bool = False
    choices: Callable[[], tuple[str, ...]] | None = None
    members: tuple[object, ...] = ()
    offered_by: str | None = None
    acts_on: str | None = None
    without_attention: tuple[object, ...] | None = None
    axis: Axis | None = None
    of_experts: bool = False

    def field(self, default: T) -> T:
        """Return a dataclass field with this declaration; to a type checker, its default."""
        return field(default=default, metadata={DECLARATION: self})


def degree(axis: Axis) -> int:
    """Return the field of the degree of *axis*."""
    rest = " [what is left]" if AXES[axis].takes_rest else ""
    declaration = Declaration(
        help=f"{AXES[axis].title} degree{rest}.",
        heading=axis.value,
        is_limited=True,
        is_basic=not AXES[axis].is_rare,
        offered_by=AXES[axis].offered_by,
        axis=axis,
    )
    return declaration.field(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """Ranks along each axis, and how they share what an axis splits."""

    tp: int = degree(Axis.TP)
    pp: int = degree(Axis.PP)
    cp: int = degree(Axis.CP)
    dp: int = degree(Axis.DP)

    cp_type: ContextParallel | None = Declaration(
        help="How ranks with parts of a sequence attend to all of it [the stack's].",
        heading="cp type",
        is_asked=True,
        offered_by="context_parallel",
        acts_on=Axis.CP,
    ).field(None)

    cp_inner: int | None = Declaration(
        help="Ranks of a ring+all-to-all that swap tokens for heads [those of a node].",
        metavar="N",
        heading="cp inner",
        acts_on=Axis.CP,
    ).field(None)
    """Neighbours that swap tokens for heads in a ring of such groups; of no other ``cp_type``."""

    ep: int = Declaration(
        help="Expert-parallel degree.",
        metavar="N",
        heading="ep",
        is_limited=True,
        offered_by="expert_parallel",
        of_experts=True,
    ).field(1)
    """Ranks among which the routed experts of a layer are divided, of those of a pipeline stage."""

    etp: int | None = Declaration(
        help="Ranks that split each expert's widths [--tp].",
        metavar="N",
        heading="etp",
        of_experts=True,
    ).field(None)

    dispatcher: Dispatcher | None = Declaration(
        help="How tokens go to ranks of experts [the stack's].",
        heading="dispatcher",
        is_asked=True,
        offered_by="dispatchers",
        of_experts=True,
    ).field(None)

    expert_overlap: ExpertOverlap | None = Declaration(
        help="What another microbatch hides of exchanges with experts [nothing].",
        heading="overlap",
        group="replication",
        is_rare=True,
        is_asked=True,
        offered_by="expert_overlaps",
        of_experts=True,
    ).field(None)


class PlanField(NamedTuple):
    """A field of a plan: its name, the type of its values, its default and its declaration."""

    name: str
    kind: type
    is_optional: bool
    default: object
    declaration: Declaration

    @property
    def option(self) -> str:
        """The field's option without its dashes, as a Python name."""
        return self.declaration.option or self.name

    @property
    def divides_experts(self) -> bool:
        """Whether it says among how many ranks experts are divided."""
        return self.declaration.of_experts and self.kind is int

    @property
    def default_goes_without_saying(self) -> bool:
        """Whether no table of plans says that all of them have the default."""
        declaration = self.declaration
        return declaration.axis is not None or declaration.of_experts or declaration.is_asked

    @property
    def limit(self) -> str:
        """Name of the largest value that a search may take.

        The count that ``num_`` announces is left out: ``max_virtual_stages``.
        """
        return f"max_{self.name.removeprefix('num_')}"

    @property
    def choices(self) -> tuple[object, ...]:
        """All values in order, where they are few; a column holds the index of one."""
        if self.declaration.choices is not None:
            return self.declaration.choices()
        if self.kind is bool:
            return (False, True)
        return _members(self.kind)

    @property
    def members(self) -> list[str]:
        """What a list may name."""
        return [str(each) for each in self.declaration.members]

    def code(self, value: object) -> int:
        """Return *value* as the whole number that a column of the search holds; None is 0.

        Of a list it has a bit for each member.
        """
        if self.is_optional and value is None:
            return 0
        if self.declaration.members:
            return sum(1 << self.declaration.members.index(each) for each in cast("Any", value))
        shift = self.is_optional
        return shift + self.choices.index(value) if self.choices else cast("int", value)

    def value(self, code: int) -> object:
        """Return the value that *code* stands for."""
        if self.is_optional and code == 0:
            return None
        if self.declaration.members:
            listed = enumerate(self.declaration.members)
            return tuple(each for place, each in listed if code >> place & 1)
        return self.choices[code - self.is_optional] if self.choices else code

    def values(self, codes: Sequence[int]) -> list[object]:
        """Return what each of *codes* stands for."""
        known = {code: self.value(code) for code in set(codes)}
        return [known[code] for code in codes]


@cache
def _members(kind: type) -> tuple[object, ...]:
    return tuple(kind) if issubclass(kind, StrEnum) else ()


def fields_of(record: type) -> tuple[PlanField, ...]:
    """Return the declared fields of a dataclass, in order."""
    hints = get_type_hints(record)
    return tuple(
        PlanField(
            name=each.name,
            kind=_kind(hints[each.name]),
            is_optional=NoneType in get_args(hints[each.name]),
            default=each.default,
            declaration=each.metadata[DECLARATION],
        )
        for each in fields(cast("Any", record))
        if DECLARATION in each.metadata
    )


def _kind(hint: object) -> type:
    """Return ``int`` of ``int | None``, ``str`` of a choice between a number and a word."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [each for each in get_args(hint) if each is not NoneType]
        return kinds[0] if len(kinds) == 1 else str
    kind = get_origin(hint) or hint
    return cast("type", kind)


def written(value: object) -> str:
    """Return a value as Python code has it.

    >>> written(Axis.TP), written((1, 2))
    ('Axis.TP', '(1, 2)')
    """
    return f"{type(value).__name__}.{value.name}" if isinstance(value, StrEnum) else repr(value)


def in_option_order(declared_fields: tuple[PlanField, ...]) -> list[PlanField]:
    """Return fields in the order in which help shows their options."""
    ordered = [each for each in declared_fields if each.declaration.after is None]
    for each in declared_fields:
        if each.declaration.after is not None:
            names = [other.name for other in ordered]
            ordered.insert(names.index(each.declaration.after) + 1, each)
    return ordered


MAX_SERVERS = 1024
MAX_SLOWDOWN = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer:
    """Where parameters live when workers pull them, and how workers keep step."""

    servers: int | Literal["all"] = Declaration(
        help="Parameter servers: own hosts, or all [1].", metavar="N|all", group="replication"
    ).field(1)
    """Hosts of their own over which parameters are spread, or all workers."""

    asynchronous: bool = Declaration(
        help="Workers loop on their own.", option="async", group="replication"
    ).field(False)
    """Each worker loops on its own; if not, all wait for the update."""

    slow_worker: float = Declaration(
        help="How much slower the last worker is [1].", metavar="FACTOR", group="replication"
    ).field(1.0)
    """How many times longer the last worker computes than the others."""

    def __post_init__(self) -> None:
        """Refuse values that no run can have."""
        if self.servers != "all" and not 1 <= self.servers <= MAX_SERVERS:
            raise PlanError(f"servers={self.servers} is out of range; allowed 1 to {MAX_SERVERS}")
        if not 1 <= self.slow_worker <= MAX_SLOWDOWN:
            raise PlanError(
                f"slow_worker={self.slow_worker:g} is out of range; allowed 1 to {MAX_SLOWDOWN:g}"
            )


SERVER_FIELDS = {each.name: each for each in fields_of(ParameterServer)}
