"""Stand-ins for the program that a rank measures; workers import them by name."""

import os
import signal
import time

from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.validate.launch.progress import enter_phase
from meshwright.validate.launch.spec import RunPhase, RunSpec
from meshwright.validate.ranks.measurement import ByteKind, RankMeasurement


def steps(spec: RunSpec, rank: int, *, last: int | None = None) -> int:
    """Add up the ranks in each step, until all steps or *last* ones are done."""
    import torch
    import torch.distributed as dist

    group = dist.new_group()  # half an hour of patience, if nobody shortens it
    total = torch.zeros(1)
    phases = [RunPhase.WARM_UP, *(RunPhase.step(number) for number in range(spec.num_steps))]
    for phase in phases[:last]:
        enter_phase(spec, rank, phase)
        total = torch.full((1,), float(rank + 1))
        dist.all_reduce(total, group=group)
    return int(total)


def measured(rank: int, flops: int) -> RankMeasurement:
    return RankMeasurement(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        backend="gloo",
        flops=flops,
        collectives=(),
        peak_bytes=8,
        bytes_at_peak={ByteKind.PARAMETERS: 8},
        versions={"threads": os.environ["OMP_NUM_THREADS"]},
    )


def succeed(saved: SavedPlan, spec: RunSpec, rank: int) -> RankMeasurement:
    return measured(rank, steps(spec, rank))


def be_killed(saved: SavedPlan, spec: RunSpec, rank: int) -> RankMeasurement:
    if rank == 1:
        steps(spec, rank, last=2)
        enter_phase(spec, rank, RunPhase.step(1))
        os.kill(os.getpid(), signal.SIGKILL)
    return measured(rank, steps(spec, rank))


def hang(saved: SavedPlan, spec: RunSpec, rank: int) -> RankMeasurement:
    if rank == 1:
        steps(spec, rank, last=1)
        enter_phase(spec, rank, RunPhase.step(0))
        time.sleep(600)
    return measured(rank, steps(spec, rank))


def raise_in_one(saved: SavedPlan, spec: RunSpec, rank: int) -> RankMeasurement:
    if rank == 1:
        steps(spec, rank, last=3)
        raise ValueError("expected 4 heads,\ngot 3")
    return measured(rank, steps(spec, rank))


def run_out_of_memory(saved: SavedPlan, spec: RunSpec, rank: int) -> RankMeasurement:
    import torch

    enter_phase(spec, rank, RunPhase.WARM_UP)
    if rank == 0:
        torch.empty(2**60, dtype=torch.uint8)
    return measured(rank, steps(spec, rank))
