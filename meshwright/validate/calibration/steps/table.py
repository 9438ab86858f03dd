"""Predicted against measured steps, as a table: medians with quartiles, and the errors."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from meshwright.hwprofiles import KILO
from meshwright.planner.reports import output_file
from meshwright.validate.calibration.steps.clock import StepRecord

# Other programs' part of the machine's processor time in a step that counts as quiet.
QUIET_FRACTION = 0.05
COLUMNS = (
    *("stack", "shape", "predicted_s", "num_steps", "num_quiet"),
    *(
        f"{name}_{quartile}_s"
        for name in ("processor", "quiet", "wall")
        for quartile in ("quartile_1", "median", "quartile_3")
    ),
)
HEADS = (
    *("stack", "shape", "predicted", "processor time", "error against it"),
    *("quiet steps", "their wall time", "error against that", "wall time of all"),
)


class Quartiles(NamedTuple):
    """Quartiles of some times, in seconds."""

    quartile_1_s: float
    median_s: float
    quartile_3_s: float

    def __str__(self) -> str:
        """Return median and quartiles in milliseconds.

        >>> str(Quartiles(0.1, 0.12, 0.14))
        '120 ms (100 to 140)'
        """
        low, middle, high = (each * KILO for each in self)
        return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"


def quartiles_of(times_s: Sequence[float]) -> Quartiles | None:
    """Return the spread of *times_s*, or None of nothing.

    >>> quartiles_of([4.0, 1.0, 2.0, 3.0, 5.0])
    Quartiles(quartile_1_s=2.0, median_s=3.0, quartile_3_s=4.0)
    """
    if len(times_s) < 2:
        return Quartiles(*(times_s[0],) * 3) if times_s else None
    return Quartiles(*quantiles(times_s, n=4, method="inclusive"))


class MeasuredStep(NamedTuple):
    """One step of all ranks.

    Args:
        wall_s: Of the slowest rank.
        processor_s: Of the rank that took most.
        others_fraction: Other programs' part of the machine meanwhile; None if unknown.
    """

    wall_s: float
    processor_s: float
    others_fraction: float | None


def measured_step(records: Sequence[StepRecord], num_cores: int) -> MeasuredStep:
    """Return one step of all ranks from its *records*.

    >>> measured_step([StepRecord(0, 1.0, 0.9, 1.95), StepRecord(0, 0.9, 0.8, 1.95)], 2)
    MeasuredStep(wall_s=1.0, processor_s=0.9, others_fraction=0.125)
    """
    wall_s = max(record.wall_s for record in records)
    own_s = sum(record.processor_s for record in records)
    busy_s = records[0].machine_s
    # Busy time that the ranks did not use was other programs'.
    others = None if busy_s is None else round(max(0.0, busy_s - own_s) / num_cores / wall_s, 4)
    return MeasuredStep(wall_s, max(record.processor_s for record in records), others)


class StepComparison(NamedTuple):
    """A shape on a stack: its prediction and its steps."""

    stack: str
    shape: str
    predicted_s: float
    steps: tuple[MeasuredStep, ...]

    @property
    def processor(self) -> Quartiles | None:
        """Processor time of the rank that took most."""
        return quartiles_of([step.processor_s for step in self.steps])

    @property
    def wall(self) -> Quartiles | None:
        """Wall time of all steps."""
        return quartiles_of([step.wall_s for step in self.steps])

    @property
    def quiet(self) -> Quartiles | None:
        """Wall time of the steps in which other programs took little of the machine."""
        return quartiles_of([step.wall_s for step in self._quiet_steps()])

    @property
    def num_quiet(self) -> int:
        """Number of quiet steps."""
        return len(self._quiet_steps())

    def _quiet_steps(self) -> list[MeasuredStep]:
        return [
            step
            for step in self.steps
            if step.others_fraction is not None and step.others_fraction <= QUIET_FRACTION
        ]


def write_comparisons(lines: Sequence[StepComparison], path: Path) -> None:
    """Write the table as CSV; no quiet step leaves its columns empty."""
    with output_file(path) as draft, draft.open("w", encoding="ascii", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for line in lines:
            head = (line.stack, line.shape, f"{line.predicted_s:.4g}", len(line.steps))
            times = [
                f"{each:.4g}" if spread is not None else ""
                for spread in (line.processor, line.quiet, line.wall)
                for each in spread or (0.0,) * 3
            ]
            writer.writerow((*head, line.num_quiet, *times))


def markdown(lines: Sequence[StepComparison]) -> str:
    """Return the table for a document."""
    rows = [HEADS, ("---",) * len(HEADS), *map(_cells, lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(line: StepComparison) -> tuple[str, ...]:
    return (
        *(line.stack, line.shape, f"{line.predicted_s * KILO:.0f} ms"),
        *(_shown(line.processor), _error(line.predicted_s, line.processor)),
        f"{line.num_quiet} of {len(line.steps)}",
        *(_shown(line.quiet), _error(line.predicted_s, line.quiet)),
        _shown(line.wall),
    )


def _shown(spread: Quartiles | None) -> str:
    return "-" if spread is None else str(spread)


def _error(predicted_s: float, spread: Quartiles | None) -> str:
    return "-" if spread is None else f"{predicted_s / spread.median_s - 1:+.1%}"
