"""The options of the command line, as records; the one module here that knows typer.

A command takes records (`JobOptions`, `LayoutOptions`, ...); `as_command` turns each of their
fields into an option.  Fields are None where an option was not given.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from math import isfinite
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer
from typer.main import get_command

from hwprofiles import Attention, Precision, Recompute, parse_bytes, parse_price
from hwprofiles.names import shown, suggestion
from simulator import PlanError

MAX_GPUS = 10_000_000
MAX_COUNT = 10_000_000
MAX_TOP = 1_000
MAX_TOKENS = 1e18
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


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What is trained, on what, with what software."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Built-in name, config.json or model TOML."),
    ] = None
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Built-in name or cluster TOML.")
    ] = None
    gpus: Annotated[int | None, typer.Option(metavar="N", help="Devices of the run.")] = None
    global_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences of one optimizer step.")
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a sequence [the model's].")
    ] = None
    precision: Annotated[
        Precision | None,
        typer.Option(
            metavar="|".join(Precision),
            help="Number format [bf16; fp16 on older devices and stacks].",
        ),
    ] = None
    stack: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Training software [megatron-core]."),
    ] = None
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help='Most a device may use, such as "72 GiB".'),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutOptions:
    """A layout, or the axes of one that are pinned."""

    tp: Annotated[int | None, typer.Option(metavar="N", help="Tensor-parallel degree.")] = None
    pp: Annotated[int | None, typer.Option(metavar="N", help="Pipeline-parallel degree.")] = None
    dp: Annotated[
        int | None, typer.Option(metavar="N", help="Data-parallel degree [what is left].")
    ] = None
    vpp: Annotated[
        int | None, typer.Option(metavar="N", help="Virtual stages of a pipeline rank.")
    ] = None
    micro_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences of one forward pass.")
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Pipeline schedule [1f1b; interleaved with --vpp]."),
    ] = None
    zero: Annotated[int | None, typer.Option(metavar="N", help="ZeRO stage [the stack's].")] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Split activations outside tensor-parallel regions over the tp axis.",
            show_default=False,
        ),
    ] = None
    recompute: Annotated[
        Recompute | None,
        typer.Option(metavar="|".join(Recompute), help="Activation recomputation."),
    ] = None
    attention: Annotated[
        Attention | None,
        typer.Option(metavar="|".join(Attention), help="Attention kernel [the stack's]."),
    ] = None
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="RULE|LIST",
            help="Layers of the stages: even, balanced, greedy or 3,2,2,1 [the stack's].",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    """How data-parallel ranks share states: shards and replicas of them, or servers and workers."""

    dp_shard: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks that share one set of shards [--dp].")
    ] = None
    reshard_after_forward: Annotated[
        bool | None, typer.Option(help="Gather again for backward.", show_default=False)
    ] = None
    bucket_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Gradients reduced at a time, as "25 MB".')
    ] = None

    servers: Annotated[
        str | None, typer.Option(metavar="N|all", help="Parameter servers: own hosts, or all [1].")
    ] = None
    asynchronous: Annotated[
        bool | None,
        typer.Option("--async/--no-async", help="Workers loop on their own.", show_default=False),
    ] = None
    slow_worker: Annotated[
        float | None, typer.Option(metavar="FACTOR", help="How much slower the last worker is [1].")
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitOptions:
    """Upper limits of a search, and how many plans it reports."""

    max_tp: Annotated[int | None, typer.Option(metavar="N", help="Largest --tp.")] = None
    max_pp: Annotated[int | None, typer.Option(metavar="N", help="Largest --pp.")] = None
    max_dp: Annotated[int | None, typer.Option(metavar="N", help="Largest --dp.")] = None
    max_vpp: Annotated[int | None, typer.Option(metavar="N", help="Largest --vpp.")] = None
    max_micro_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Largest --micro-batch.")
    ] = None
    top: Annotated[int, typer.Option(metavar="N", help="Plans to report.")] = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class MoneyOptions:
    """A whole training run, to tell its days and its cost."""

    tokens: Annotated[
        float | None, typer.Option(metavar="N", help="Tokens of the whole run, such as 300e9.")
    ] = None
    price: Annotated[
        str | None,
        typer.Option(metavar="PRICE", help='Such as "2.5 USD/GPU-hour" [the cluster\'s].'),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Where results go besides the terminal."""

    json: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Write the result as JSON; - for standard output."),
    ] = None
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write plan, result, CSV and PNG files.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Write into a folder in use.")] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOptions:
    """The plan file that a simulation starts from, and the trace it leaves."""

    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A plan.json; other options override what it says."),
    ] = None
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto.")
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NameOptions:
    """One thing of a list, or all of it."""

    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show all about one.")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulOptions:
    """Matrices to multiply, and the devices that do it."""

    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="SHAPE", help="Two or more, such as 4x5 5x8.")
    ] = None
    devices: Annotated[
        int | None, typer.Option(metavar="N", help="Devices of the one mesh axis.")
    ] = None
    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Built-in name or cluster TOML.")
    ] = "dgx-a100"
    precision: Annotated[
        Precision | None,
        typer.Option(metavar="|".join(Precision), help="Number format [bf16 where it is]."),
    ] = None


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


def check_counts(record: JobOptions | LayoutOptions | LimitOptions) -> None:
    """Raise PlanError when a whole number of *record* is out of range."""
    most = {"gpus": MAX_GPUS, "top": MAX_TOP, "global_batch": 10**9, "seq_len": 10**8}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, bool) or not isinstance(value, int) or field.name == "zero":
            continue
        limit = most.get(field.name, MAX_COUNT)
        if not 1 <= value <= limit:
            raise PlanError(
                f"{option_name(field.name)} {value} is out of range; allowed 1 to {limit}"
            )


def read_tokens(tokens: float | None) -> float | None:
    """Return ``--tokens`` checked.

    Raises:
        PlanError: Unless it is a number of tokens that a run could have.
    """
    if tokens is not None and not (isfinite(tokens) and 1 <= tokens <= MAX_TOKENS):
        raise PlanError(f"--tokens {tokens:g} is out of range; allowed 1 to {MAX_TOKENS:g}")
    return tokens


def read_price(text: str | None) -> float | None:
    """Return ``--price`` in US dollars per GPU and hour."""
    return None if text is None else _quantity("--price", text, parse_price)


def read_memory_limit(text: str | None) -> int | None:
    """Return ``--memory-limit`` in bytes.

    Raises:
        PlanError: If it is not a size of at least one byte.
    """
    if text is None:
        return None
    limit_bytes = _quantity("--memory-limit", text, parse_bytes)
    if limit_bytes < 1:
        raise PlanError(f"--memory-limit {text!r} is nothing; allowed: more than 0 bytes")
    return int(limit_bytes)


def _quantity(option: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except ValueError as error:
        raise PlanError(f"{option}: {error}") from None
