"""Options of the command line as records.

A command takes records (`JobOptions`, `LayoutOptions`, ...); `words.as_command` turns
each of their fields into an option.  Fields are None where an option was not given.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import isfinite

from meshwright.hwprofiles import Precision, parse_bytes, parse_price
from meshwright.planner.options.words import argument, flag, option, option_name
from meshwright.simulator import PlanError
from meshwright.simulator.layout import Quantity
from meshwright.simulator.model import MAX_MTP_LAYERS

MAX_GPUS = 10_000_000
MAX_COUNT = 10_000_000
MAX_TOP = 1_000
MAX_JOBS = 1_000
MAX_TOKENS = 1e18
MAXIMUM_OPTION = "|".join(Quantity), "Find the largest that fits."
MTP_OPTION = "N", "Layers that predict a further token each [the model's]."


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Job, hardware and software of a command."""

    model: str | None = argument(None, "MODEL", "Built-in name, config.json or model TOML.")
    cluster: str | None = option(None, "NAME|FILE", "Built-in name or cluster TOML.")
    gpus: int | None = option(None, "N", "Devices of the run.")
    global_batch: int | None = option(None, "N", "Sequences of one optimizer step.")
    seq_len: int | None = option(None, "N", "Tokens of a sequence [the model's].")
    precision: Precision | None = option(
        None, "|".join(Precision), "Number format [bf16; fp16 on older devices and stacks]."
    )
    prediction_layers: int | None = option(None, *MTP_OPTION)
    imbalance: float | None = option(None, "X", "Load of the hottest expert over the mean [1].")
    stack: str | None = option(None, "NAME|FILE", "Training software [megatron-core].")
    memory_limit: str | None = option(None, "SIZE", 'Most a device may use, such as "72 GiB".')
    set: list[str] | None = option(
        None, "KEY=VALUE", "Change a fact of stack or cluster; repeatable."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WordOptions:
    """Plans, or one model, to compare."""

    words: list[str] | None = argument(
        None, "PLAN...|MODEL", "Several plan.json, or a model as in search."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingOptions:
    """Quantity to make as large as fits, and the number of plans to report."""

    max: Quantity | None = option(None, *MAXIMUM_OPTION)
    top: int = option(10, "N", "Plans to report.")
    count: bool = flag("--count", "Size every layout, to count how many fit.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoneyOptions:
    """Tokens of a whole training run, and the price of a GPU."""

    tokens: float | None = option(None, "N", "Tokens, images or rows of the run, as 300e9 or 15T.")
    price: str | None = option(None, "PRICE", "USD of a GPU-hour, as 2.5 [the cluster's].")


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonOptions:
    """Destination of the JSON document."""

    json: str | None = option(None, "FILE|-", "Write the result as JSON; - for standard output.")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions(JsonOptions):
    """Destinations of results besides the terminal."""

    out: str | None = option(None, "DIR", "Write plan, result, CSV and PNG files.")
    force: bool = flag("--force", "Write into a folder in use.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Plan file that a simulation starts from."""

    plan: str | None = option(None, "FILE", "A plan.json; other options override what it says.")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOptions(PlanOptions):
    """Plan file, quantity to make as large as fits, and trace of a simulation."""

    max: Quantity | None = option(None, *MAXIMUM_OPTION)
    trace: str | None = option(None, "FILE", "Write a trace for Perfetto.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """Variations of a sweep, the work of a cell, and its workers."""

    vary: list[str] | None = option(None, "NAME=A,B", "Values of an option or a fact; repeatable.")
    weak: bool = flag("--weak", "Grow the batch with --vary gpus=..., from the first.")
    simulate: bool = flag("--simulate", "Simulate the one layout given, do not search.")
    plan: str | None = option(None, "FILE", "With --simulate: a plan.json to start from.")
    jobs: int | None = option(None, "N", "Processes of this machine [its cores].")
    dask: str | None = option(None, "ADDRESS|FILE", "Dask scheduler whose workers run cells.")


@dataclass(frozen=True, kw_only=True, slots=True)
class NameOptions:
    """One entry of a list, or all."""

    name: str | None = argument(None, "NAME", "Show all about one.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """One profile of a list, as text or as a file, or all."""

    name: str | None = argument(None, "NAME", "Show all about one.")
    toml: bool = flag("--toml", "As a file, whose keys --set can change.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulOptions:
    """Matrices to multiply, and the devices that do it."""

    shapes: list[str] | None = argument(None, "SHAPE", "Two or more, such as 4x5 5x8.")
    devices: int | None = option(None, "N", "Devices of the one mesh axis.")
    cluster: str = option("dgx-a100", "NAME|FILE", "Built-in name or cluster TOML.")
    precision: Precision | None = option(
        None, "fp32|fp16|bf16", "Number format [bf16 where it is]."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """A plan, and the framework that is to train it."""

    plan: str | None = argument(None, "PLAN", "A plan.json of search or simulate.")
    to: str | None = option(None, "FRAMEWORK", "The framework that reads it.")
    framework_version: str | None = option(None, "V", "Of the framework, as 0.3 of torchtitan.")
    slurm: bool = flag("--slurm", "Write a script for sbatch, too.")
    out: str | None = option(None, "FILE|DIR", "Where to [standard output].")
    force: bool = flag("--force", "Write into a folder in use.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOptions:
    """Configuration of a framework, and values that it does not say."""

    file: str | None = argument(
        None, "FILE|-", "A configuration or a launch script; - reads an expanded command."
    )
    source: str | None = option(None, "FRAMEWORK", "Whose it is [by its keys].", name="--from")
    define: list[str] | None = option(
        None, "NAME=VALUE", "A variable that a script does not set; repeatable."
    )
    launch: str | None = option(
        None, "PROGRAM[:LINE]", "Which command of a script that starts several."
    )
    without: list[str] | None = option(
        None, "KEY", "Read the file as if it did not have this key; repeatable."
    )
    explain: bool = flag("--explain", "Print each value with the line that it is from.")
    options: bool = flag("--options", "List what each key of the framework means here.")
    model: str | None = option(None, "MODEL", "Built-in name, config.json or model TOML.")
    cluster: str | None = option(None, "NAME|FILE", "Built-in name or cluster TOML.")
    gpus: int | None = option(None, "N", "Devices of the run.")
    global_batch: int | None = option(None, "N", "Sequences of one optimizer step.")
    seq_len: int | None = option(None, "N", "Tokens of a sequence [the model's].")
    vocabulary: int | None = option(None, "N", "Tokens that a tokenizer's files have.")
    precision: Precision | None = option(None, "|".join(Precision), "Number format.")
    prediction_layers: int | None = option(None, *MTP_OPTION)
    stack: str | None = option(None, "NAME|FILE", "Training software [the framework's].")
    set: list[str] | None = option(
        None, "KEY=VALUE", "Change a fact of stack or cluster; repeatable."
    )
    out: str | None = option(None, "FILE", "The plan.json [standard output].")


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
        "prediction_layers": MAX_MTP_LAYERS,
    }
    # A model may have no MTP layer.
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
