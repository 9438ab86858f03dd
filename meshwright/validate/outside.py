"""Counts of training frameworks' own programs against their predictions.

The programs are in ``tests_outside``, with the command that counts them; here is what it found, so
that the last table of docs/agreement.md is made without the frameworks.
"""

import csv
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib.resources import files
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict

from meshwright.planner.reports import SavedPlan
from meshwright.validate.cli import plan_of_options
from meshwright.validate.comparison import Check, CheckUnit, CheckVerdict, compare_rank
from meshwright.validate.ranks import (
    CollectiveCount,
    RankMeasurement,
    predict_members,
    representative_members,
)

CLUSTER = "dgx-h100"  # its times are not compared; any that has fp8 would do
DATA = files("meshwright.validate") / "data"
PLANS, COUNTS = "outside_plans.csv", "outside_counts.csv"
COUNT_HEAD = ("plan", "rank", "witness", "flops", "peak_bytes", "collectives")
# Not predicted of live bytes: a framework's scalars and flags, caches of positions.
PEAK_TOLERANCE = 0.003
TABLE_HEAD = ("plan", "framework", "options", "rank", "FLOPs", "calls (kinds)", "peak", "why not")


class Quantity(StrEnum):
    """Quantity of a rank that is compared."""

    FLOPS = "flops"
    COLLECTIVES = "collectives"
    PEAK = "peak"


def _words(text: object) -> object:
    return tuple(text.split()) if isinstance(text, str) else text


class OutsidePlan(BaseModel):
    """A plan that a framework's own program is counted for.

    Args:
        name: Its name in the table.
        framework: Framework of the program.
        size: "live" ones are counted by ``scripts/test-outside``, "recorded" ones by the command.
        options: Model and options of ``meshwright simulate``; a model may be one of those here.
        ranks: Ranks to count; empty: one of each kind.
        differs: Quantities that are not predicted as counted.
        note: Why.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    framework: Literal[
        "torchtitan", "torchtitan 0.3", "megatron-core", "transformers", "accelerate"
    ]
    size: Literal["live", "recorded"]
    options: str
    ranks: Annotated[tuple[int, ...], BeforeValidator(_words)]
    differs: Annotated[tuple[Quantity, ...], BeforeValidator(_words)]
    note: str

    def saved(self) -> SavedPlan:
        """Return the plan."""
        model, rest = self.options.split(maxsplit=1)
        path = DATA / "outside_models" / f"{model}.toml"
        return plan_of_options(f"{path if path.is_file() else model} {rest}", CLUSTER)

    def counted_ranks(self) -> tuple[int, ...]:
        """Return the ranks that are counted."""
        return self.ranks or representative_members(self.saved())


class OutsideCount(NamedTuple):
    """Counts of one rank of a framework's program.

    Args:
        plan: Name of the plan.
        witness: Framework and version.
        measured: The counts.
    """

    plan: str
    witness: str
    measured: RankMeasurement

    def row(self) -> tuple[str, ...]:
        """Return its row of the file below `COUNT_HEAD`."""
        counts = self.measured
        calls = "; ".join(" ".join(map(str, call)) for call in counts.collectives)
        numbers = (counts.flops, counts.peak_bytes)
        return (self.plan, str(counts.rank), self.witness, *map(str, numbers), calls)


def load_outside_plans() -> tuple[OutsidePlan, ...]:
    """Return the plans, in the order of the table."""
    text = (DATA / PLANS).read_text(encoding="utf-8")
    return tuple(OutsidePlan.model_validate(row) for row in csv.DictReader(text.splitlines()))


def load_outside_counts() -> tuple[OutsideCount, ...]:
    """Return the recorded counts.

    >>> load_outside_counts()[0].measured.backend
    'fake'
    """
    text = (DATA / COUNTS).read_text(encoding="utf-8")
    return tuple(_count(row) for row in csv.DictReader(text.splitlines()))


def compare_outside(plan: OutsidePlan, counts: Iterator[RankMeasurement]) -> list[list[Check]]:
    """Return the checks of a plan's ranks against their counts, rank by rank."""
    measured = list(counts)
    predicted = predict_members(plan.saved(), [each.rank for each in measured])
    return [compare_rank(predicted[each.rank], each) for each in measured]


def differing(checks: list[Check]) -> dict[Quantity, list[Check]]:
    """Return the checks of a rank that do not agree, by quantity."""
    calls = [check for check in checks if check.unit is CheckUnit.CALLS]
    peak = _peak(checks)
    found = {
        Quantity.FLOPS: [_flops(checks)] if _flops(checks).verdict is CheckVerdict.FAILED else [],
        Quantity.COLLECTIVES: [each for each in calls if each.verdict is CheckVerdict.FAILED],
        Quantity.PEAK: [peak] if _is_far(peak) else [],
    }
    return {quantity: failed for quantity, failed in found.items() if failed}


def _is_far(peak: Check) -> bool:
    return abs(peak.difference_fraction or 0) > PEAK_TOLERANCE


def outside_rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows below `TABLE_HEAD`: recorded counts against today's predictions."""
    counts = load_outside_counts()
    for plan in load_outside_plans():
        plan_counts = [each for each in counts if each.plan == plan.name]
        compared = compare_outside(plan, (each.measured for each in plan_counts))
        for each, checks in zip(plan_counts, compared, strict=True):
            yield (
                plan.name,
                each.witness,
                plan.options,
                str(each.measured.rank),
                *_cells(checks),
                plan.note if differing(checks) else "",
            )


def _cells(checks: list[Check]) -> tuple[str, str, str]:
    failed = differing(checks)
    calls = [check for check in checks if check.unit is CheckUnit.CALLS and check.measured]
    counted = f"{sum(int(check.measured) for check in calls):,} ({len(calls)})"
    missed = len(failed.get(Quantity.COLLECTIVES, ()))
    peak = _peak(checks)
    difference = f"{peak.difference_fraction or 0.0:+.2%}"
    flops = _flops(checks)
    return (
        "equal" if Quantity.FLOPS not in failed else f"{flops.difference_fraction or 0.0:+.2%}",
        f"{counted}, {missed} differ" if missed else f"{counted}, equal",
        f"**{difference}**" if _is_far(peak) else difference,
    )


def _peak(checks: list[Check]) -> Check:
    return next(check for check in checks if check.unit is CheckUnit.BYTES)


def _flops(checks: list[Check]) -> Check:
    return next(check for check in checks if check.unit is CheckUnit.FLOPS)


def _count(row: Mapping[str, str]) -> OutsideCount:
    measured = RankMeasurement(
        rank=int(row["rank"]),
        world_size=0,
        backend="fake",
        flops=int(row["flops"]),
        collectives=tuple(_call(words) for words in row["collectives"].split("; ") if words),
        peak_bytes=int(row["peak_bytes"]),
        bytes_at_peak={},
    )
    return OutsideCount(row["plan"], row["witness"], measured)


def _call(words: str) -> CollectiveCount:
    axis, op, num_ranks, size_bytes, num_calls = words.split()
    return CollectiveCount(axis, op, int(num_ranks), int(size_bytes), int(num_calls))
