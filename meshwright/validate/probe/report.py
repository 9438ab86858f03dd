"""A probe as a table for a terminal, as a page and as a JSON document."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.hwprofiles import GIBI, counted
from meshwright.planner.reports import (
    Json,
    SavedPlan,
    json_text,
    new_folder,
    plan_document,
)
from meshwright.validate.comparison import (
    PEAK,
    Check,
    CheckUnit,
    CheckVerdict,
    check_fields,
    has_failed,
    saved_fields,
)
from meshwright.validate.probe.stage_probe import ProbeReport, Spread
from meshwright.validate.ranks import Backend

# Shards are rounded up and norms keep statistics: of a small model that is some of a percent.
PROBED_PEAK_TOLERANCE = 0.01
# Stacks whose stages the tests hold to it. Units of FSDP2 wait for nobody here, so that they free
# gathered weights earlier than in a run.
GATED_STACKS = ("ddp@", "megatron-core@")
PAGE_WIDTH = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """Result of a probe.

    Args:
        saved: The plan.
        probe: Predicted and measured.
        on_cpu: Whether live tensors were counted; on a GPU its allocator says what it held.
    """

    saved: SavedPlan
    probe: ProbeReport
    on_cpu: bool

    @property
    def is_gated(self) -> bool:
        """Whether the peak must agree."""
        return self.on_cpu and self.saved.stack.name.startswith(GATED_STACKS)

    @property
    def agrees(self) -> bool:
        """Whether nothing has failed."""
        return not has_failed(probe_checks(self))


def probe_checks(result: ProbeResult) -> list[Check]:
    """Return the checks of a probe: times are reported, the peak may be a gate."""
    predicted, measured = result.probe.predicted, result.probe.measured
    checks = [
        Check(
            quantity=name, unit=CheckUnit.SECONDS, predicted=predicted_s, measured=spread.median_s
        )
        for name, predicted_s, spread in timed_rows(result.probe)
    ]
    is_near = abs(measured.peak_bytes / predicted.peak_bytes - 1) <= PROBED_PEAK_TOLERANCE
    verdict, reason = CheckVerdict.PASSED if is_near else CheckVerdict.FAILED, ""
    if not result.is_gated:
        verdict = CheckVerdict.REPORTED
    elif not is_near:
        reason = f"must agree within {PROBED_PEAK_TOLERANCE:.0%}"
    checks.append(
        Check(
            quantity=PEAK,
            unit=CheckUnit.BYTES,
            predicted=predicted.peak_bytes,
            measured=measured.peak_bytes,
            verdict=verdict,
            reason=reason,
        )
    )
    return checks


def probe_report(result: ProbeResult) -> RenderableType:
    """Return a probe as text and a table for a terminal."""
    head, end = (Text("\n".join(lines)) for lines in (_head(result), _end(result)))
    return Group(head, Text(""), probe_table(result.probe), Text(""), end)


def probe_document(result: ProbeResult) -> dict[str, Json]:
    """Return the same as JSON; seconds and bytes are exact."""
    saved, measured = result.saved, result.probe.measured
    spreads: dict[str, Json] = {
        name: _spread_fields(spread) for name, _, spread in timed_rows(result.probe)
    }
    return {
        **saved_fields(saved),
        "backend": Backend.PROBE.value,
        "rank": measured.rank,
        "device": measured.device,
        "predicted_device": result.probe.predicted.device,
        "versions": dict(measured.versions),
        "num_steps": measured.num_steps,
        "num_microbatches": saved.plan.num_microbatches(saved.job),
        "num_microbatches_run": measured.num_microbatches,
        "agrees": result.agrees,
        "checks": [check_fields(each) for each in probe_checks(result)],
        "spreads_s": spreads,
    }


def write_probe(result: ProbeResult, folder: Path) -> None:
    """Write plan.json, report.md and probe.json."""
    console = Console(width=PAGE_WIDTH, record=True, quiet=True)
    console.print(probe_report(result))
    page = "\n".join(f"    {line}".rstrip() for line in console.export_text().splitlines())
    texts = {
        "plan.json": json_text(plan_document(result.saved)),
        "report.md": f"# Probe\n\n{page}\n",
        "probe.json": json_text(probe_document(result)),
    }
    with new_folder(folder) as files:
        for name, text in texts.items():
            (files / name).write_text(text, encoding="utf-8", newline="\n")


def _head(result: ProbeResult) -> Iterator[str]:
    saved, measured = result.saved, result.probe.measured
    plan, whole = saved.plan, saved.plan.num_microbatches(saved.job)
    size = f"{counted(plan.world_size, 'GPU')} of {saved.cluster.name}"
    yield f"{saved.job.model.name}, plan for {size}, stack {saved.stack.name}"
    yield "backend  probe: one rank computes, what others would send is random"
    steps = counted(measured.num_steps, "step")
    yield f"batch    {measured.num_microbatches} of {counted(whole, 'microbatch')}, {steps}"


def _end(result: ProbeResult) -> Iterator[str]:
    measured, cluster = result.probe.measured, result.saved.cluster
    yield f"note: time is predicted for {cluster.name}, measured on {measured.device}"
    tolerance = f"{PROBED_PEAK_TOLERANCE:.0%}"
    if not result.is_gated:
        yield "times and peak memory are reported, not judged"
    elif result.agrees:
        yield f"peak live bytes within {tolerance}; times are reported"
    else:
        yield f"peak live bytes do not agree within {tolerance}"


def probe_table(report: ProbeReport) -> Table:
    """Return a table of predicted and measured times and peak; spreads are least to most."""
    predicted, measured = report.predicted, report.measured
    title = (
        f"rank {measured.rank} of {measured.world_size}: predicted on {predicted.device}, "
        f"measured on {measured.device} without communication"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "predicted", "measured", "spread", "measured/predicted"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for name, predicted_s, spread in timed_rows(report):
        table.add_row(
            name,
            f"{predicted_s * 1e3:.3f} ms",
            f"{spread.median_s * 1e3:.3f} ms",
            f"{spread.least_s * 1e3:.3f} to {spread.most_s * 1e3:.3f} ms",
            f"{spread.median_s / predicted_s:.2f}" if predicted_s else "",
        )
    table.add_row(
        "peak memory",
        f"{predicted.peak_bytes / GIBI:.3f} GiB",
        f"{measured.peak_bytes / GIBI:.3f} GiB",
        "",
        f"{measured.peak_bytes / predicted.peak_bytes:.4f}",
    )
    return table


def timed_rows(report: ProbeReport) -> Iterable[tuple[str, float, Spread]]:
    """Yield the name, predicted seconds and measured spread of each timed part."""
    predicted, measured = report.predicted, report.measured
    for index, (passes_s, stage) in enumerate(
        zip(predicted.passes_s, measured.stages, strict=True)
    ):
        yield f"virtual stage {index}: forward", passes_s[0], stage.forward
        yield f"virtual stage {index}: backward", passes_s[1], stage.backward
    yield "optimizer step", predicted.update_s, measured.update


def _spread_fields(spread: Spread) -> dict[str, Json]:
    return {
        "median": spread.median_s,
        "least": spread.least_s,
        "most": spread.most_s,
        "num_samples": spread.num_samples,
    }
