"""Job of the collectives' benchmark as JSON, and the files that its ranks write."""

import json
from dataclasses import dataclass
from pathlib import Path

from meshwright.validate.calibration.rows import Accelerator, BenchmarkCase, collective


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveJob:
    """The collectives to measure and where.

    Args:
        accelerator: GPUs with NCCL, or processes on the processor with Gloo.
        num_ranks: Processes.
        threads: Of each process on a processor.
        folder: Of the rendezvous and the files that ranks write.
        timeout_s: Longest wait for another rank.
        deadline_s: No batch of cases starts after it; on the machine's clock `time.monotonic`.
        parent: The process that started the ranks; none outlives it.
        cases: Cases to measure, in this order.
    """

    accelerator: Accelerator
    num_ranks: int
    threads: int
    folder: str
    timeout_s: float
    deadline_s: float
    parent: int
    cases: list[BenchmarkCase]

    def dumps(self) -> str:
        """Return the job as JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "cases"}
        return json.dumps(fields | {"cases": [[each.op, *each.sizes] for each in self.cases]})

    @classmethod
    def loads(cls, text: str) -> "CollectiveJob":
        """Return the job that `dumps` wrote."""
        fields = json.loads(text)
        cases = [collective(op, size, count) for op, size, count in fields.pop("cases")]
        accelerator = Accelerator(fields.pop("accelerator"))
        return cls(accelerator=accelerator, cases=cases, **fields)


def rows_path(job: CollectiveJob) -> Path:
    """Return the file that rank 0 appends times to."""
    return Path(job.folder) / "rows.jsonl"


def progress_path(job: CollectiveJob, rank: int) -> Path:
    """Return the file in which *rank* counts its visits."""
    return Path(job.folder) / f"rank-{rank}.progress"


def errors_path(job: CollectiveJob, rank: int) -> Path:
    """Return the file that takes the standard error of *rank*."""
    return Path(job.folder) / f"rank-{rank}.err"
