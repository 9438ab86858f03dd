"""Exact peaks of live memory that Megatron-LM's own tests record, and their predictions.

Its tests print ``max_memory_allocated`` of the last rank: live tensors, and what libraries for
matrix products work in, of which the deterministic mode sets one (cuBLAS:
``CUBLAS_WORKSPACE_CONFIG=:4096:8``, 32 MiB a thread).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.hwprofiles import (
    GIBI,
    MEBI,
    Attention,
    ContextParallel,
    Device,
    LossKernel,
    Precision,
    Recompute,
    StackProfile,
    StageSplit,
    load_cluster,
    load_stack,
)
from meshwright.planner.reports import named
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob, resolve_stages, simulate
from meshwright.simulator.memory import workspace_bytes
from meshwright.simulator.model import parse_model
from meshwright.validate.published.rows import (
    SIZES,
    Count,
    Note,
    OptionalPositive,
    Positive,
    Row,
    Text,
    load_rows,
)

PEAKS_FILE = "published_peaks.csv"
EXCLUDED_FILE = "published_peaks_excluded.csv"
STACK = "megatron-core@0.12"
DETERMINISTIC_WORKSPACE = 8 * 4 * MEBI  # ":4096:8" is eight of 4,096 KiB


class PublishedPeak(Row):
    """The peak of one of Megatron-LM's tests.

    Args:
        options: Arguments of the run that its layout does not say, without dashes.
        peak_memory_gib: Most memory that the last rank had allocated.
    """

    cluster: Text
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    ffn_hidden_size: Count
    vocab_size: Count
    seq_len: Count
    precision: Precision
    global_batch_size: Count
    microbatch_size: Count
    tp: Count
    pp: Count
    cp: Count = 1
    dp: Count
    vpp: Count
    options: Note
    peak_memory_gib: Positive

    @property
    def switches(self) -> Mapping[str, str]:
        """Options by name; those without a value have an empty one."""
        words = (word.partition("=") for word in self.options.split())
        return {name: value for name, _, value in words}


class ExcludedPeak(Row):
    """A peak of a run that the simulator cannot express, and why."""

    peak_memory_gib: OptionalPositive
    reason: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakComparison:
    """Published peak and its prediction, in bytes."""

    row: PublishedPeak
    attention: Attention
    published_bytes: float
    predicted_bytes: int

    @property
    def error_fraction(self) -> float:
        """Prediction over publication, less one: negative is too little."""
        return self.predicted_bytes / self.published_bytes - 1


def load_published_peaks(path: Path | None = None) -> tuple[PublishedPeak, ...]:
    """Return the published peaks.

    Args:
        path: A table with the same columns, by default the built-in one.

    Raises:
        ProfileError: Naming file, line, column and value of the first mistake.

    >>> load_published_peaks()[0].pp
    4
    """
    return load_rows(PublishedPeak, path, PEAKS_FILE)


def load_excluded_peaks(path: Path | None = None) -> tuple[ExcludedPeak, ...]:
    """Return the published peaks that are left out, each with its reason.

    Args:
        path: A table with the same columns, by default the built-in one.

    Raises:
        ProfileError: Naming file, line, column and value of the first mistake.

    >>> all(row.reason for row in load_excluded_peaks())
    True
    """
    return load_rows(ExcludedPeak, path, EXCLUDED_FILE)


def compare_peak(row: PublishedPeak) -> PeakComparison:
    """Return the prediction for the last rank of *row*."""
    cluster, stack, model = load_cluster(row.cluster), _stack(row), _model(row)
    job = TrainingJob(
        model=model,
        global_batch_size=row.global_batch_size,
        seq_len=row.seq_len,
        precision=row.precision,
    )
    result = simulate(job, _plan(row, model), cluster, stack)
    live = result.memory.by_stage[-1].peak_bytes
    return PeakComparison(
        row=row,
        attention=result.plan.attention,
        published_bytes=row.peak_memory_gib * GIBI,
        predicted_bytes=live + workspace_bytes(_device(row), _libraries(row, stack), model),
    )


def _device(row: PublishedPeak) -> Device:
    """Return the device of *row*, with the workspaces of its mode."""
    device = load_cluster(row.cluster).device
    if device.overheads is None or "deterministic-mode" not in row.switches:
        return device
    overheads = device.overheads.model_copy(
        update={"product_workspace_bytes": DETERMINISTIC_WORKSPACE}
    )
    return device.model_copy(update={"overheads": overheads})


def _stack(row: PublishedPeak) -> StackProfile:
    fuses = "cross-entropy-loss-fusion" in row.switches
    facts = {
        "loss": LossKernel.COMPILED if fuses else LossKernel.IN_PLACE,
        "fused_gradient_accumulation": "no-gradient-accumulation-fusion" not in row.switches,
        "overlap_gradient_reduce": "overlap-grad-reduce" in row.switches,
        "overlap_parameter_gather": "overlap-param-gather" in row.switches,
        "transformer_engine": row.switches["transformer-impl"] != "local",
        "grouped_experts": "moe-grouped-gemm" in row.switches,
    }
    return load_stack(STACK).model_copy(update=facts)


def _libraries(row: PublishedPeak, stack: StackProfile) -> StackProfile:
    """Return *stack* with the libraries that multiply: a router's product is Transformer Engine's.

    So it is in Megatron's own layers, too (RouterGatingLinearFunction of core 0.16).
    """
    if "num-experts" not in row.switches:
        return stack
    return stack.model_copy(update={"transformer_engine": True})


def _model(row: PublishedPeak) -> ModelSpec:
    switches = row.switches
    has_bias = "disable-bias-linear" not in switches
    data: dict[str, object] = {
        "name": "published",
        **named(row, *SIZES),
        "gated_mlp": "swiglu" in switches,
        "tied_embeddings": "untie-embeddings-and-output-weights" not in switches,
        "positions": "rotary" if "position-embedding-type" in switches else "learned",
        "norm": "rmsnorm" if "normalization" in switches else "layernorm",
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": has_bias,
        **_experts(row),
    }
    return parse_model(data, origin=row.id)


def _experts(row: PublishedPeak) -> dict[str, object]:
    """Return the experts of a model, if any; without dropout unless it is set."""
    switches = row.switches
    if "num-experts" not in switches:
        return {}
    experts = {
        "num_experts": int(switches["num-experts"]),
        "experts_per_token": int(switches["moe-router-topk"]),
        "hidden_size": int(switches.get("moe-ffn-hidden-size", row.ffn_hidden_size)),
        "shared_hidden_size": int(switches.get("moe-shared-expert-intermediate-size", 0)),
        "activation": "silu" if "swiglu" in switches else "gelu",
    }
    return {"experts": experts, "dropout": "hidden-dropout" not in switches}


def _plan(row: PublishedPeak, model: ModelSpec) -> ResolvedPlan:
    switches = row.switches
    etp = switches.get("expert-tensor-parallel-size")
    settings = {
        "num_virtual_stages": row.vpp,
        "schedule": "interleaved" if row.vpp > 1 else "1f1b",
        "zero_stage": _zero_stage(switches),
        "sequence_parallel": "sequence-parallel" in switches,
        "recompute": Recompute.FULL if "recompute" in switches else Recompute.NONE,
        "attention": _attention(row),
        "stages": _stages(row, model),
        "ep": int(switches.get("expert-model-parallel-size", 1)),
        "etp": None if etp is None else int(etp),
    }
    return ResolvedPlan.of({**row.plan_columns, **settings, **_context(row)})


def _zero_stage(switches: Mapping[str, str]) -> int:
    """Return the ZeRO stage; of Megatron-FSDP's strategies the rows have the full one."""
    return 3 if "use-megatron-fsdp" in switches else int("use-distributed-optimizer" in switches)


def _context(row: PublishedPeak) -> dict[str, object]:
    """Return the fields of hybrid ring + all-to-all: its inner ranks are the first size."""
    sizes = row.switches.get("hierarchical-context-parallel-sizes")
    if sizes is None:
        return {}
    return {"cp_type": ContextParallel.HYBRID_RING, "cp_inner": int(sizes.split("/")[0])}


def _attention(row: PublishedPeak) -> Attention:
    """Return the attention: as printed; Megatron's own layers, and older software, are unfused."""
    stated = row.switches.get("attention-backend")
    is_unfused = stated == "unfused" or row.switches["transformer-impl"] == "local"
    by_default = stated is None and "_lts_" in row.id
    return Attention.UNFUSED if is_unfused or by_default else Attention.FLASH


def _stages(row: PublishedPeak, model: ModelSpec) -> tuple[int, ...]:
    """Return the layers of each stage: even, or as the options say."""
    count, switches = row.pp * row.vpp, row.switches
    if "account-for-embedding-in-pipeline-split" in switches:
        # Embedding and head count as a layer each.
        share = (model.num_layers + 2) // count
        return (share - 1, *(share,) * (count - 2), share - 1)
    first, last = (f"decoder-{each}-pipeline-num-layers" for each in ("first", "last"))
    if first in switches:
        ends = int(switches[first]), int(switches[last])
        middle = (model.num_layers - sum(ends)) // (count - 2)
        return (ends[0], *(middle,) * (count - 2), ends[1])
    return resolve_stages(model, row.seq_len, count, StageSplit.EVEN)
