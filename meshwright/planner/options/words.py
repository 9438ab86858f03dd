"""The one module that knows how typer works: records become options, words become values."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from enum import StrEnum
from types import NoneType, UnionType
from typing import (
    Annotated,
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

import typer
from typer.main import get_group, get_install_completion_arguments
from typer.models import ArgumentInfo

from meshwright.hwprofiles import GIGA, KILO, MEGA, TERA, shown, suggestion
from meshwright.planner.options.claims import release_claims
from meshwright.simulator import PlanError

T = TypeVar("T")
INFO = "info"  # what typer shows of the option of a field, in its metadata
INTERRUPTED = 130  # exit status after Ctrl-C: 128 and the number of the signal

# Digits are bounded: Python refuses to read, and to print, a number of 5,000 of them.
_NUMBER = re.compile(
    r"(?P<digits>[+-]?([0-9]{1,3}(,[0-9]{3}){1,9}|[0-9]{1,30}))"
    r"(?P<rest>(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?)(?P<scale> ?[kKMBT])?"
)
MOST_DIGITS = 30
_SCALES = {"": 1, "K": KILO, "M": MEGA, "B": GIGA, "T": TERA}
_WORDS = {int: "a whole number of at most 30 digits", float: "a number such as 300e9, 300B or 15T"}

# The root of typer's complaints about words: its module differs between versions, its place
# above BadParameter does not.
_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.mro()[2])


Given: TypeAlias = Mapping[str, object]
"""Values of options by the name of what they set; an option that was not given is not there."""


class Option(NamedTuple):
    """An option or an argument of a command.

    Args:
        key: What it sets: a field of a record or of a plan.
        name: How it is written, without its dashes, as a Python name.
        kind: Type of its value.
        info: What typer shows of it.
        default: Its value where it is not given.
    """

    key: str
    name: str
    kind: type
    info: object
    default: object = None


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options that a command takes together, and what it takes them as."""

    options: tuple[Option, ...]
    build: Callable[[Given], object]

    @classmethod
    def of(cls, record: type) -> "OptionGroup":
        """Return the options of a record of `records`: one for each of its fields."""
        hints = get_type_hints(record)
        options = tuple(
            Option(each.name, each.name, _kind(hints[each.name]), each.metadata[INFO], each.default)
            for each in fields(cast("Any", record))
        )
        return cls(options, lambda given: cast("Callable[..., object]", record)(**given))


def option(default: T, metavar: str, text: str, *, name: str | None = None) -> T:
    """Return the field of an option; to a type checker, its default.

    Args:
        default: Its value where it is not given.
        metavar: What stands for its value in help.
        text: What help says of it.
        name: How it is written, dashes included, where that is not the name of the field.
    """
    info = typer.Option(*([name] if name else []), metavar=metavar, help=text)
    return field(default=default, metadata={INFO: info})


def flag(name: str, text: str) -> bool:
    """Return the field of an option without a value, called *name*, of which help says *text*."""
    return field(default=False, metadata={INFO: typer.Option(name, help=text)})


def argument(default: T, metavar: str, text: str) -> T:
    """Return the field of a word that is no option: as `option`."""
    return field(default=default, metadata={INFO: typer.Argument(metavar=metavar, help=text)})


def as_command(
    run: Callable[..., int], *groups: type | OptionGroup, ends_in_words: bool = False
) -> Callable[..., int]:
    """Return *run* as typer wants it: a parameter for each option of the groups it takes.

    Typer sees texts and flags; the texts are read here, so that a mistake has our words.

    Args:
        run: Takes what each group builds, in order; returns the exit status.
        groups: Groups of options, or record types of this package.
        ends_in_words: Whether all from the first word on is another program's, options too.
    """
    taken = [each if isinstance(each, OptionGroup) else OptionGroup.of(each) for each in groups]
    parameters = [_parameter(each) for group in taken for each in group.options]
    defaults = {each.name: each.default for each in parameters}

    def command(**typed: object) -> int:
        values = defaults | typed
        return run(
            *(
                group.build({each.key: _read(each, values[each.key]) for each in group.options})
                for group in taken
            )
        )

    target = cast("Any", command)  # a function's attributes, which its type does not know
    target.__doc__ = run.__doc__
    target.ends_in_words = ends_in_words
    target.options = tuple(each for group in taken for each in group.options)
    _sign(target, parameters)
    return command


def _sign(command: Any, parameters: Sequence[inspect.Parameter]) -> None:  # noqa: ANN401
    """Tell typer which parameters a command has."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}


def _leave_out_untyped(command: Any, words: Sequence[str]) -> None:  # noqa: ANN401
    """Leave out the options that are not among *words*, each of which costs typer some time.

    Where a word may be an option of none of these names, such as ``--help``, all are left in.
    """
    # `-` alone is a value, as of `--json -`.
    typed = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
    names = {
        each.key: {option_name(each.name), f"--no{option_name(each.name)[1:]}"}
        for each in command.options
    }
    if typed <= set().union(*names.values()):
        words_alone = {each.key for each in command.options if isinstance(each.info, ArgumentInfo)}
        kept = [
            each
            for each in command.__signature__.parameters.values()
            if each.name in words_alone or names[each.name] & typed
        ]
        _sign(command, kept)


def _parameter(option: Option) -> inspect.Parameter:
    """Return an option as a parameter of texts and flags alone."""
    default: object = None if option.default is None else str(option.default)
    annotation: object = Annotated[str | None, option.info]
    if option.kind is list:
        default, annotation = option.default, Annotated[list[str] | None, option.info]
    if option.kind is bool:
        default, annotation = option.default, Annotated[bool | None, option.info]
        if option.default is not None:
            annotation = Annotated[bool, option.info]
    return inspect.Parameter(
        option.key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _kind(hint: object) -> type:
    """Return ``int`` of ``int | None``, ``list`` of one of texts."""
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
        known = [str(member) for member in kind]
        if text not in known:
            raise PlanError(f"{name} {shown(value)} is unknown; {suggestion(text, known)}")
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
    found = _NUMBER.fullmatch(text)
    if found is None or (is_whole and found["scale"]):
        return None
    digits = found["digits"].replace(",", "")
    scale = _SCALES[(found["scale"] or "").strip().upper()]
    if not is_whole:
        return float(digits + found["rest"]) * scale
    if "e" not in found["rest"].lower():
        return None if found["rest"] else int(digits)
    value = Decimal(digits + found["rest"])
    return (
        int(value)
        if value == value.to_integral_value() and value.adjusted() < MOST_DIGITS
        else None
    )


def run_command_line(
    names: Sequence[str], command: Callable[[str], Callable[..., int]], words: Sequence[str]
) -> int:
    """Run the command that *words* name and return its exit status; no words show the help.

    Args:
        names: Of all commands, in the order of the help.
        command: Makes the one of a name.
        words: What was typed.

    Raises:
        PlanError: If the words are not what a command takes; one line.
        KeyboardInterrupt: If the user stops the command.
    """
    named = words[:1] if words and words[0] in names else names
    if words and not words[0].startswith("-") and named is names:
        raise PlanError(f"unknown command {shown(words[0])}; {suggestion(words[0], names)}")
    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Lay out the training of a large model on a cluster: search, simulate, prove.",
        epilog="meshwright --version shows the version.",
    )
    for name in named:
        run = command(name)
        if named is not names:
            told = cast("Any", run)
            _check_once(words[1:], told.options, ends_in_words=told.ends_in_words)
            _leave_out_untyped(run, words[1:])
        between = not cast("Any", run).ends_in_words
        app.command(name, context_settings={"allow_interspersed_args": between})(run)
    group = get_group(app)
    if named is names:  # typer adds these itself where it chooses between group and command
        group.params += get_install_completion_arguments()
    try:
        status = group.main(
            args=list(words) or ["--help"], prog_name="meshwright", standalone_mode=False
        )
    except _USAGE_ERROR as error:
        raise PlanError(_first_lower(error.format_message())) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    finally:
        release_claims()
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return int(status or 0)


def _check_once(words: Sequence[str], options: Sequence[Option], *, ends_in_words: bool) -> None:
    """Raise PlanError when an option that is not a list is given more than once."""
    kinds = {option_name(each.name): each.kind for each in options}
    given: set[str] = set()
    rest = iter(words)
    for word in rest:
        if word == "--" or (ends_in_words and not word.startswith("-")):
            return
        name, sign, _ = word.partition("=")
        if name not in kinds:
            name = f"--{name.removeprefix('--no-')}"
        kind = kinds.get(name)
        if kind is None:
            continue
        if kind is not bool and not sign:
            next(rest, None)
        if name in given and kind is not list:
            raise PlanError(f"{name} is given more than once; allowed: once")
        given.add(name)


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def option_name(field: str) -> str:
    """Return the option of a field.

    >>> option_name("micro_batch")
    '--micro-batch'
    """
    return f"--{field.replace('_', '-')}"
