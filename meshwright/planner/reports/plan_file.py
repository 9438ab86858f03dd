"""The plan file: model, cluster, stack, job and plan of one layout, as JSON.

Built-in models, clusters and stacks are named; what a user's own file described is written out
in full, so that the plan file stands alone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.hwprofiles import (
    Attention,
    Cluster,
    Offload,
    Precision,
    ProfileError,
    Recompute,
    StackProfile,
    list_clusters,
    list_stacks,
    load_cluster,
    load_stack,
    shown_path,
)
from meshwright.hwprofiles.complaints import one_line
from meshwright.hwprofiles.names import shown, suggestion
from meshwright.simulator import (
    ModelSpec,
    ParallelPlan,
    ParameterServer,
    PlanError,
    TrainingJob,
    list_models,
    load_model,
)
from meshwright.simulator.model import parse_model

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
FORMAT = "meshwright-plan-1"

# A plan of 10,000 stages with a cluster written out is a few hundred kilobytes.
MAX_FILE_BYTES = 4_000_000
# Enough for the largest layout; the text of a longer number would be refused by Python itself.
Degree = Annotated[int, Field(strict=True, ge=1, le=10**9)]
T = TypeVar("T", ModelSpec, Cluster, StackProfile)
P = TypeVar("P", Cluster, StackProfile)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPlan:
    """What a plan file holds."""

    job: TrainingJob
    plan: ParallelPlan
    cluster: Cluster
    stack: StackProfile


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _JobEntry(_Entry):
    global_batch_size: Degree
    seq_len: Degree
    precision: Precision


class _ServerEntry(_Entry):
    servers: Degree | Literal["all"]
    asynchronous: Annotated[bool, Field(strict=True)]
    slow_worker: Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _PlanEntry(_Entry):
    tp: Degree
    pp: Degree
    dp: Degree
    num_virtual_stages: Degree
    microbatch_size: Degree
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)]
    sequence_parallel: Annotated[bool, Field(strict=True)]
    recompute: Recompute
    attention: Attention
    schedule: str
    stages: tuple[Degree, ...]
    dp_shard: Degree | None = None
    reshard_after_forward: Annotated[bool, Field(strict=True)] = True
    gradient_precision: Precision | None = None
    reduce_precision: Precision | None = None
    sync_each_microbatch: Annotated[bool, Field(strict=True)] | None = None
    find_unused: Annotated[bool, Field(strict=True)] = False
    offload: Offload = Offload.NONE
    parameter_server: _ServerEntry | None = None

    def plan(self) -> ParallelPlan:
        """Return the plan; raises PlanError where no layout can be so."""
        values = self.model_dump()
        servers = values.pop("parameter_server")
        return ParallelPlan(**values, parameter_server=servers and ParameterServer(**servers))


class _PlanFile(_Entry):
    format: Literal["meshwright-plan-1"]
    model: str | dict[str, object]
    cluster: str | dict[str, object]
    stack: str | dict[str, object]
    job: _JobEntry
    plan: _PlanEntry


def plan_fields(plan: ParallelPlan) -> dict[str, Json]:
    """Return every field of a plan by name."""
    values: dict[str, Json] = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in fields(plan)
        for value in [getattr(plan, field.name)]
    }
    if plan.parameter_server is not None:
        values["parameter_server"] = asdict(plan.parameter_server)
    return values


def job_fields(job: TrainingJob) -> dict[str, Json]:
    """Return batch, sequence length and precision of a job."""
    return {
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
        "precision": job.precision,
    }


def plan_document(saved: SavedPlan) -> dict[str, Json]:
    """Return the content of a plan file."""
    return {
        "format": FORMAT,
        "model": _reference(saved.job.model, list_models(), load_model),
        "cluster": _reference(saved.cluster, list_clusters(), load_cluster),
        "stack": _reference(saved.stack, list_stacks(), load_stack),
        "job": job_fields(saved.job),
        "plan": plan_fields(saved.plan),
    }


def read_plan(path: Path) -> SavedPlan:
    """Return what the plan file at *path* holds.

    Raises:
        PlanError: If it cannot be read or says something that cannot be; names file and key.
    """
    file = shown_path(path)
    entry = _checked(_parsed(_read_text(path, file), file), file)

    def resolved(key: str, load: Callable[[str], T], build: Callable[[dict[str, object]], T]) -> T:
        value = getattr(entry, key)
        try:
            return load(_beside(path, value)) if isinstance(value, str) else build(value)
        except (PlanError, ProfileError) as error:
            raise PlanError(f"{file}: {key}: {error}") from None

    model = resolved("model", load_model, lambda data: parse_model(data, origin="model"))
    cluster = resolved("cluster", load_cluster, lambda data: _profile(Cluster, data))
    stack = resolved("stack", load_stack, lambda data: _profile(StackProfile, data))
    try:
        job = TrainingJob(model=model, **entry.job.model_dump())
        plan = entry.plan.plan()
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None
    return SavedPlan(job=job, plan=plan, cluster=cluster, stack=stack)


def _reference(item: T, known: Sequence[str], load: Callable[[str], T]) -> Json:
    if item.name in known and load(item.name) == item:
        return item.name
    document: dict[str, Json] = item.model_dump(mode="json")
    return document


def _beside(path: Path, name: str) -> str:
    """Return *name*, or as a path relative to the folder of *path* where it names a file."""
    is_file = "/" in name or name.endswith((".toml", ".json"))
    return str(path.parent / name) if is_file else name


def _profile(kind: type[P], data: Mapping[str, object]) -> P:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ProfileError(one_line(error)) from None


def _read_text(path: Path, file: str) -> str:
    try:
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise PlanError(f"{file}: too large for a plan file; allowed: {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{file}: byte {error.start} is not UTF-8 text") from None
    except OSError as error:
        raise PlanError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"{file}: cannot be read: {error}") from None


def _parsed(text: str, file: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise PlanError(f"{file}: not valid JSON: {error.msg} ({place})") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file}: not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {shown(repeated)} appears twice")
    return document


def _checked(data: object, file: str) -> _PlanFile:
    if not isinstance(data, dict):
        raise PlanError(f"{file}: must hold a JSON object, not {shown(data)}")
    if data.get("format") != FORMAT:
        raise PlanError(
            f"{file}: format: {shown(data.get('format'))} is not a plan file; allowed: {FORMAT!r}"
        )
    try:
        return _PlanFile.model_validate(data)
    except ValidationError as error:
        raise PlanError(f"{file}: {_first_mistake(error)}") from None


def _first_mistake(error: ValidationError) -> str:
    """Return the first mistake; a misspelt key is also a missing one, and the better hint."""
    for details in error.errors(include_url=False):
        if details["type"] == "extra_forbidden":
            *parents, word = (str(part) for part in details["loc"])
            entries: dict[str, type[_Entry]] = {"job": _JobEntry, "plan": _PlanEntry}
            known = entries.get(parents[0] if parents else "", _PlanFile).model_fields
            where = ".".join([*parents, shown(word)])
            return f"{where}: unknown key; {suggestion(word, known)}"
    return one_line(error)
