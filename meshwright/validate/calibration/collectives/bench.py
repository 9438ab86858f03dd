"""Measure collectives: start the ranks, collect their rows, and name a rank that fails."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshwright.planner.options import scratch_folder
from meshwright.simulator import PlanError
from meshwright.validate.calibration.collectives.job import (
    CollectiveJob,
    errors_path,
    progress_path,
    rows_path,
)
from meshwright.validate.calibration.rows import (
    Coverage,
    Progress,
    Row,
    RowFile,
    collective,
    collective_cases,
    summarised,
)
from meshwright.validate.processes import MODULES, module_path

WORKER = (*MODULES, "meshwright.validate.calibration.collectives.worker")
POLL_S = 0.05
# Longest time without a visit of any rank: a rank starts, or a large collective runs.
TIMEOUT_S = 90.0
# A rank whose peer died fails soon after it; the peer is the one to name.
SETTLE_S = 0.3
PEER_WORDS = ("by peer", "reset", "remote process", "connection", "Connection")


def measure_collectives(
    file: RowFile,
    num_ranks: int,
    *,
    deadline_s: float,
    progress: Progress,
    timeout_s: float = TIMEOUT_S,
    worker: Sequence[str] = WORKER,
) -> Coverage:
    """Append rows of collectives over *num_ranks* local processes to *file*.

    Args:
        file: File of rows; cases that it has are not measured again.
        num_ranks: Processes to start.
        deadline_s: On the clock of `time.monotonic`; only the first batches start after it.
        progress: Told what is measured, how many cases are done, of how many.
        timeout_s: Longest time in which no rank comes forward.
        worker: Command of a rank.

    Raises:
        PlanError: If a rank dies or hangs; one line that names it.
    """
    cases = collective_cases(num_ranks)
    missing = [case for case in cases if case not in file.cases]
    done = len(cases) - len(missing)
    late = done > 0 and time.monotonic() >= deadline_s
    if not missing or late:
        return Coverage(done, len(cases))
    with scratch_folder(Path(tempfile.gettempdir())) as folder:
        job = CollectiveJob(
            accelerator=file.machine.accelerator,
            num_ranks=num_ranks,
            threads=file.machine.threads,
            folder=str(folder),
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            parent=os.getpid(),
            cases=missing,
        )
        with _processes(job, worker) as ranks:
            for lines in _new_lines(job, ranks):
                file.append(_rows(lines))
                done += len(lines)
                if progress is not None:
                    progress("collectives", done, len(cases))
    return Coverage(done, len(cases))


Ranks = list[subprocess.Popen[bytes]]


@contextmanager
def _processes(job: CollectiveJob, worker: Sequence[str]) -> Iterator[Ranks]:
    """Yield the started ranks; all of them have ended when the block ends."""
    paths = module_path()
    job_file = Path(job.folder) / "job.json"
    job_file.write_text(job.dumps(), encoding="utf-8")
    ranks: Ranks = []
    try:
        for rank in range(job.num_ranks):
            words = {"RANK": str(rank), "WORLD_SIZE": str(job.num_ranks), "PYTHONPATH": paths}
            with job_file.open("rb") as stdin, errors_path(job, rank).open("wb") as stderr:
                ranks.append(
                    subprocess.Popen(  # noqa: S603
                        list(worker),
                        stdin=stdin,
                        stdout=subprocess.DEVNULL,
                        stderr=stderr,
                        env={**os.environ, **words},
                        start_new_session=True,  # Ctrl-C is for us; we end the ranks
                    )
                )
        yield ranks
    finally:
        # Killed first, waited for then: a rank may itself wait for another.
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def _new_lines(job: CollectiveJob, ranks: Ranks) -> Iterator[list[str]]:
    """Yield complete lines of rank 0 as they come, until all ranks have ended well."""
    path, place = rows_path(job), 0
    visits: list[int] = []
    moved_s = time.monotonic()
    while True:
        # Asked before the file is read: a rank that ends in between has written its last rows.
        ended = all(process.poll() == 0 for process in ranks)
        content = path.read_bytes() if path.exists() else b""
        # The last row may be half written.
        complete = content.rfind(b"\n") + 1
        if complete > place:
            yield content[place:complete].decode("utf-8").split("\n")[:-1]
            place = complete
        if ended:
            return
        if any(process.poll() for process in ranks):
            raise PlanError(_death(job, ranks))
        # Progress of any rank counts: the others may all wait for one that is slow.
        if (counted := _visits(job)) != visits:
            visits, moved_s = counted, time.monotonic()
        if time.monotonic() - moved_s > job.timeout_s:
            raise PlanError(_silence(job, ranks, visits))
        time.sleep(POLL_S)


def _visits(job: CollectiveJob) -> list[int]:
    paths = [progress_path(job, rank) for rank in range(job.num_ranks)]
    return [int(path.read_text("ascii") or 0) if path.exists() else 0 for path in paths]


def _death(job: CollectiveJob, ranks: Ranks) -> str:
    """Return a line that names the rank that ended badly, the killed one first."""
    time.sleep(SETTLE_S)
    visits = _visits(job)
    bad = [rank for rank, process in enumerate(ranks) if process.poll()]
    last_words = {rank: _last_words(job, rank) for rank in bad}

    def suspicion(rank: int) -> tuple[bool, bool, int, int]:
        lost_another = any(word in last_words[rank] for word in PEER_WORDS)
        return ranks[rank].returncode > 0, lost_another, visits[rank], rank

    # A killed rank goes before one that failed, and of these one that lost no peer.
    rank = min(bad, key=suspicion)
    status = ranks[rank].returncode
    reason = f": {last_words[rank]}" if last_words[rank] else ""
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}{reason}"
    return f"--ranks {job.num_ranks}: rank {rank} {how}; what was measured is kept"


def _last_words(job: CollectiveJob, rank: int) -> str:
    text = errors_path(job, rank).read_text(encoding="utf-8", errors="replace").strip()
    return text.splitlines()[-1].strip()[:200] if text else ""


def _silence(job: CollectiveJob, ranks: Ranks, visits: list[int]) -> str:
    """Return a line that names the running rank that came least far."""
    alive = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    rank = min(alive, key=lambda each: (visits[each], each))
    return (
        f"--ranks {job.num_ranks}: rank {rank} has not come forward for {job.timeout_s:g} s; "
        "what was measured is kept"
    )


def _rows(lines: list[str]) -> list[Row]:
    rows = []
    for line in lines:
        op, size_bytes, num_ranks, times_s = json.loads(line)
        scale = 0.5 if op == "p2p" else 1.0  # there and back
        case = collective(op, size_bytes, num_ranks)
        rows.append(summarised(case, [scale * each for each in times_s]))
    return rows
