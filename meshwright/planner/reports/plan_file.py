"""The plan file: model, cluster, stack, job and plan of one layout, as JSON.

Built-in models, clusters and stacks are named; what a user's own file described is written out
in full, so that the plan file stands alone.
"""
# ruff: noqa: PLC0415 (pydantic is imported when a file is read)

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

from meshwright.hwprofiles import (
    Cluster,
    FileKind,
    Precision,
    ProfileError,
    StackProfile,
    first_release,
    is_stack,
    list_clusters,
    load_cluster,
    load_stack,
    one_line,
    shown,
    shown_path,
    stack_frameworks,
    suggestion,
)
from meshwright.records import Field, Record
from meshwright.simulator import (
    PlanError,
    ResolvedPlan,
    TrainingJob,
    check_plan,
    list_models,
    load_model,
)
from meshwright.simulator.layout import (
    MAX_ZERO_STAGE,
    PLAN_FIELDS,
    SERVER_FIELDS,
    PlanField,
    resolve,
)
from meshwright.simulator.model import AnyModel, parse_any_model

if TYPE_CHECKING:
    from pydantic import ValidationError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
FORMAT = "meshwright-plan-2"
# Of before stacks had releases: a framework's name was the release that its file is written for.
OLD_FORMAT = "meshwright-plan-1"

# A plan of 10,000 stages with a cluster written out is a few hundred kilobytes.
PLAN_FILE = FileKind(title="plan file", most_bytes=4_000_000, error=PlanError)
# Enough for the largest layout; the text of a longer number would be refused by Python itself.
Degree = Annotated[int, Field(strict=True, ge=1, le=10**9)]
# The first stage may have the embedding alone, the last one the loss.
Number = Annotated[int, Field(strict=True, ge=0, le=10**9)]
T = TypeVar("T", AnyModel, Cluster, StackProfile)
P = TypeVar("P", Cluster, StackProfile)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPlan:
    """Job, plan, cluster and stack of a plan file."""

    job: TrainingJob
    plan: ResolvedPlan
    cluster: Cluster
    stack: StackProfile


class _JobEntry(Record):
    global_batch_size: Degree
    seq_len: Degree
    precision: Precision
    imbalance: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 1.0


def _entry_type(field: PlanField) -> object:
    """Return the type of a field in a plan file; numbers and flags are taken as written."""
    kind: object = {
        int: Degree,
        bool: Annotated[bool, Field(strict=True)],
        float: Annotated[float, Field(strict=True, allow_inf_nan=False)],
        tuple: tuple[Number, ...],
    }.get(field.kind, field.kind)
    if field.name == "zero_stage":
        kind = Annotated[int, Field(strict=True, ge=0, le=MAX_ZERO_STAGE)]
    if field.name == "prediction_stage":
        kind = Number  # counted from the first one on
    if field.declaration.members:
        kind = tuple[type(field.declaration.members[0]), ...]  # type: ignore[misc]
    if field.name == "servers":
        kind = Degree | Literal["all"]
    return kind | None if field.is_optional else kind  # type: ignore[operator]  # types at run time


def _entry(name: str, fields: Mapping[str, PlanField], **parts: object) -> type[Record]:
    """Return the record of an entry; fields that are not basic may be left out."""
    kinds = {key: parts.get(key) or _entry_type(each) for key, each in fields.items()}
    defaults = {key: each.default for key, each in fields.items() if not each.declaration.is_basic}
    return type(name, (Record,), {"__annotations__": kinds, **defaults})


@cache
def _plan_entry() -> type[Record]:
    servers = _entry("_ServerEntry", SERVER_FIELDS)
    return _entry("_PlanEntry", PLAN_FIELDS, parameter_server=servers | None)


def _plan_values(entry: Record) -> dict[str, object]:
    """Return the fields of a plan in an entry; null in files of old stands for the stack's default.

    Files that leave rare fields out mean their defaults.
    """
    values = {name: value for name, value in entry.model_dump().items() if value is not None}
    return {name: value for name, value in values.items() if value != ()}


class _PlanFile(Record):
    format: str
    model: str | dict[str, object]
    cluster: str | dict[str, object]
    stack: str | dict[str, object]
    job: _JobEntry
    plan: Record


@cache
def _plan_file() -> type[_PlanFile]:
    """Return the record of a whole file, made of the declared fields when a file is read."""
    return type("_PlanFile", (_PlanFile,), {"__annotations__": {"plan": _plan_entry()}})


def plan_fields(plan: ResolvedPlan) -> dict[str, Json]:
    """Return every field of a plan by name; rare ones only where they differ from the default."""
    values: dict[str, Json] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, each in PLAN_FIELDS.items()
        for value in [getattr(plan, name)]
        if not (each.declaration.is_rare and value == each.default)
    }
    if plan.parameter_server is not None:
        values["parameter_server"] = asdict(plan.parameter_server)
    return values


def job_fields(job: TrainingJob) -> dict[str, Json]:
    """Return batch, sequence length and precision of a job, and the imbalance of experts."""
    fields: dict[str, Json] = {
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
        "precision": job.precision,
    }
    return fields if job.experts is None else {**fields, "imbalance": job.imbalance}


def plan_document(saved: SavedPlan) -> dict[str, Json]:
    """Return the content of a plan file."""
    return {
        "format": FORMAT,
        "model": _reference(saved.job.model, list_models().__contains__, load_model),
        "cluster": _reference(saved.cluster, list_clusters().__contains__, load_cluster),
        "stack": _reference(saved.stack, is_stack, load_stack),
        "job": job_fields(saved.job),
        "plan": plan_fields(saved.plan),
    }


def is_plan_file(text: str) -> bool:
    """Return True if a word names a plan file, and no model.

    >>> is_plan_file("gpt2"), is_plan_file("out/plan-2.json")
    (False, True)
    """
    path = Path(text)
    if path.suffix != ".json":
        return False
    # By its name: one that cannot be read is then refused as a plan.
    if re.fullmatch(r"plan(-[0-9]+)?", path.stem):
        return True
    try:
        text = PLAN_FILE.read_text(path)
    except PlanError:
        return False
    return any(f'"{each}"' in text for each in (FORMAT, OLD_FORMAT))


def read_plan(path: Path) -> SavedPlan:
    """Return the plan, the job, the cluster and the stack of the file at *path*.

    Raises:
        PlanError: If it cannot be read or says something that cannot be; names file and key.
    """
    file = shown_path(path)
    entry = _checked(PLAN_FILE.read_json(path), file)

    def resolved(key: str, load: Callable[[str], T], build: Callable[[dict[str, object]], T]) -> T:
        value = getattr(entry, key)
        try:
            return load(_path_beside(path, value)) if isinstance(value, str) else build(value)
        except (PlanError, ProfileError) as error:
            raise PlanError(f"{file}: {key}: {error}") from None

    model = resolved("model", load_model, lambda data: parse_any_model(data, origin="model"))
    cluster = resolved("cluster", load_cluster, lambda data: _profile(Cluster, data))
    stack = resolved("stack", load_stack, lambda data: _profile(StackProfile, data))
    try:
        job = TrainingJob(model=model, **entry.job.model_dump())
        plan = resolve(job, cluster, stack, _plan_values(entry.plan))
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    return SavedPlan(job=job, plan=plan, cluster=cluster, stack=stack)


def read_runnable_plan(path: Path) -> SavedPlan:
    """Return the content of the plan file at *path*, to be run as it stands.

    Raises:
        PlanError: As `read_plan`, or if the plan can never run: before anything is built of it.
    """
    saved = read_plan(path)
    check_plan(saved.job, saved.plan, saved.cluster, saved.stack)
    return saved


def _reference(item: T, is_known: Callable[[str], bool], load: Callable[[str], T]) -> Json:
    # A built-in that --set changed is written out in full.
    if is_known(item.name) and load(item.name) == item:
        return item.name
    document: dict[str, Json] = item.model_dump(mode="json")
    return document


def _path_beside(path: Path, name: str) -> str:
    """Return *name*, or as a path relative to the folder of *path* where it names a file."""
    is_file = "/" in name or name.endswith((".toml", ".json"))
    return str(path.parent / name) if is_file else name


def _profile(kind: type[P], data: Mapping[str, object]) -> P:
    from pydantic import ValidationError

    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ProfileError(one_line(error)) from None


def _checked(data: object, file: str) -> _PlanFile:
    if not isinstance(data, dict):
        raise PlanError(f"{file}: must hold a JSON object, not {shown(data)}")
    if data.get("format") not in (FORMAT, OLD_FORMAT):
        raise PlanError(
            f"{file}: format: {shown(data.get('format'))} is not a plan file; allowed: {FORMAT!r}"
        )
    # A framework's name then meant one release; today it means the newest.
    if data["format"] == OLD_FORMAT:
        data = {**data, "stack": _dated(data.get("stack"))}
    from pydantic import ValidationError

    try:
        return _plan_file().model_validate(data)
    except ValidationError as error:
        raise PlanError(f"{file}: {_first_mistake(error)}") from None


def _dated(stack: object) -> object:
    """Return a stack of an old file with the release that its name meant."""
    if isinstance(stack, dict):
        return {**stack, "name": _dated(stack.get("name"))}
    is_framework = isinstance(stack, str) and stack in stack_frameworks()
    return first_release(str(stack)) if is_framework else stack


def _first_mistake(error: "ValidationError") -> str:
    """Return the first mistake; a misspelt key is also a missing one, and the better hint."""
    for details in error.errors(include_url=False):
        if details["type"] == "extra_forbidden":
            *parents, word = (str(part) for part in details["loc"])
            entries: dict[str, type[Record]] = {"job": _JobEntry, "plan": _plan_entry()}
            keys = entries.get(parents[0] if parents else "", _PlanFile).model_fields
            path = ".".join([*parents, shown(word)])
            return f"{path}: unknown key; {suggestion(word, keys)}"
    return one_line(error)
