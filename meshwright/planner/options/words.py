"""The one module that knows how typer works: records become options, words become values."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from typer.main import get_command

from meshwright.hwprofiles.names import shown, suggestion
from meshwright.simulator import PlanError

INTERRUPTED = 130  # exit status after Ctrl-C: 128 and the number of the signal

# Digits are bounded: Python refuses to read, and to print, a number of 5,000 of them.
_NUMBERS: dict[type, tuple[Callable[[str], float], re.Pattern[str], str]] = {
    int: (int, re.compile(r"[+-]?[0-9]{1,30}"), "a whole number of at most 30 digits"),
    float: (
        float,
        re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?"),
        "a number such as 300e9",
    ),
}

# The root of typer's complaints about words: its module differs between versions, its place
# above BadParameter does not.
_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.mro()[2])


def as_command(run: Callable[..., int], *records: type) -> Callable[..., int]:
    """Return *run* as typer wants it: a parameter for each field of the records it takes.

    Typer sees texts and flags; the texts are read here, so that a mistake has our words.

    Args:
        run: Takes one instance of each record, in order; returns the exit status.
        records: Record types of this module.
    """
    hints = [get_type_hints(record, include_extras=True) for record in records]

    def command(**values: object) -> int:
        return run(
            *(
                cast("Callable[..., object]", record)(
                    **{name: _read(name, hint, values[name]) for name, hint in group.items()}
                )
                for record, group in zip(records, hints, strict=True)
            )
        )

    parameters = [
        _parameter(field, group[field.name])
        for record, group in zip(records, hints, strict=True)
        for field in fields(record)
    ]
    target = cast("Any", command)  # a function's attributes, which its type does not know
    target.__doc__ = run.__doc__
    target.__signature__ = inspect.Signature(parameters)
    target.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(field: Field[object], hint: object) -> inspect.Parameter:
    """Return a field as a parameter of texts and flags alone."""
    annotation, default = hint, field.default
    if get_origin(_kind(hint)) is not list and _kind(hint) is not bool:
        (info,) = get_args(hint)[1:]
        annotation = Annotated[str | None, info]
        default = None if default is None else str(default)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _kind(hint: object) -> type:
    """Return ``int`` of ``Annotated[int | None, ...]``."""
    inner = get_args(hint)[0]
    kinds = [each for each in get_args(inner) or (inner,) if each is not NoneType]
    return cast("type", kinds[0])


def _read(name: str, hint: object, value: object) -> object:
    """Return the value of an option, of the type its field has.

    Raises:
        PlanError: If a text is no such value.
    """
    kind = _kind(hint)
    if not isinstance(value, str) or kind is str:
        return value
    option, text = option_name(name), value.strip()
    if issubclass(kind, StrEnum):
        known = [str(member) for member in kind]
        if text not in known:
            raise PlanError(f"{option} {shown(value)} is unknown; {suggestion(text, known)}")
        return kind(text)
    read, pattern, word = _NUMBERS[kind]
    if not pattern.fullmatch(text):
        raise PlanError(f"{option} {shown(value)} is not {word}")
    return read(text)


def run_command_line(commands: Mapping[str, Callable[..., int]], words: Sequence[str]) -> int:
    """Run the command that *words* name and return its exit status; no words show the help.

    Raises:
        PlanError: If the words are not what a command takes; one line.
        KeyboardInterrupt: If the user stops the command.
    """
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise PlanError(f"unknown command {shown(words[0])}; {suggestion(words[0], commands)}")
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Lay out the training of a large model on a cluster: search, simulate, prove.",
        epilog="meshwright --version shows the version.",
    )
    for name, command in commands.items():
        app.command(name)(command)
    try:
        status = get_command(app).main(
            args=list(words) or ["--help"], prog_name="meshwright", standalone_mode=False
        )
    except _USAGE_ERROR as error:
        raise PlanError(_first_lower(error.format_message())) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return int(status or 0)


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def option_name(field: str) -> str:
    """Return the option of a field.

    >>> option_name("micro_batch")
    '--micro-batch'
    """
    return f"--{field.replace('_', '-')}"
