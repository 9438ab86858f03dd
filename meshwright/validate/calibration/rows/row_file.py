"""The file of measured rows: appended to as they come, read again when a run continues."""

import csv
import io
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from meshwright.hwprofiles import FileKind, Precision, shown_path, single_line
from meshwright.planner.reports import write_output
from meshwright.simulator import PlanError
from meshwright.validate.calibration.rows.machine import Machine, machine_of
from meshwright.validate.calibration.rows.rows import SIZE_NAMES, BenchmarkCase, CaseGroup, Row

FILE_NAME = "measurements.csv"
TITLE = "# meshwright calibrate: seconds of one call, median and quartiles"
ROW_FILE = FileKind(title="file of rows", most_bytes=100_000_000, error=PlanError)
COLUMNS = (
    "group",
    "op",
    "precision",
    "shape",
    "flops",
    "size_bytes",
    "median_s",
    "quartile_1_s",
    "quartile_3_s",
    "num_repeats",
)


class RowFile:
    """Rows of one machine in one file, whole after each of them."""

    def __init__(self, path: Path, machine: Machine, date: str) -> None:
        self.path = path
        self.machine = machine
        self.date = date
        self.rows: list[Row] = []

    @classmethod
    def start(cls, path: Path, machine: Machine, date: str) -> "RowFile":
        """Return a new file without rows."""
        head = {"date": date} | {each.name: getattr(machine, each.name) for each in fields(machine)}
        lines = [TITLE, *(f"# {key}: {_one_line(value)}" for key, value in head.items())]
        write_output(path, "\n".join(lines) + "\n" + _csv_line(COLUMNS))
        return cls(path, machine, date)

    @classmethod
    def load(cls, path: Path) -> "RowFile":
        """Return a file that an earlier run left; a last row cut short is dropped.

        Raises:
            PlanError: If it is no file of rows.
        """
        shown = shown_path(path)
        text = ROW_FILE.read_text(path)
        complete, _, cut = text.rpartition("\n")
        if cut or path.is_symlink():  # rows are added to a file of this folder
            write_output(path, complete + "\n")
        lines = complete.split("\n")
        notes = [line for line in lines if line.startswith("#")]
        if not notes or notes[0] != TITLE:
            raise PlanError(f"{shown} has no head of calibrate; allowed: what calibrate wrote")
        texts = dict(line[2:].split(": ", 1) for line in notes[1:] if ": " in line)
        try:
            file = cls(path, machine_of(texts), single_line(texts["date"]))
            table = csv.DictReader(line for line in lines if not line.startswith("#"))
            file.rows = [_read(cells) for cells in table]
        except (KeyError, ValueError, TypeError, AttributeError, csv.Error) as error:
            # A cell that is missing is None, an extra one a list: either is the file's fault.
            raise PlanError(f"{shown} has a row that is none: {_one_line(error)}") from None
        return file

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows to the file; they are on disk when this returns."""
        added = list(rows)
        lines = "".join(_csv_line(_cells(row)) for row in added)
        try:
            with self.path.open("a", encoding="utf-8", newline="") as stream:
                stream.write(lines)
        except OSError as error:
            what = f"{shown_path(self.path)} cannot be written: {error.strerror}"
            raise PlanError(f"{what}; the rows before are kept") from None
        self.rows += added

    @property
    def cases(self) -> set[BenchmarkCase]:
        """The cases that are measured."""
        return {row.case for row in self.rows}


def _one_line(value: object) -> str:
    return " ".join(single_line(str(value)).split())


def _csv_line(cells: Iterable[str]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow(cells)
    return stream.getvalue()


def _cells(row: Row) -> tuple[str, ...]:
    case = row.case
    return (
        *(str(case.group), case.op, str(case.precision), case.shape),
        *(str(case.flops), str(case.size_bytes)),
        *(repr(each) for each in (row.median_s, row.quartile_1_s, row.quartile_3_s)),
        str(row.num_repeats),
    )


def _read(cells: dict[str, str]) -> Row:
    group = CaseGroup(cells["group"])
    sizes = dict(each.split("=") for each in cells["shape"].split())
    case = BenchmarkCase(
        group,
        cells["op"],
        Precision(cells["precision"]),
        tuple(int(sizes[name]) for name in SIZE_NAMES[group]),
    )
    times_s = [float(cells[name]) for name in ("median_s", "quartile_1_s", "quartile_3_s")]
    if not all(0 < time_s < float("inf") for time_s in times_s):
        raise ValueError(f"{case.op} {case.shape}: a time is not more than 0")
    return Row(case, times_s[0], times_s[1], times_s[2], int(cells["num_repeats"]))
