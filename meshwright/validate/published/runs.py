"""Published runs as typed rows: what was run, and the step time and memory that were printed."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from meshwright.hwprofiles import (
    Attention,
    ContextParallel,
    Dispatcher,
    ExpertOverlap,
    Precision,
    ProfileError,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    load_stack,
)
from meshwright.planner.reports import named
from meshwright.simulator import (
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    parse_stages,
    resolve_stages,
)
from meshwright.simulator.layout import count_mtp_layers, layout_mtp_stage
from meshwright.simulator.model import parse_model
from meshwright.validate.published.families import FAMILY_FIELDS, ROUTING, Family
from meshwright.validate.published.rows import (
    SIZES,
    Count,
    Note,
    OptionalPositive,
    Positive,
    Row,
    Text,
    Tolerance,
    empty_is_none,
    load_rows,
)

RUNS_FILE = "published_runs.csv"
LAYERS_FILE = "published_layers.csv"
EXCLUDED_FILE = "published_excluded.csv"
LENGTHS_FILE = "padded_lengths.csv"


class MemoryKind(StrEnum):
    """Kind of a printed memory figure."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    DEVICE = "device"


class PublishedPhase(StrEnum):
    """Direction of a timed pass through one layer."""

    FORWARD = "forward"
    BACKWARD = "backward"


def _empty_is_zero(value: object) -> object:
    return 0 if value == "" else value


def _words(value: object) -> object:
    return tuple(value.split()) if isinstance(value, str) else value


OptionalCount = Annotated[int, Field(ge=0), BeforeValidator(_empty_is_zero)]


class _SourcedRow(Row):
    source: Text


class _ModelRow(_SourcedRow):
    """Columns of a row's model, cluster and stack."""

    family: Family
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    ffn_hidden_size: Count
    vocab_size: Count
    seq_len: Count
    cluster: Text
    stack: Text
    precision: Precision
    microbatch_size: Count
    tp: Count
    sequence_parallel: bool
    recompute: Recompute
    attention: Attention
    rel_tol: Tolerance
    derived: Note
    note: Note

    @property
    def model(self) -> ModelSpec:
        """The model that the row describes."""
        data = {"name": self.id, "source": self.source, **named(self, *SIZES)}
        return parse_model(
            {**data, **FAMILY_FIELDS[self.family], **self.extra_fields}, origin=self.id
        )

    @property
    def extra_fields(self) -> dict[str, object]:
        """Fields of the model beyond its sizes and those of its family."""
        return {}


class PublishedRun(_ModelRow):
    """One published training run.

    Args:
        cp_type: Kind of context parallelism; empty for the stack's default.
        num_experts: Routed experts of a layer; empty without.
        experts_per_token: Experts that a token is sent to.
        expert_hidden_size: Width of one.
        shared_hidden_size: Width of all shared ones together.
        dense_layers: Layers before any with experts.
        etp: Ranks that split an expert; empty for as many as split other layers.
        dispatcher: Token dispatcher; empty for the stack's default.  Behind it, with a space
            between them, its overlap with another microbatch, if any.
        recompute_layers: The number of ``recompute_method``; empty for all layers, one by one.
        recompute_method: Layers that the number is of.
        recompute_modules: Parts of a layer that run again, with spaces between them.
        stages: Layers of each virtual stage where stated, or a layout, in which an m is
            an MTP layer; empty for the rule of the stack.
        gradients: Format in which they are kept and reduced; empty for that of the stack.  Behind
            it, with a space between them, that of Adam's moments where a recipe names it.
        reshard_after_forward: Whether sharded parameters are gathered again for backward; empty for
            the stack's default.
        step_time_s: Printed or derived time of a step; empty where the run ran out of memory, or
            only its memory can be compared.
        peak_memory_gib: Printed memory of the fullest device, if any.
        memory_kind: Kind of that figure.
        out_of_memory: Whether the run is printed as not fitting.
        rel_tol: Error of the prediction up to which a test accepts the row.
        derived: Columns that were computed from other printed ones.
        note: Assumptions and doubts.
    """

    global_batch_size: Count
    pp: Count
    cp: Count = 1
    cp_type: Annotated[ContextParallel | None, BeforeValidator(empty_is_none)] = None
    dp: Count
    num_experts: OptionalCount = 0
    experts_per_token: OptionalCount = 0
    expert_hidden_size: OptionalCount = 0
    shared_hidden_size: OptionalCount = 0
    dense_layers: OptionalCount = 0
    ep: Count = 1
    etp: Annotated[Count | None, BeforeValidator(empty_is_none)] = None
    dispatcher: Annotated[tuple[Dispatcher | ExpertOverlap, ...], BeforeValidator(_words)] = ()
    vpp: Count
    schedule: Text
    recompute_layers: Annotated[Count | None, BeforeValidator(empty_is_none)] = None
    recompute_method: Annotated[RecomputeMethod | None, BeforeValidator(empty_is_none)] = None
    recompute_modules: Annotated[tuple[RecomputeModule, ...], BeforeValidator(_words)] = ()
    stages: Note
    gradients: Annotated[tuple[Precision, ...], Field(max_length=2), BeforeValidator(_words)]
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    reshard_after_forward: Annotated[bool | None, BeforeValidator(empty_is_none)] = None
    step_time_s: OptionalPositive
    peak_memory_gib: OptionalPositive
    memory_kind: Annotated[MemoryKind | None, BeforeValidator(empty_is_none)]
    out_of_memory: bool

    @model_validator(mode="after")
    def _check_figures(self) -> Self:
        has_figure = self.step_time_s is not None or self.peak_memory_gib is not None
        if has_figure == self.out_of_memory:
            raise ValueError(
                f"step_time_s={self.step_time_s} with out_of_memory={self.out_of_memory}; "
                "allowed: a time, a memory or both exactly where the run fits"
            )
        if (self.peak_memory_gib is None) != (self.memory_kind is None):
            raise ValueError(
                f"peak_memory_gib={self.peak_memory_gib} with memory_kind={self.memory_kind}; "
                "allowed: both or neither"
            )
        return self

    @property
    def extra_fields(self) -> dict[str, object]:
        """Routed experts and MTP layers of the model, if it has any."""
        predictions = {"prediction_layers": count_mtp_layers(self.stages)}
        if not self.num_experts:
            return {**predictions}
        sizes = {
            **named(self, "num_experts", "experts_per_token", "shared_hidden_size"),
            "hidden_size": self.expert_hidden_size,
            "first_dense_layers": self.dense_layers,
        }
        return {**predictions, "experts": {**sizes, **ROUTING.get(self.family, {})}}

    @property
    def job(self) -> TrainingJob:
        """Training job of the run."""
        return TrainingJob(
            model=self.model,
            global_batch_size=self.global_batch_size,
            seq_len=self.seq_len,
            precision=self.precision,
        )

    @property
    def plan(self) -> ResolvedPlan:
        """Plan of the run."""
        kept, moments, *_ = (*self.gradients, None, None)
        split = parse_stages(self.stages) if self.stages else load_stack(self.stack).stage_split
        dispatchers = [each for each in self.dispatcher if isinstance(each, Dispatcher)]
        overlaps = [each for each in self.dispatcher if isinstance(each, ExpertOverlap)]
        settings = {
            "dispatcher": dispatchers[0] if dispatchers else None,
            "expert_overlap": overlaps[0] if overlaps else None,
            "num_virtual_stages": self.vpp,
            "gradient_precision": kept,
            "reduce_precision": kept,
            "moment_precision": moments,
            "stages": resolve_stages(self.model, self.seq_len, self.pp * self.vpp, split),
            "prediction_stage": layout_mtp_stage(self.stages),
        }
        return ResolvedPlan.of({**self.plan_columns, **settings})


class PublishedLayer(_ModelRow):
    """One published time of a pass through one layer."""

    phase: PublishedPhase
    time_s: Positive


class ExcludedRun(_SourcedRow):
    """A published run that the simulator cannot express, and why."""

    step_time_s: Positive
    reason: Text


class PaddedLength(_SourcedRow):
    """Sequences that runs pad to less than the length they name, to that of their batch alone.

    Args:
        seq_len: Length that the rows of the source name.
        padded_len: Length that these sequences run with.
        num_sequences: Number of them in the corpus.
        note: Source of the numbers.
    """

    seq_len: Count
    padded_len: Count
    num_sequences: Count
    note: Note

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.padded_len > self.seq_len:
            raise ValueError(
                f"padded_len={self.padded_len} is longer than seq_len={self.seq_len}; "
                f"allowed: 1 to {self.seq_len}"
            )
        return self


def load_published_runs(path: Path | None = None) -> tuple[PublishedRun, ...]:
    """Return the published runs.

    Args:
        path: A table with the same columns, by default the built-in one.

    Raises:
        ProfileError: Naming file, line, column and value of the first mistake.

    >>> load_published_runs()[0].plan.world_size
    32
    """
    runs = load_rows(PublishedRun, path, RUNS_FILE)
    for run in runs:
        _check_layout(run, str(path or RUNS_FILE))
    return runs


def load_published_layers(path: Path | None = None) -> tuple[PublishedLayer, ...]:
    """Return the published times of single layers.

    Args:
        path: A table with the same columns, by default the built-in one.

    Raises:
        ProfileError: Naming file, line, column and value of the first mistake.

    >>> len(load_published_layers())
    10
    """
    return load_rows(PublishedLayer, path, LAYERS_FILE)


def load_excluded_runs(path: Path | None = None) -> tuple[ExcludedRun, ...]:
    """Return the published runs that are left out, each with its reason.

    Args:
        path: A table with the same columns, by default the built-in one.

    Raises:
        ProfileError: Naming file, line, column and value of the first mistake.

    >>> all(row.reason for row in load_excluded_runs())
    True
    """
    return load_rows(ExcludedRun, path, EXCLUDED_FILE)


def load_padded_lengths(path: Path | None = None) -> tuple[PaddedLength, ...]:
    """Return the lengths to which the batches of some sources are padded.

    Args:
        path: A table with the same columns, by default the built-in one.

    Raises:
        ProfileError: Naming file, line, column and value of the first mistake.

    >>> [each.padded_len for each in load_padded_lengths()][:3]
    [64, 128, 192]
    """
    return load_rows(PaddedLength, path, LENGTHS_FILE)


def _check_layout(run: PublishedRun, file: str) -> None:
    try:
        run.plan  # noqa: B018 - builds and checks model, plan and stages
    except PlanError as error:
        text = str(error).removeprefix(f"{run.id}: ")
        raise ProfileError(f"{file}: {run.id}: {text}") from None
