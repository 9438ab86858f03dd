"""One rank of the collectives' benchmark.

Rank 0 appends a line of JSON to the job's file for each batch of cases.  Every rank counts its
visits in a file of its own, so that who starts the ranks sees which one stopped.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import distributed

from meshwright.hwprofiles import CollectiveOp
from meshwright.validate.calibration.collectives.job import CollectiveJob, progress_path, rows_path
from meshwright.validate.calibration.measure import (
    calls_of_visit,
    interleaved,
    repeats_of,
    warmed_up_s,
)
from meshwright.validate.calibration.rows import Accelerator, BenchmarkCase

Call = Callable[[], object]
BATCH_CASES = 3
# A small and a large buffer of each operation are measured whatever the time: starting takes long.
FIRST_CASES = 10


class BenchmarkRank:
    """One process of the benchmark."""

    def __init__(self, job: CollectiveJob, rank: int) -> None:
        self.job = job
        self.rank = rank
        on_gpu = job.accelerator is Accelerator.CUDA
        self.device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
        self.num_visits = 0
        self.groups: dict[int, distributed.ProcessGroup | None] = {}

    def join(self) -> None:
        """Initialise the process group and a sub-group of each size."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(self.job.threads)
        distributed.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"file://{Path(self.job.folder).absolute()}/rendezvous",
            rank=self.rank,
            world_size=self.job.num_ranks,
            timeout=timedelta(seconds=self.job.timeout_s),
        )
        # Every rank makes every group, also those that it is not in (new_group is collective).
        for count in sorted({case.sizes[1] for case in self.job.cases}):
            self.groups[count] = distributed.new_group(list(range(count)))

    def run(self) -> None:
        """Measure the cases in batches until all are done or rank 0 says that time is over."""
        cases = self.job.cases
        for start in range(0, len(cases), BATCH_CASES):
            due = start < FIRST_CASES or time.monotonic() < self.job.deadline_s
            # Rank 0's clock decides for all: ranks that disagreed would call different collectives.
            go_on = torch.tensor([float(due)], device=self.device)
            distributed.broadcast(go_on, 0)
            if not go_on.item():
                return
            self._measure(cases[start : start + BATCH_CASES], start)

    def _measure(self, cases: list[BenchmarkCase], seed: int) -> None:
        calls = {case: self._make_call(case) for case in cases}
        num_calls: dict[BenchmarkCase, int] = {}
        num_repeats: dict[BenchmarkCase, int] = {}
        for case, call in calls.items():
            time_s = warmed_up_s(partial(self._slowest_visit, call))
            num_calls[case] = calls_of_visit(time_s)
            num_repeats[case] = repeats_of(time_s * num_calls[case])
        times_s = interleaved(
            num_repeats, seed, lambda case: self._visit(calls[case], num_calls[case])
        )
        slowest = [self._slowest(times_s[case]) for case in cases]
        if self.rank == 0:
            pairs = zip(cases, slowest, strict=True)
            lines = [json.dumps([case.op, *case.sizes, each]) for case, each in pairs]
            with rows_path(self.job).open("a", encoding="utf-8") as stream:
                stream.write("\n".join(lines) + "\n")

    def _visit(self, call: Call | None, num_calls: int) -> float:
        """Return the seconds of one call here; 0 where the rank takes no part."""
        self.num_visits += 1
        progress_path(self.job, self.rank).write_text(str(self.num_visits), encoding="ascii")
        # All ranks start together, so that waiting for a late one is not timed.
        distributed.barrier()
        if call is None:
            return 0.0
        self._wait()
        start_s = time.perf_counter()
        for _ in range(num_calls):
            call()
        self._wait()
        return (time.perf_counter() - start_s) / num_calls

    def _slowest_visit(self, call: Call | None, num_calls: int) -> float:
        """Return the seconds of one call on the slowest rank, the same on all."""
        return self._slowest([self._visit(call, num_calls)])[0]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, times_s: list[float]) -> list[float]:
        """Return the largest time of all ranks, visit by visit."""
        times = torch.tensor(times_s, dtype=torch.float32, device=self.device)
        distributed.all_reduce(times, distributed.ReduceOp.MAX)
        return [float(each) for each in times.tolist()]

    def _make_call(self, case: BenchmarkCase) -> Call | None:
        size_bytes, count = case.sizes
        if self.rank >= count:
            return None
        # size_bytes is of the larger buffer; the other one holds a rank's part of it.
        whole = torch.zeros(size_bytes // 4, device=self.device)
        part = torch.zeros(size_bytes // 4 // count, device=self.device)
        group = self.groups[count]
        match CollectiveOp(case.op):
            case CollectiveOp.ALL_REDUCE:
                return lambda: distributed.all_reduce(whole, group=group)
            case CollectiveOp.ALL_GATHER:
                return lambda: _gather()(whole, part, group=group)
            case CollectiveOp.REDUCE_SCATTER:
                return lambda: _scatter()(part, whole, group=group)
            case CollectiveOp.BROADCAST:
                return lambda: distributed.broadcast(whole, 0, group=group)
            case _:
                return lambda: self._bounce(whole, group)

    def _bounce(self, whole: torch.Tensor, group: distributed.ProcessGroup | None) -> None:
        """Send the buffer to the other rank and receive it back."""
        steps = (distributed.send, distributed.recv)
        # The other rank receives first: two blocking sends would wait for each other.
        for step in steps if self.rank == 0 else steps[::-1]:
            step(whole, 1 - self.rank, group=group)


def _gather() -> Callable[..., object]:
    """Return the all-gather into one tensor under its newer name, where there is one."""
    return getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def _scatter() -> Callable[..., object]:
    name = "reduce_scatter_single"
    return getattr(distributed, name, None) or distributed.reduce_scatter_tensor


def run_benchmark_rank(job: CollectiveJob, number: int) -> None:
    """Run rank *number* of *job*."""
    rank = BenchmarkRank(job, number)
    rank.join()
    rank.run()
    distributed.barrier()
    distributed.destroy_process_group()
