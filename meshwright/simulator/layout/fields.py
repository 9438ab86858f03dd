"""Declarations of plan fields, read by everything that reads or writes plans.

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
    """Metadata of a plan field, in addition to its name, type and default.

    Args:
        help: Help text of its option.
        option: Name of its option, if another than the field's.
        metavar: Placeholder of its value in help; by default that of its type.
        group: Group of commands that take the option: ``layout`` is of search and simulate.
        after: Field behind which help lists the option, if not the one declared before.
        heading: Heading of its column in tables of plans; such a field is searched.
        is_limited: Whether a search takes a largest value.
        is_rare: Whether files leave it out where it has its default.
        is_asked: Whether a search varies it from the stack's default only on request.
        is_basic: Whether every plan file and every row of a CSV file has it.
        choices: Values of a text, by name.
        members: Members that a list may have, each once and in this order.
        offered_by: Stack trait, a flag that the field is supported or a list of supported values.
        acts_on: Axis, or joint count of ranks, at whose degree 1 it has no effect.
        without_attention: Values that a model without attention may have; None for all, empty where
            the field has no meaning for such a model.
        axis: The axis whose degree it is.
        of_experts: Whether it is of expert parallelism: models without experts have its default.
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
    """Degrees of all axes, and the types of context and expert parallelism."""

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
    """Ranks of a Ulysses group in hybrid context parallelism; unset with another ``cp_type``."""

    ep: int = Declaration(
        help="Expert-parallel degree.",
        metavar="N",
        heading="ep",
        is_limited=True,
        offered_by="expert_parallel",
        of_experts=True,
    ).field(1)
    """Ranks of a pipeline stage over which the routed experts of a layer are divided."""

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
        """Whether it is a degree of expert parallelism."""
        return self.declaration.of_experts and self.kind is int

    @property
    def default_goes_without_saying(self) -> bool:
        """Whether tables of plans omit it where all plans have the default."""
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
        """Names of the members that a list may have."""
        return [str(each) for each in self.declaration.members]

    def code(self, value: object) -> int:
        """Return the integer that a column of the search holds for *value*; None is 0.

        A list is a bit mask of its members.
        """
        if self.is_optional and value is None:
            return 0
        if self.declaration.members:
            return sum(1 << self.declaration.members.index(each) for each in cast("Any", value))
        shift = self.is_optional  # 0 is None, so that choices start at 1
        return shift + self.choices.index(value) if self.choices else cast("int", value)

    def value(self, code: int) -> object:
        """Return the value that *code* encodes."""
        if self.is_optional and code == 0:
            return None
        if self.declaration.members:
            listed = enumerate(self.declaration.members)
            return tuple(member for bit, member in listed if code >> bit & 1)
        return self.choices[code - self.is_optional] if self.choices else code

    def values(self, codes: Sequence[int]) -> list[object]:
        """Return the values that *codes* encode, each distinct one decoded once."""
        decoded = {code: self.value(code) for code in set(codes)}
        return [decoded[code] for code in codes]


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
    """Return ``int`` for ``int | None``, ``str`` for a union of a number and a word."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [each for each in get_args(hint) if each is not NoneType]
        return kinds[0] if len(kinds) == 1 else str
    kind = get_origin(hint) or hint
    return cast("type", kind)


def written(value: object) -> str:
    """Return a value as Python source.

    >>> written(Axis.TP), written((1, 2))
    ('Axis.TP', '(1, 2)')
    """
    return f"{type(value).__name__}.{value.name}" if isinstance(value, StrEnum) else repr(value)


def in_option_order(declared_fields: tuple[PlanField, ...]) -> list[PlanField]:
    """Return fields in the order of their options in help."""
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
    """Placement and synchronisation of parameter servers, from which workers pull parameters."""

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
