"""Predictions against published runs: errors row by row and by source."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from meshwright.hwprofiles import GIBI, PS_PER_S, load_cluster, load_stack
from meshwright.simulator import CostModel, ResolvedPlan, StepResult, TrainingJob, simulate
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.memory import Overheads
from meshwright.validate.published.runs import (
    ExcludedRun,
    MemoryKind,
    PaddedLength,
    PublishedLayer,
    PublishedPhase,
    PublishedRun,
    load_excluded_runs,
    load_padded_lengths,
    load_published_layers,
    load_published_runs,
)


class Quantity(StrEnum):
    """Quantity that is compared: seconds of a step or of a layer, bytes of memory."""

    STEP_TIME = "step time"
    LAYER_TIME = "layer time"
    MEMORY = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One published figure and its prediction, in seconds or bytes."""

    id: str
    source: str
    quantity: Quantity
    published: float
    predicted: float
    rel_tol: float

    @property
    def error_fraction(self) -> float:
        """Prediction over publication, less one: negative is too fast or too small."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Predicted fit of a run in its devices, against the printed outcome."""

    id: str
    source: str
    out_of_memory: bool
    ranks: tuple[tuple[int, int], ...]
    """Live bytes of each pipeline rank, and those of them that live from step to step."""
    overheads: Overheads
    usable_bytes: int

    @property
    def device_bytes(self) -> int:
        """Predicted bytes of the fullest device."""
        parts = [self.overheads.fragmentation.reserved_parts(*rank) for rank in self.ranks]
        return self.overheads.device_bytes(max(parts))

    @property
    def fits(self) -> bool:
        """Whether they are no more than processes can have of the device."""
        return self.device_bytes <= self.usable_bytes

    @property
    def is_called_right(self) -> bool:
        """Whether that is as printed."""
        return self.fits is not self.out_of_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSummary:
    """Errors of one quantity over the rows of one source; *worst* has the largest."""

    source: str
    quantity: Quantity
    num_rows: int
    mean_abs_fraction: float
    median_abs_fraction: float
    bias_fraction: float
    worst: Comparison

    @classmethod
    def of(cls, rows: Sequence[Comparison]) -> "SourceSummary":
        """Return the summary of rows of one source and quantity."""
        errors = [row.error_fraction for row in rows]
        sizes = [abs(error) for error in errors]
        return cls(
            source=rows[0].source,
            quantity=rows[0].quantity,
            num_rows=len(rows),
            mean_abs_fraction=fmean(sizes),
            median_abs_fraction=median(sizes),
            bias_fraction=fmean(errors),
            worst=max(rows, key=lambda row: abs(row.error_fraction)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoreboard:
    """All comparisons, the verdict on each run, and the rows left out."""

    comparisons: tuple[Comparison, ...]
    verdicts: tuple[Verdict, ...]
    excluded: tuple[ExcludedRun, ...]

    @property
    def finished(self) -> tuple[Verdict, ...]:
        """The verdicts on runs that are printed as having run."""
        return tuple(verdict for verdict in self.verdicts if not verdict.out_of_memory)

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """The verdicts on runs that are printed as out of memory."""
        return tuple(verdict for verdict in self.verdicts if verdict.out_of_memory)

    @property
    def summaries(self) -> tuple[SourceSummary, ...]:
        """Errors by quantity and source, in the order of the tables."""
        groups: dict[tuple[Quantity, str], list[Comparison]] = {}
        for quantity in Quantity:
            for row in self.comparisons:
                if row.quantity is quantity:
                    groups.setdefault((quantity, row.source), []).append(row)
        return tuple(SourceSummary.of(rows) for rows in groups.values())


def scoreboard(
    runs: Iterable[PublishedRun] | None = None,
    layers: Iterable[PublishedLayer] | None = None,
    excluded: Iterable[ExcludedRun] | None = None,
) -> Scoreboard:
    """Return predictions against published runs and layers.

    Args:
        runs: Runs to simulate, by default the built-in table.
        layers: Layer times to predict, by default the built-in table.
        excluded: Rows to list as left out, by default the built-in table.
    """
    runs = load_published_runs() if runs is None else tuple(runs)
    padded = load_padded_lengths()
    ragged = {(each.source, each.seq_len) for each in padded}
    layers = load_published_layers() if layers is None else layers
    comparisons: list[Comparison] = []
    verdicts: list[Verdict] = []
    for run in runs:
        result = simulate_run(run)
        is_ragged = (run.source, run.seq_len) in ragged
        predicted_s = step_time_s(run, padded) if is_ragged else result.step_time_s
        comparisons += _run_comparisons(run, result, predicted_s)
        verdicts.append(_verdict(run, result))
    comparisons += [_layer_comparison(layer) for layer in layers]
    return Scoreboard(
        comparisons=tuple(comparisons),
        verdicts=tuple(verdicts),
        excluded=load_excluded_runs() if excluded is None else tuple(excluded),
    )


def simulate_run(run: PublishedRun) -> StepResult:
    """Return the simulated step of a published run."""
    return simulate(run.job, run.plan, load_cluster(run.cluster), load_stack(run.stack))


def step_time_s(run: PublishedRun, lengths: Iterable[PaddedLength] | None = None) -> float:
    """Return the predicted seconds of a step of *run*.

    Where each batch is padded to its own length, the mean of the steps of those lengths: all
    microbatches of a step being alike or not, their times add up.

    Args:
        run: Run that was counted.
        lengths: Lengths of sources that pad so, by default the built-in table.
    """
    lengths = load_padded_lengths() if lengths is None else lengths
    source_lengths = [
        each for each in lengths if (each.source, each.seq_len) == (run.source, run.seq_len)
    ]
    if not source_lengths:
        return simulate_run(run).step_time_s
    total_s = 0.0
    for each in source_lengths:
        padded = run.model_copy(update={"seq_len": each.padded_len})
        total_s += each.num_sequences * simulate_run(padded).step_time_s
    return total_s / sum(each.num_sequences for each in source_lengths)


def layer_time_s(layer: PublishedLayer) -> float:
    """Return the predicted seconds of one pass through one layer."""
    stack = load_stack(layer.stack)
    job = TrainingJob(
        model=layer.model,
        global_batch_size=layer.microbatch_size,
        seq_len=layer.seq_len,
        precision=layer.precision,
    )
    plan = ResolvedPlan.of({**layer.plan_columns, "stages": (layer.num_layers,)})
    costs = CostModel(load_cluster(layer.cluster), stack, plan.world_size)
    cost = costs.block_cost(BlockShape.of(job, plan, stack), "layer")
    phase = cost.forward if layer.phase is PublishedPhase.FORWARD else cost.backward
    return phase.time_ps / PS_PER_S


def _layer_comparison(layer: PublishedLayer) -> Comparison:
    return Comparison(
        id=layer.id,
        source=layer.source,
        quantity=Quantity.LAYER_TIME,
        published=layer.time_s,
        predicted=layer_time_s(layer),
        rel_tol=layer.rel_tol,
    )


def _run_comparisons(
    run: PublishedRun, result: StepResult, predicted_s: float
) -> Iterator[Comparison]:
    figures: list[tuple[Quantity, float | None, float]] = [
        (Quantity.STEP_TIME, run.step_time_s, predicted_s)
    ]
    if run.peak_memory_gib is not None:
        figures.append((Quantity.MEMORY, run.peak_memory_gib * GIBI, _memory_bytes(run, result)))
    for quantity, published, predicted in figures:
        if published is not None:
            yield Comparison(
                id=run.id,
                source=run.source,
                quantity=quantity,
                published=published,
                predicted=predicted,
                rel_tol=run.rel_tol,
            )


def _memory_bytes(run: PublishedRun, result: StepResult) -> int:
    match run.memory_kind:
        case MemoryKind.DEVICE:
            return result.memory.device_bytes
        case MemoryKind.RESERVED:
            return result.memory.reserved_bytes
        case _:
            return result.memory.peak_bytes


def _verdict(run: PublishedRun, result: StepResult) -> Verdict:
    memory = result.memory
    fragmentation = memory.overheads.fragmentation
    return Verdict(
        id=run.id,
        source=run.source,
        out_of_memory=run.out_of_memory,
        ranks=tuple((each.peak_bytes, each.state_bytes(fragmentation)) for each in memory.by_stage),
        overheads=memory.overheads,
        usable_bytes=memory.usable_bytes,
    )
