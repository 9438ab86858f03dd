"""Results of a calibration and of job traces as tables for a terminal."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.hwprofiles import (
    Device,
    Link,
    Profile,
    format_bandwidth,
    format_flops_per_s,
    format_time,
    shown_path,
)
from meshwright.planner.reports import output_file
from meshwright.validate.calibration.fit import Residual, Summary, misfit_of, rate_unit, summaries
from meshwright.validate.calibration.rows import CaseGroup, Coverage
from meshwright.validate.traces import JobTrace


def calibration_report(
    head: str,
    residuals: Sequence[Residual],
    *,
    device: Device | None,
    link: Link | None,
    coverage: Mapping[str, Coverage],
    files: Sequence[Path],
) -> RenderableType:
    """Return the tables of a calibration: residuals, constants of the profiles, files.

    Args:
        head: Machine and versions.
        residuals: Of all rows.
        device: The calibrated device, if there is one.
        link: The calibrated link, if there is one.
        coverage: Cases measured, by kind.
        files: Files that were written.
    """
    modelled = [each for each in residuals if each.modelled_s is not None]
    times = {each.row.case: each.modelled_s for each in modelled}
    overall = misfit_of([each.row for each in modelled], times.get)
    facts = _table("what", "value")
    for what, done in coverage.items():
        facts.add_row("measured", f"{done.num_measured} of {done.num_cases} {what}")
    for row in _device_facts(device) + _link_facts(link) + _launch_facts(residuals):
        facts.add_row(*row)
    facts.add_row("model against measurement", str(overall))
    for path in files:
        facts.add_row("written", shown_path(path))
    return Stack(Text(head), Text(""), residual_table(summaries(residuals)), Text(""), facts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left", no_wrap=name != "value", overflow="fold")
    return table


def residual_table(found: Sequence[Summary]) -> Table:
    """Return a line an operation: rows, measured rates, and the errors of the profiles."""
    table = _table("group", "operation", "rows")
    for name in ("slowest", "fastest", "median |error|", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        table.add_row(
            str(each.group),
            each.op,
            str(each.num_rows),
            *(_rate(each.group, rate) for rate in (each.lowest_rate, each.highest_rate)),
            *(
                (f"{each.misfit.median_fraction:.1%}", f"{each.misfit.worst_fraction:.1%}")
                if each.misfit.num_rows
                else ("no model", "")
            ),
        )
    return table


def _rate(group: CaseGroup, rate: float) -> str:
    if group is CaseGroup.LAUNCH:
        return ""
    return format_flops_per_s(rate) if rate_unit(group) == "FLOP/s" else format_bandwidth(rate)


def _device_facts(device: Device | None) -> list[tuple[str, str]]:
    if device is None:
        return []
    facts = [
        (f"peak {key}", format_flops_per_s(rate)) for key, rate in device.peak_flops_per_s.items()
    ]
    gemm = ("plateau_fraction", "prologue_k", "half_rate_intensity")
    facts.append(("gemm", _values(device.gemm, *gemm)))
    facts.append(("", _values(device.gemm, "partial_wave_fraction", "misaligned_fraction")))
    rate = format_bandwidth(device.memory_bandwidth_bytes_per_s)
    facts.append(("memory", f"{rate}, {_values(device.memory, 'bandwidth_fraction')}"))
    for name, kernel in device.flash.items():
        shares = _values(kernel, "forward_fraction", "backward_fraction")
        facts.append((f"flash {name}", shares))
    return facts


def _values(record: Profile, *names: str) -> str:
    return ", ".join(f"{name} {getattr(record, name):g}" for name in names)


def _link_facts(link: Link | None) -> list[tuple[str, str]]:
    facts = []
    for fact in link.collectives if link is not None else ():
        rate, latency = format_bandwidth(fact.busbw_bytes_per_s), format_time(fact.latency_s)
        facts.append((f"{fact.op} {fact.num_ranks} ranks", f"busbw {rate}, latency {latency}"))
    return facts


def _launch_facts(residuals: Sequence[Residual]) -> list[tuple[str, str]]:
    return [
        ("kernel launch", f"{format_time(each.row.median_s)} back to back")
        for each in residuals
        if each.row.case.group is CaseGroup.LAUNCH
    ]


def trace_report(path: Path, trace: JobTrace) -> RenderableType:
    """Return the device time of a job by kernel kind."""
    table = _table("kernels")
    for name in ("count", "time", "share of kernel time"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in trace.kinds:
        table.add_row(
            each.kind,
            f"{each.num_kernels:,}",
            format_time(each.time_s),
            f"{each.share_fraction:.1%}",
        )
    facts = _table("device time", "value")
    for name, time_s in trace_times(trace).items():
        share = f", {time_s / trace.span_s:.1%}" if trace.span_s else ""
        facts.add_row(name, f"{format_time(time_s)}{share}")
    return Stack(Text(f"trace {shown_path(path)}"), Text(""), table, Text(""), facts)


def trace_times(trace: JobTrace) -> dict[str, float]:
    """Return the times of a trace that belong to no single kind of kernel."""
    return {
        "first to last kernel": trace.span_s,
        "computation": trace.compute_s,
        "communication": trace.communication_s,
        "communication hidden": trace.overlap_s,
        "communication exposed": trace.exposed_comm_s,
        "idle": trace.idle_s,
    }


def write_trace(trace: JobTrace, path: Path) -> None:
    """Write the times of a trace as CSV."""
    with output_file(path) as draft, draft.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("kind", "num_kernels", "time_s", "share_fraction"))
        for each in trace.kinds:
            writer.writerow(
                (each.kind, each.num_kernels, f"{each.time_s:.9g}", f"{each.share_fraction:.6f}")
            )
        for name, time_s in trace_times(trace).items():
            writer.writerow((name, "", f"{time_s:.9g}", ""))
