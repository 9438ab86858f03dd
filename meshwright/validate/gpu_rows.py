"""Rows of plans that ran on one GPU, and the tables made of them."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from meshwright.hwprofiles import GIBI, KILO, shown_path
from meshwright.simulator import PlanError
from meshwright.validate.comparison import PEAK, CheckUnit
from meshwright.validate.launch import rank_path
from meshwright.validate.ranks import RESULT_FILE

CSV_NAME, PAGE_NAME = "gpu_check.csv", "gpu_check.md"
STEP_TIME = "step time, median"
REQUESTED = "allocator: requested"
STEP_HEAD = (
    *("plan", "stack", "model", "batch x tokens", "microbatch", "step predicted", "measured"),
    *("error", "peak predicted", "live tensors", "error", "allocator", "error"),
)
PROBE_HEAD = (
    *("plan", "stack", "model", "tp x pp x dp", "rank", "quantity", "predicted", "measured"),
    "error",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRow:
    """One quantity of one plan.

    Args:
        plan: Name of the plan.
        stack: Its stack.
        model: Its model.
        layout: Degrees of tensor, pipeline and data parallelism.
        batch: Global batch by tokens of a sequence.
        microbatch_size: Sequences of a microbatch.
        precision: Number format.
        rank: Rank of the quantity.
        quantity: Quantity that was predicted and measured.
        unit: Its unit.
        predicted: Said by the simulator; None where it says nothing.
        measured: Found; None of a plan that failed.
        verdict: Whether they agree as they must, or "reported".
        measured_on: The day.
        device: On what.
        versions: Driver and libraries.
        failure: Why there is nothing; empty otherwise.
    """

    plan: str
    stack: str = ""
    model: str = ""
    layout: str = ""
    batch: str = ""
    microbatch_size: int = 0
    precision: str = ""
    rank: int
    quantity: str = ""
    unit: str = ""
    predicted: float | None = None
    measured: float | None = None
    verdict: str = ""
    measured_on: str
    device: str = ""
    versions: str = ""
    failure: str = ""

    @classmethod
    def failed(cls, plan: str, rank: int, reason: str, day: date) -> "CheckedRow":
        """Return the row of a plan that could not be run."""
        return cls(plan=plan, rank=rank, failure=reason, measured_on=day.isoformat())

    @property
    def is_main(self) -> bool:
        """Whether a reader wants it first: times, peaks, failures."""
        return bool(self.failure) or self.unit in (CheckUnit.SECONDS, CheckUnit.BYTES)

    @property
    def error(self) -> str:
        """Predicted over measured, less 1, in words."""
        if not self.measured or self.predicted is None:
            return "-"
        fraction = self.predicted / self.measured - 1
        return f"{fraction:+.1%}" if abs(fraction) >= 0.01 else f"{fraction:+.2%}"

    def __str__(self) -> str:
        """Return the row as a line."""
        if self.failure:
            return f"{self.plan}: failed: {self.failure}"
        predicted, measured = (shown(each, self.unit) for each in (self.predicted, self.measured))
        values = f"predicted {predicted}, measured {measured}"
        return f"{self.plan}: {self.quantity}: {values}, {self.error}"


def shown(value: float | None, unit: str) -> str:
    """Return a value with its unit.

    >>> shown(0.0125, CheckUnit.SECONDS), shown(3 * 2**30, CheckUnit.BYTES)
    ('12.50 ms', '3.000 GiB')
    >>> shown(None, CheckUnit.BYTES)
    '-'
    """
    if value is None:
        return "-"
    if unit == CheckUnit.SECONDS:
        return f"{value * KILO:.2f} ms"
    return f"{value / GIBI:.3f} GiB" if unit == CheckUnit.BYTES else f"{value:,.6g}"


def read_rows(name: str, rank: int, folder: Path) -> list[CheckedRow]:
    """Return the rows that a run of a plan left in *folder*; none of an unfinished run."""
    for file in ("validation.json", "probe.json"):
        path = folder / "run" / file
        if path.is_file():
            day = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
            document = _record(path)
            return list(_rows(name, rank, document, _versions(path.parent, document), day))
    return []


def _record(path: Path) -> dict[str, Any]:
    document = RESULT_FILE.read_json(path)
    if not isinstance(document, dict):
        raise PlanError(f"{shown_path(path)}: must hold a JSON object")
    return document


def _versions(folder: Path, document: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of a probe; of a run they are in its first rank's own file."""
    path = rank_path(folder, 0, "json")
    holder = _record(path) if path.is_file() else document
    versions: dict[str, str] = dict(holder.get("versions", {}))
    return versions


def _rows(
    name: str, rank: int, document: Mapping[str, Any], versions: dict[str, str], day: str
) -> Iterable[CheckedRow]:
    plan, job = document["plan"], document["job"]
    if "checks" in document:
        checks = document["checks"]
    else:
        of_ranks = [check for kind in document["ranks"] for check in kind["checks"]]
        checks = [*document["run"], *of_ranks]
    device = versions.pop("device", document.get("device", ""))
    for check in checks:
        yield CheckedRow(
            plan=name,
            stack=document["stack"],
            model=document["model"],
            layout=f"{plan['tp']} x {plan['pp']} x {plan['dp']}",
            batch=f"{job['global_batch_size']:,} x {job['seq_len']:,}",
            microbatch_size=plan["microbatch_size"],
            precision=job["precision"],
            rank=rank,
            quantity=check["quantity"],
            unit=check["unit"],
            predicted=check["predicted"],
            measured=check["measured"],
            verdict=check["verdict"],
            measured_on=day,
            device=device,
            versions=", ".join(f"{key} {value}" for key, value in sorted(versions.items())),
        )


def write_tables(rows: Sequence[CheckedRow], folder: Path) -> None:
    """Write all rows as CSV, and the tables of steps and of stages as a page."""
    with (folder / CSV_NAME).open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(field.name for field in fields(CheckedRow))
        writer.writerows(astuple(row) for row in rows)
    (folder / PAGE_NAME).write_text(page(rows), encoding="utf-8", newline="\n")


def page(rows: Sequence[CheckedRow]) -> str:
    """Return the tables of steps and of stages, and the devices they were measured on."""
    plans: dict[str, list[CheckedRow]] = {}
    for row in rows:
        plans.setdefault(row.plan, []).append(row)
    steps = [_step_cells(each) for each in plans.values() if _named(each, STEP_TIME)]
    probes = [
        _probe_cells(row)
        for each in plans.values()
        if not _named(each, STEP_TIME)
        for row in each
        if not row.failure
    ]
    places = dict.fromkeys(
        f"Measured {row.measured_on} on {row.device}; {row.versions}." for row in rows if row.device
    )
    failures = [f"- {row.plan}: {row.failure}" for row in rows if row.failure]
    parts = ["# Steps and stages on one device", *places]
    parts += ["An error is predicted over measured, less 1.", _table(STEP_HEAD, steps)]
    parts += [_table(PROBE_HEAD, probes), *(["Failed:", "\n".join(failures)] if failures else [])]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(each)} |" for each in (head, ["---"] * len(head), *rows))


def _named(rows: Iterable[CheckedRow], beginning: str) -> CheckedRow | None:
    return next((row for row in rows if row.quantity.startswith(beginning)), None)


def _step_cells(rows: Sequence[CheckedRow]) -> list[str]:
    first = rows[0]
    cells = [first.plan, first.stack, first.model, first.batch, str(first.microbatch_size)]
    for beginning, has_prediction in ((STEP_TIME, True), (PEAK, True), (REQUESTED, False)):
        row = _named(rows, beginning)
        cells += [shown(row.predicted, row.unit) if row else "-"] if has_prediction else []
        cells += [shown(row.measured, row.unit), row.error] if row else ["-", "-"]
    return cells


def _probe_cells(row: CheckedRow) -> list[str]:
    values = (shown(each, row.unit) for each in (row.predicted, row.measured))
    head = (row.plan, row.stack, row.model, row.layout, str(row.rank), row.quantity)
    return [*head, *values, row.error]
