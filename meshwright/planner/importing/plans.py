"""Job and plan of a configuration, with all that is wrong with it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.hwprofiles import FrameworkTable, ProfileError, load_stack
from meshwright.planner.importing.reading import (
    Complaint,
    Origin,
    Reading,
    read_keys,
    table_of,
)
from meshwright.planner.importing.sources import Source
from meshwright.planner.options import option_name, option_of
from meshwright.planner.tables import Facts, theirs
from meshwright.simulator import MistakesError, ModelSpec, PlanError, load_model
from meshwright.simulator.model import list_models

# Fields that decide no size and no time of a step: labels, usual length, spelling of code.
LABELS = {"name", "title", "source", "seq_len", "scored_fraction", "spelling", "left_out"}
# The option of a value that is of the job, and what it is asked for with.
JOB_OPTIONS: Mapping[str, str] = {
    "model": "model",
    "cluster": "cluster",
    "world_size": "gpus",
    "global_batch_size": "global_batch",
    "seq_len": "seq_len",
    "precision": "precision",
    "prediction_layers": "prediction_layers",
}
# And of what is of none: a vocabulary that a tokenizer's files say.
OPTIONS = {**JOB_OPTIONS, "vocab_size": "vocabulary", "stack": "stack"}
MOST_LINES = 50  # of refusals of one file
REQUIRED: Mapping[str, str] = {
    "model": "which model is trained",
    "cluster": "on which cluster",
    "world_size": "devices of the run",
    "global_batch_size": "sequences of one optimizer step",
    "seq_len": "tokens of a sequence",
    "precision": "the number format",
}


class Row(NamedTuple):
    """Value of a field, with the lines of the configuration that say it, or its other origin."""

    name: str
    value: str
    said: tuple[tuple[int, str], ...]
    otherwise: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Values of a configuration and of the options beside it.

    Args:
        values: By the names of fields and facts.
        model: That it describes, or its name.
        framework: Whose it is.
        stack: Name of the stack that its framework is.
        rows: Each value with where it is from, for people.
    """

    values: Mapping[str, object]
    model: ModelSpec | str
    framework: str
    stack: str | None
    rows: tuple[Row, ...]


def import_source(
    source: Source, given: Mapping[str, object], model: ModelSpec | None, stack: str | None
) -> Imported:
    """Return the job and the plan of a configuration.

    Args:
        source: The configuration.
        given: What options say, by the names of fields and facts.
        model: Of ``--model``, if it is given.
        stack: Of ``--stack``, if it is given.

    Raises:
        MistakesError: If it says what no plan can, or what is not understood; a line each.
    """
    known_facts = dict(given)
    complaints = [Complaint("", each) for each in source.refusals]
    complaints += _disagreements(known_facts, source.launched)
    known_facts |= source.launched
    profile = source.framework.profile
    table = table_of(profile, source.keys)
    codecs = source.framework.program.codecs
    reading = read_keys(profile, table, source.keys, Facts(known_facts, model), codecs)
    complaints += reading.complaints
    # A field whose keys are refused has no value to compare, and is not missing.
    refused = _refused_fields(table, reading.complaints)
    values = {name: each for name, each in reading.values.items() if name not in refused}
    complaints += _disagreements(known_facts, values, source.launched)
    complaints += _other_model(reading, model)
    if "vocab_size" in given and "vocab_size" not in reading.origins:
        complaints.append(Complaint("", "--vocabulary has no effect: the model is told otherwise"))
    stack_name = _release(source, table) or table.stack or stack
    missing = {
        name: reading.missing.get(name) or why
        for name, why in {**REQUIRED, **reading.missing}.items()
        if (name in REQUIRED and reading.values.get(name) is None)
        or (name in reading.missing and name not in given)
    }
    missing = {
        name: why
        for name, why in missing.items()
        if name not in refused and _has_choice(name, stack or stack_name)
    }
    if "vocab_size" in missing:
        missing.pop("model", None)  # it is all that is missing of the model
    if stack_name is None:
        missing["stack"] = f"the training software: {profile.name} is none of the built-in ones"
    _refuse(source, complaints, missing)
    return Imported(
        values=reading.values,
        model=_named(reading.values["model"]),
        framework=profile.name,
        stack=stack_name,
        rows=tuple(_rows(source, reading, given)),
    )


def _release(source: Source, table: FrameworkTable) -> str | None:
    """Return the release that an export names in its file.

    Raises:
        PlanError: If it is of another framework.
    """
    if source.release is not None and not table.is_of(source.release):
        raise PlanError(f"stack {source.release} is not {table.stack}, whose file it is")
    return source.release


def _refused_fields(table: FrameworkTable, complaints: Iterable[Complaint]) -> set[str]:
    """Return the fields of refused keys: they need not be set again."""
    keys = {each.key for each in complaints}
    entries = [item for item in table.fields.items() if keys & {*item[1].all_keys}]
    return {each for name, entry in entries for each in (name, *entry.fields)}


def _has_choice(name: str, stack: str | None) -> bool:
    """Return True if a stack has several values of a field."""
    offered = {"attention": "attention_kernels", "recompute": "recompute_modes"}.get(name)
    if stack is None or offered is None:
        return True
    try:
        return len(getattr(load_stack(stack), offered)) > 1
    except ProfileError:  # which is said of --stack
        return True


def _disagreements(
    given: Mapping[str, object],
    values: Mapping[str, object],
    launched: Mapping[str, object] | None = None,
) -> list[Complaint]:
    """Return a complaint for each option, or launcher, that contradicts the configuration."""
    complaints = []
    for name, value in given.items():
        file_value = values.get(name, value)
        if (
            name != "model"
            and file_value not in (value, str(value))
            and str(file_value) != str(value)
        ):
            asking = f"the launcher's {name}" if name in (launched or {}) else asking_option(name)
            text = f"{asking} {value} is not what the file says; allowed: {theirs(file_value)}"
            complaints.append(Complaint("", text))
    return complaints


def asking_option(name: str) -> str:
    """Return the option that sets a value."""
    return option_name(OPTIONS[name]) if name in OPTIONS else option_of(name)


def _other_model(reading: Reading, model: ModelSpec | None) -> list[Complaint]:
    """Return a complaint where the configuration's model is not that of ``--model``."""
    value = reading.values.get("model")
    file_model = load_model(value) if isinstance(value, str) else value
    if model is None or not isinstance(file_model, ModelSpec):
        return []
    texts = [
        f"{each.field} {theirs(each.first)}, not {theirs(each.second)}"
        for each in differences(file_model, model)
    ]
    if not texts:
        return []
    return [Complaint("", f"the model of the file is not {model.name}: {'; '.join(texts)}")]


def _named(model: object) -> ModelSpec | str:
    assert isinstance(model, ModelSpec | str)  # of REQUIRED
    return built_in_name(model) or model if isinstance(model, ModelSpec) else model


def _name(model: ModelSpec) -> str:
    return built_in_name(model) or model.name


def _refuse(source: Source, complaints: Iterable[Complaint], missing: Mapping[str, str]) -> None:
    """Raise all mistakes, in the order of the file, and then all that is missing."""
    # Those of no key stand first, as they concern the whole.
    complaints = sorted(complaints, key=lambda each: source.lines.get(each.key, 0))
    placed = [(source.place(each.key), each.text) for each in complaints]
    lines = [f"{place}: {text}" if place else text for place, text in placed]
    if missing:
        questions = "; ".join(f"{asking_option(name)} ({why})" for name, why in missing.items())
        lines.append(f"does not say: {questions}")
    # Several keys may be refused for one reason.
    lines = list(dict.fromkeys(lines))
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES:,} lines like these"]
    if lines:
        raise MistakesError(lines)


def _of_file(source: Source, key: str) -> str:
    """Return the name of the file that a key stands in, where that is not the one that is read."""
    return f"{source.files[key]}: " if key in source.files else ""


def _rows(source: Source, reading: Reading, given: Mapping[str, object]) -> Iterable[Row]:
    """Yield each value with its origin: lines of the configuration, a launcher, or an option."""
    for name, value in reading.values.items():
        origin, keys = reading.origins.get(name, (Origin.OPTION, ()))
        text = _name(value) if isinstance(value, ModelSpec) else theirs(value)
        lines = tuple(
            (source.lines.get(key, 0), f"{_of_file(source, key)}{key}={theirs(source.keys[key])}")
            for key in keys
            if key in source.keys
        )
        if value is None or name == "vocab_size":  # the model's lines say it
            continue
        if origin is Origin.FILE and lines:
            yield Row(name, text, lines)
        elif name in source.launched:
            yield Row(name, text, source.launcher)
        else:
            yield Row(name, text, (), asking_option(name) if name in given else str(origin))


class Difference(NamedTuple):
    """A field in which two models differ; those of experts are joined with a dot."""

    field: str
    first: object
    second: object


def differences(first: ModelSpec, second: ModelSpec) -> list[Difference]:
    """Return the fields that decide sizes or times in which two models differ.

    Positions that are not learned have no weights: how many there may be decides nothing.

    >>> [each.field for each in differences(load_model("llama3-8b"), load_model("llama2-7b"))]
    ['vocab_size', 'num_kv_heads', 'ffn_hidden_size']
    """
    unused = set() if "learned" in {first.positions, second.positions} else {"max_positions"}
    fields = _differences("", _facts(first), _facts(second))
    return [each for each in fields if each.field not in LABELS | unused]


def _facts(model: ModelSpec) -> dict[str, object]:
    """Return all facts of a model, defaults of rare ones included."""
    return {**{name: getattr(model, name) for name in ModelSpec.model_fields}, **model.model_dump()}


def _differences(
    prefix: str, first: dict[str, object], second: dict[str, object]
) -> Iterator[Difference]:
    for name in dict.fromkeys((*first, *second)):
        one, other = first.get(name), second.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(f"{prefix}{name}.", one, other)
        elif one != other:
            yield Difference(f"{prefix}{name}", one, other)


def built_in_name(model: ModelSpec) -> str | None:
    """Return the name of the built-in model that *model* is; None where it is none."""
    for name in list_models():
        built_in = load_model(name)
        if isinstance(built_in, ModelSpec) and not differences(model, built_in):
            return name
    return None
