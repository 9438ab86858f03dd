"""The options of the command line, as records.

A command takes records (`JobOptions`, `LayoutOptions`, ...); `option_words.as_command` turns
each of their fields into an option.  Fields are None where an option was not given.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import isfinite
from typing import Annotated, TypeAlias

import typer

from meshwright.hwprofiles import Precision, parse_bytes, parse_price
from meshwright.planner.options.words import option_name
from meshwright.simulator import PlanError
from meshwright.simulator.layout import Quantity
from meshwright.simulator.model import MAX_PREDICTION_LAYERS

MAX_GPUS = 10_000_000
MAX_COUNT = 10_000_000
MAX_TOP = 1_000
MAX_JOBS = 1_000
MAX_TOKENS = 1e18
Growing: TypeAlias = Annotated[
    Quantity | None, typer.Option(metavar="|".join(Quantity), help="Find the largest that fits.")
]
Predicting: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", help="Layers that predict a further token each [the model's]."),
]


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
    prediction_layers: Predicting = None
    imbalance: Annotated[
        float | None,
        typer.Option(metavar="X", help="Load of the hottest expert over the mean [1]."),
    ] = None
    stack: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Training software [megatron-core]."),
    ] = None
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help='Most a device may use, such as "72 GiB".'),
    ] = None
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change a fact of stack or cluster; repeatable."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WordOptions:
    """Plans, or one model, to set beside each other."""

    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLAN...|MODEL", help="Several plan.json, or a model as in search."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingOptions:
    """What a search makes as large as fits, and how many plans it reports."""

    max: Growing = None
    top: Annotated[int, typer.Option(metavar="N", help="Plans to report.")] = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class MoneyOptions:
    """A whole training run, to tell its days and its cost."""

    tokens: Annotated[
        float | None,
        typer.Option(metavar="N", help="Tokens, images or rows of the run, as 300e9 or 15T."),
    ] = None
    price: Annotated[
        str | None,
        typer.Option(metavar="PRICE", help="USD of a GPU-hour, as 2.5 [the cluster's]."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonOptions:
    """Where the document goes."""

    json: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Write the result as JSON; - for standard output."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions(JsonOptions):
    """Where results go besides the terminal."""

    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write plan, result, CSV and PNG files.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Write into a folder in use.")] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The plan file that a simulation starts from."""

    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A plan.json; other options override what it says."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOptions(PlanOptions):
    """The plan file that a simulation starts from, what it makes as large as fits, its trace."""

    max: Growing = None
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto.")
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """What a sweep varies, what is done in each cell, and where."""

    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A,B", help="Values of an option or a fact; repeatable."),
    ] = None
    weak: Annotated[
        bool, typer.Option("--weak", help="Grow the batch with --vary gpus=..., from the first.")
    ] = False
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate the one layout given, do not search.")
    ] = False
    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --simulate: a plan.json to start from."),
    ] = None
    jobs: Annotated[
        int | None, typer.Option(metavar="N", help="Processes of this machine [its cores].")
    ] = None
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS|FILE", help="Dask scheduler whose workers run cells."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NameOptions:
    """One thing of a list, or all of it."""

    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show all about one.")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """One profile of a list as people read it or as a file, or all of it."""

    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show all about one.")] = None
    toml: Annotated[
        bool, typer.Option("--toml", help="As a file, whose keys --set can change.")
    ] = False


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
        typer.Option(metavar="fp32|fp16|bf16", help="Number format [bf16 where it is]."),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """A plan, and the framework that is to train it."""

    plan: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="A plan.json of search or simulate.")
    ] = None
    to: Annotated[
        str | None, typer.Option(metavar="FRAMEWORK", help="The framework that reads it.")
    ] = None
    framework_version: Annotated[
        str | None, typer.Option(metavar="V", help="Of the framework, as 0.3 of torchtitan.")
    ] = None
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a script for sbatch, too.")] = False
    out: Annotated[
        str | None, typer.Option(metavar="FILE|DIR", help="Where to [standard output].")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Write into a folder in use.")] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """A framework's configuration, and what it does not say."""

    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="A configuration of a framework.")
    ] = None
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FRAMEWORK", help="Whose it is [by the file's name]."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Built-in name, config.json or model TOML."),
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
        Precision | None, typer.Option(metavar="|".join(Precision), help="Number format.")
    ] = None
    prediction_layers: Predicting = None
    stack: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Training software [the framework's]."),
    ] = None
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change a fact of stack or cluster; repeatable."),
    ] = None
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="The plan.json [standard output].")
    ] = None


def check_counts(record: JobOptions | RankingOptions | ImportOptions | SweepOptions) -> None:
    """Raise PlanError when a whole number of *record* is out of range."""
    for field in fields(record):
        check_count(field.name, getattr(record, field.name))


def check_count(name: str, value: object) -> None:
    """Raise PlanError when *value* of the option *name* is a whole number out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        return
    most = {
        "gpus": MAX_GPUS,
        "top": MAX_TOP,
        "jobs": MAX_JOBS,
        "global_batch": 10**9,
        "seq_len": 10**8,
        "prediction_layers": MAX_PREDICTION_LAYERS,
    }
    least, limit = int(name != "prediction_layers"), most.get(name, MAX_COUNT)
    if not least <= value <= limit:
        raise PlanError(f"{option_name(name)} {value} is out of range; allowed {least} to {limit}")


def read_tokens(tokens: float | None) -> float | None:
    """Return ``--tokens`` checked.

    Raises:
        PlanError: Unless it is a number of tokens that a run could have.
    """
    if tokens is not None and not (isfinite(tokens) and 1 <= tokens <= MAX_TOKENS):
        raise PlanError(f"--tokens {tokens:g} is out of range; allowed 1 to {MAX_TOKENS:g}")
    return tokens


def read_price(text: str | None) -> float | None:
    """Return ``--price`` in US dollars per GPU and hour, which a number alone is, too.

    >>> read_price("2"), read_price("2.5 USD/GPU-hour")
    (2.0, 2.5)
    """
    if text is None:
        return None
    has_unit = re.search(r"[A-DF-Za-df-z]", text)  # an E may be part of a number
    return _quantity("--price", text if has_unit else f"{text} USD/GPU-hour", parse_price)


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
