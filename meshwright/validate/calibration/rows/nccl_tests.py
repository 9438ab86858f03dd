"""Parser of nccl-tests output: one operation a file, sizes and times in a table."""

import re
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import MEGA, CollectiveOp, FileKind, shown_path, single_line
from meshwright.simulator import PlanError
from meshwright.validate.calibration.rows.rows import Row, collective

# Programs of nccl-tests and the operation each one times.
PROGRAMS = {
    "all_reduce_perf": CollectiveOp.ALL_REDUCE,
    "all_gather_perf": CollectiveOp.ALL_GATHER,
    "reduce_scatter_perf": CollectiveOp.REDUCE_SCATTER,
    "broadcast_perf": CollectiveOp.BROADCAST,
    "alltoall_perf": CollectiveOp.ALL_TO_ALL,
    "sendrecv_perf": CollectiveOp.P2P,
}
OUTPUT_FILE = FileKind(title="text of nccl-tests", most_bytes=10_000_000, error=PlanError)
MOST_DIGITS = 18  # of bytes, and more than any buffer has
_DEVICE = re.compile(r"#\s+Rank\s+\d+\s.*?\son\s+(?P<host>\S+)\s+device\b")
_COUNTS = re.compile(r"#\s*nThreads?:?\s+(?P<threads>\d+)\s+nGpus:?\s+(?P<gpus>\d+)")


class NcclRun(NamedTuple):
    """One file: its operation, and the out-of-place rows."""

    path: Path
    op: CollectiveOp
    num_ranks: int
    device: str
    rows: list[Row]


def read_nccl_tests(path: Path) -> NcclRun:
    """Return the run that one program of nccl-tests printed.

    The operation is the program's name in the file (newer versions print it, launchers echo
    it), else in the file's own name.  The ranks are the devices that the head lists.

    Raises:
        PlanError: If it is no such output; one line.
    """
    shown = shown_path(path)
    lines = OUTPUT_FILE.read_text(path).splitlines()
    op = _operation(lines, path.name, shown)
    hosts = {match["host"] for line in lines if (match := _DEVICE.match(line.strip()))}
    devices = [line.strip() for line in lines if _DEVICE.match(line.strip())]
    if len(hosts) > 1:
        raise PlanError(
            f"--nccl-tests {shown} ran on {len(hosts)} hosts; allowed: one, as its link is that "
            "inside a node"
        )
    # Without a list of devices the counts of the header remain.
    num_ranks = len(devices) or _counted(lines)
    if num_ranks < 2:
        raise PlanError(f"--nccl-tests {shown} lists {num_ranks} devices; allowed: 2 or more")
    # sendrecv_perf passes buffers around all devices; each message has two ends.
    num_ranks = 2 if op is CollectiveOp.P2P else num_ranks
    rows = _rows(lines, op, num_ranks, shown)
    title = single_line(devices[0].rpartition("]")[2]).strip() if devices else ""
    return NcclRun(path, op, num_ranks, title or "unnamed device", rows)


def _operation(lines: list[str], file_name: str, shown: str) -> CollectiveOp:
    table = next((i for i, line in enumerate(lines) if line.strip()[:1].isdigit()), len(lines))
    for line in lines[:table]:
        for program, op in PROGRAMS.items():
            if re.search(rf"\b{program}\b", line):
                return op
    bare = file_name.lower().replace("_", "").replace("-", "")
    for program, op in PROGRAMS.items():
        if program.removesuffix("_perf").replace("_", "") in bare:
            return op
    raise PlanError(
        f"--nccl-tests {shown} does not say its operation; allowed: the name of the program in "
        f"its first lines or in its own name: {', '.join(PROGRAMS)}"
    )


def _counted(lines: list[str]) -> int:
    match = next((found for line in lines if (found := _COUNTS.match(line.strip()))), None)
    return int(match["threads"]) * int(match["gpus"]) if match else 0


def _rows(lines: list[str], op: CollectiveOp, num_ranks: int, shown: str) -> list[Row]:
    """Return the out-of-place rows: the first column of times under the head of columns."""
    # Columns are found by name: their number differs between releases.
    heads = [line.lstrip("# \t").split() for line in lines if "algbw" in line and "#" in line]
    if not heads or heads[0][:1] != ["size"] or "time" not in heads[0]:
        raise PlanError(f"--nccl-tests {shown} has no table; allowed: nccl-tests output")
    place = heads[0].index("time")
    rows = []
    for number, line in enumerate(lines, start=1):
        cells = line.split()
        if not cells or not cells[0].isdigit() or len(cells) <= place + 2:
            continue
        try:
            size_bytes, time_s = int(cells[0][:MOST_DIGITS]), float(cells[place]) / MEGA
        except ValueError:
            raise PlanError(
                f"--nccl-tests {shown} line {number}: {cells[place]!r:.40} is no time"
            ) from None
        if not 0 <= time_s < float("inf"):
            raise PlanError(
                f"--nccl-tests {shown} line {number}: a time of {cells[place]:.40}; allowed: "
                "finite times, none below 0"
            )
        if size_bytes > 0 and time_s > 0:
            rows.append(Row(collective(op, size_bytes, num_ranks), time_s, time_s, time_s, 1))
    if not rows:
        raise PlanError(f"--nccl-tests {shown} has no row with a size and a time")
    return rows
