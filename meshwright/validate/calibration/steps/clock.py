"""Rank of the step check: its program, and the times of its steps, one record a step.

A step is timed by the wall clock, by the processor time of all threads of the rank, and by what
the whole machine was busy meanwhile: from these follows how much other programs took.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from torch import distributed

from meshwright.hwprofiles import one_line, shown_path
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import PlanError
from meshwright.validate.launch import RunSpec, rank_path, read_heartbeat
from meshwright.validate.programs import build_program
from meshwright.validate.programs.contract import ProgramRequest, RankProgram
from meshwright.validate.ranks import RESULT_FILE, RankMeasurement, without_dropout

TICKS_PER_S = 100  # of Linux in /proc/stat: USER_HZ
STAT = Path("/proc/stat")
# Before each step the ranks wait until the machine is idle, but no longer than this.
PATIENCE_S, GLANCE_S, IDLE_FRACTION = 3.0, 0.25, 0.05


class StepRecord(NamedTuple):
    """One step of one rank.

    Args:
        plan: Index of the plan.
        wall_s: From the barrier before the step to the rank's end of it.
        processor_s: Of all threads of the rank in it.
        machine_s: Processor time of everything on the machine from barrier to barrier; None
            where the operating system does not tell.
    """

    plan: int
    wall_s: float
    processor_s: float
    machine_s: float | None


_RECORD = TypeAdapter(StepRecord)


def measure_steps(saved: SavedPlan, spec: RunSpec, rank: int) -> RankMeasurement:
    """Time the steps of *rank*; the records go to a file beside the measurement."""
    heartbeat = read_heartbeat(spec.results, rank)
    plan = heartbeat.plan if heartbeat is not None and heartbeat.plan is not None else 0
    records = list(_timed_steps(_program(without_dropout(saved), rank), plan, spec, rank))
    with steps_path(spec.results, rank).open("a", encoding="ascii") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in records)
    return RankMeasurement(
        rank=rank,
        world_size=saved.plan.world_size,
        backend=spec.backend,
        flops=0,
        collectives=(),
        peak_bytes=0,
        bytes_at_peak={},
        step_times_s=tuple(record.wall_s for record in records),
    )


def _program(saved: SavedPlan, rank: int) -> RankProgram:
    request = ProgramRequest.of(saved, rank, torch.device("cpu"), initialise=True)
    return build_program(replace(request, dropout=0.0))


def _timed_steps(program: RankProgram, plan: int, spec: RunSpec, rank: int) -> Iterator[StepRecord]:
    """Run the steps that warm up, then yield the records of the others."""
    for number in range(spec.warmup_steps):
        program.run_step(number)
    for number in range(spec.num_steps):
        if rank == 0:
            wait_for_idle(os.cpu_count() or 1)
        distributed.barrier()
        busy_s, start_s, own_s = machine_busy_s(), time.perf_counter(), time.process_time()
        program.run_step(spec.warmup_steps + number)
        wall_s, processor_s = time.perf_counter() - start_s, time.process_time() - own_s
        distributed.barrier()
        end_s = machine_busy_s()
        machine_s = None if busy_s is None or end_s is None else end_s - busy_s
        yield StepRecord(plan, wall_s, processor_s, machine_s)


def steps_path(results: Path, rank: int) -> Path:
    """Return the file of a rank's records."""
    return rank_path(results, rank, "steps.jsonl")


def read_steps(results: Path, rank: int) -> Iterator[StepRecord]:
    """Yield the records of *rank* in their order; raises PlanError where one is none."""
    path = steps_path(results, rank)
    for line in RESULT_FILE.read_text(path).splitlines():
        try:
            yield _RECORD.validate_python(RESULT_FILE.parse_json(line, shown_path(path)))
        except ValidationError as error:
            raise PlanError(f"{shown_path(path)}: {one_line(error)}") from None


def wait_for_idle(num_cores: int) -> None:
    """Wait until the machine has been idle for a moment, or `PATIENCE_S` has passed."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        before_s = machine_busy_s()
        if before_s is None:
            return
        time.sleep(GLANCE_S)
        after_s = machine_busy_s()
        if after_s is None or after_s - before_s <= IDLE_FRACTION * GLANCE_S * num_cores:
            return


def machine_busy_s() -> float | None:
    """Return the processor seconds of the whole machine, or None without /proc/stat."""
    if not STAT.is_file():
        return None
    # user nice system idle iowait irq softirq steal; guest time is in user already (proc(5)).
    fields = [int(word) for word in STAT.read_text("ascii").partition("\n")[0].split()[1:9]]
    idle, waiting = fields[3:5]
    return (sum(fields) - idle - waiting) / TICKS_PER_S
