"""Options of commands: their declaration, and the reading of their values.

What is not plainly right is left to typer (`meshwright.command_line`), which is imported for that
alone: it helps, completes, and says what is wrong with words.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from decimal import Decimal
from enum import StrEnum
from types import NoneType, UnionType
from typing import (
    Any,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from meshwright.hwprofiles import GIGA, KILO, MEGA, TERA, shown, suggestion
from meshwright.simulator import PlanError

T = TypeVar("T")

# Digits are bounded: Python refuses to read, and to print, a number of 5,000 of them.
_NUMBER = re.compile(
    r"(?P<digits>[+-]?([0-9]{1,3}(,[0-9]{3}){1,9}|[0-9]{1,30}))"
    r"(?P<rest>(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?)(?P<scale> ?[kKMBT])?"
)
MOST_DIGITS = 30
_SCALES = {"": 1, "K": KILO, "M": MEGA, "B": GIGA, "T": TERA}
_WORDS = {int: "a whole number of at most 30 digits", float: "a number such as 300e9, 300B or 15T"}


Given: TypeAlias = Mapping[str, object]
"""Values of options by the name of what they set; an option that was not given is not there."""


class Option(NamedTuple):
    """An option or an argument of a command.

    Args:
        key: What it sets: a field of a record or of a plan.
        name: How it is called, without its dashes, as a Python name.
        kind: Type of its value.
        metavar: What stands for its value in help.
        help: What help says of it.
        default: Its value where it is not given.
        flags: How it is written, as ``--x`` or ``--x/--no-x``; empty where its name says it.
        is_argument: Whether it is a word of its own.
    """

    key: str
    name: str
    kind: type
    metavar: str | None = None
    help: str = ""
    default: object = None
    flags: str = ""
    is_argument: bool = False

    @property
    def spellings(self) -> list[str]:
        """Its spellings; the second one of a switch turns it off."""
        return (self.flags or option_name(self.name)).split("/")


class OptionGroup(NamedTuple):
    """Options that a command takes together, and the record that they build."""

    options: tuple[Option, ...]
    build: Callable[[Given], object]

    @classmethod
    def of(cls, record: type) -> "OptionGroup":
        """Return the options of a record of `records`: one for each of its fields."""
        # Annotations may be texts.
        hints = get_type_hints(record)
        options = tuple(
            Option(
                each.name, each.name, _kind(hints[each.name]), default=each.default, **each.metadata
            )
            for each in fields(cast("Any", record))
        )
        return cls(options, lambda given: cast("Callable[..., object]", record)(**given))


def option(default: T, metavar: str, text: str, *, name: str = "") -> T:
    """Return the field of an option; to a type checker, its default.

    Args:
        default: Its value where it is not given.
        metavar: What stands for its value in help.
        text: What help says of it.
        name: How it is written, dashes included, where that is not the name of the field.
    """
    return field(default=default, metadata={"metavar": metavar, "help": text, "flags": name})


def flag(name: str, text: str) -> bool:
    """Return the field of an option without a value, with its *name* and help *text*."""
    return field(default=False, metadata={"flags": name, "help": text})


def argument(default: T, metavar: str, text: str) -> T:
    """Return the field of a word that is no option: as `option`."""
    return field(default=default, metadata={"metavar": metavar, "help": text, "is_argument": True})


class Command(NamedTuple):
    """Command: a function, and the groups of options that build its arguments.

    Args:
        run: Takes what each group builds, in order; returns the exit status.
        groups: Of its options.
        ends_in_words: Whether all from the first word on is another program's, options too.
    """

    run: Callable[..., int]
    groups: tuple[OptionGroup, ...]
    ends_in_words: bool = False

    @property
    def options(self) -> list[Option]:
        """All of its options and arguments, in the order of its help."""
        return [each for group in self.groups for each in group.options]

    def typed(self, words: Sequence[str]) -> dict[str, object] | None:
        """Return the texts and switches typed, by option; None where typer has to say more.

        Raises:
            PlanError: If an option that is not a list is given more than once.
        """
        by_flag = {
            flag: each for each in self.options if not each.is_argument for flag in each.spellings
        }
        texts: dict[str, Any] = {}
        loose: list[str] = []
        is_plain = _is_unicode(words)
        rest = iter(words)
        for word in rest:
            name, sign, value = word.partition("=")
            # All from here on belongs to another program, or is no option.
            if word == "--" or (self.ends_in_words and not word.startswith("-")):
                loose += [*rest] if word == "--" else [word, *rest]
            elif word == "-" or not word.startswith("-"):
                loose.append(word)
            elif name not in by_flag:
                is_plain = False
            elif by_flag[name].kind is bool:
                is_plain = is_plain and not sign
                _set_value(texts, by_flag[name], value=name == by_flag[name].spellings[0])
            else:
                text = value if sign else next(rest, None)
                is_plain = is_plain and text is not None
                _set_value(texts, by_flag[name], value=text)
        for each in self.options:
            if each.is_argument and loose:
                count = len(loose) if each.kind is list else 1
                texts[each.key] = loose[:count] if each.kind is list else loose[0]
                del loose[:count]
        return texts if is_plain and not loose else None

    def __call__(self, typed: Given) -> int:
        """Run with the texts and switches that were typed; return the exit status.

        Raises:
            PlanError: If a text is no value of its option.
        """
        built = [
            group.build(
                {each.key: _read(each, typed.get(each.key, each.default)) for each in group.options}
            )
            for group in self.groups
        ]
        return self.run(*built)


def as_command(
    run: Callable[..., int], *groups: type | OptionGroup, ends_in_words: bool = False
) -> Command:
    """Return the command that *run* is, of groups of options or record types of this package."""
    taken = [each if isinstance(each, OptionGroup) else OptionGroup.of(each) for each in groups]
    return Command(run, tuple(taken), ends_in_words)


def _kind(hint: object) -> type:
    """Return the type of an annotation: ``int`` of ``int | None``, ``list`` of one of texts."""
    kinds = [hint]
    if get_origin(hint) in (Union, UnionType):
        kinds = [each for each in get_args(hint) if each is not NoneType]
    return cast("type", get_origin(kinds[0]) or kinds[0])


def _read(option: Option, value: object) -> object:
    """Return the value of an option, of the type it has.

    Raises:
        PlanError: If a text is no such value.
    """
    kind = option.kind
    if not isinstance(value, str) or kind is str:
        return value
    name, text = option_name(option.name), value.strip()
    if issubclass(kind, StrEnum):
        choices = [str(member) for member in kind]
        if text not in choices:
            raise PlanError(f"{name} {shown(value)} is unknown; {suggestion(text, choices)}")
        return kind(text)
    number = _number(text, is_whole=kind is int)
    if number is None:
        raise PlanError(f"{name} {shown(value)} is not {_WORDS[kind]}")
    return number


def read_value(option: Option, text: str) -> object:
    """Return the value of an option as it is read from the command line; of a flag, yes or no.

    Raises:
        PlanError: If *text* is no such value.
    """
    if option.kind is not bool:
        return _read(option, text)
    flags = {"yes": True, "no": False, "true": True, "false": False}
    word = text.strip().lower()
    if word not in flags:
        raise PlanError(f"{option_name(option.name)} {shown(text)} is unknown; allowed: yes or no")
    return flags[word]


def _number(text: str, *, is_whole: bool) -> float | None:
    """Return a number as people write it, None where it is none.

    A whole number takes no letter for its scale: 8K positions are 8,192 to some.

    >>> [_number(text, is_whole=True) for text in ("1,024", "1.5e3", "8K", "8.0", "1,24")]
    [1024, 1500, None, None, None]
    >>> [_number(text, is_whole=False) for text in ("300e9", "15T", "1.5 B")]
    [300000000000.0, 15000000000000.0, 1500000000.0]
    """
    match = _NUMBER.fullmatch(text)
    if match is None or (is_whole and match["scale"]):
        return None
    digits = match["digits"].replace(",", "")
    scale = _SCALES[(match["scale"] or "").strip().upper()]
    if not is_whole:
        return float(digits + match["rest"]) * scale
    # A fraction is no whole number, an exponent may make one: 1.5e3.
    if "e" not in match["rest"].lower():
        return None if match["rest"] else int(digits)
    value = Decimal(digits + match["rest"])
    return (
        int(value)
        if value == value.to_integral_value() and value.adjusted() < MOST_DIGITS
        else None
    )


def _is_unicode(words: Sequence[str]) -> bool:
    """Return True if all is text, without bytes of another encoding (surrogate escapes)."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True


def _set_value(typed: dict[str, Any], option: Option, *, value: object) -> None:
    if option.kind is list:
        typed.setdefault(option.key, []).append(value)
    elif option.key in typed:
        raise PlanError(f"{option.spellings[0]} is given more than once; allowed: once")
    else:
        typed[option.key] = value


def option_name(field: str) -> str:
    """Return the option of a field.

    >>> option_name("micro_batch")
    '--micro-batch'
    """
    return f"--{field.replace('_', '-')}"
