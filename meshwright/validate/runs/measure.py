"""Measurement of a plan's rank by its worker: build the program, count steps, time steps."""

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwright.hwprofiles import KILO
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import PlanError
from meshwright.validate.counting import RankOracle, measurement_of
from meshwright.validate.device import DeviceMemory, device_facts
from meshwright.validate.launch import (
    RunPhase,
    RunSpec,
    enter_phase,
    measurement_path,
    read_heartbeat,
)
from meshwright.validate.programs import build_program
from meshwright.validate.programs.contract import ProgramRequest, RankProgram
from meshwright.validate.programs.strategies import AsynchronousServers, DataParallelModuleProgram
from meshwright.validate.ranks import (
    ByteKind,
    CollectiveCount,
    RankMeasurement,
    default_ranks,
    num_processes,
    without_dropout,
)
from meshwright.validate.runs.devices import devices_counted
from meshwright.validate.runs.fake import NUM_STEPS, run_counted
from meshwright.validate.runs.real import REFERENCE_STEPS
from meshwright.validate.traces import COMMUNICATION, read_job_trace

# Threads of a backend may free a buffer a moment late: the smallest peak is the program's.
COUNTED_STEPS = 3
_LOG = logging.getLogger(__name__)
Clock: TypeAlias = Callable[[Callable[[], None]], float]  # runs a step, returns its seconds


def measure_rank(saved: SavedPlan, spec: RunSpec, rank: int) -> RankMeasurement:
    """Return the measurement of *rank*: counts and bytes of early steps, times and losses.

    The model trains without dropout, so that its losses can be compared. Steps are counted
    first, in the warm-up; counting slows them, so that those that are timed come after.

    Args:
        saved: The plan; its ranks are in one process group.
        spec: Number of steps, and backend.
        rank: Of this process.

    Raises:
        PlanError: If the stack has no program, or it cannot express the plan.
    """
    saved = without_dropout(saved)
    device = _device(spec)
    memory = DeviceMemory(device)
    request = replace(ProgramRequest.of(saved, rank, device, initialise=True), dropout=0.0)
    program = build_program(request)
    enter_phase(spec, rank, RunPhase.WARM_UP)
    steps = _Steps(program, device)
    counts = _count(steps, request)
    # Cached blocks of the counted steps would show as reserved in the timed ones.
    memory.give_back()
    memory.forget_peaks()
    for _ in range(spec.warmup_steps):
        steps.run()
    times_s = tuple(_timed_step(steps, spec, rank, number) for number in range(spec.num_steps))
    return replace(
        measurement_of(counts.oracle, rank, num_processes(saved.plan, saved.stack)),
        backend=spec.backend,
        collectives=counts.collectives,
        peak_bytes=counts.peak_bytes,
        bytes_at_peak=counts.bytes_at_peak,
        step_times_s=times_s,
        allocator_bytes=memory.peaks(),
        collective_times_s=_traced_step(steps, saved, spec, rank),
        losses=tuple(steps.losses),
        staleness=_staleness(program),
        versions=device_facts(device),
    )


@dataclass(kw_only=True, slots=True)
class _Counts:
    oracle: RankOracle
    collectives: tuple[CollectiveCount, ...]
    peak_bytes: int
    bytes_at_peak: dict[ByteKind, int]


def _untimed(step: Callable[[], None]) -> float:
    step()
    return 0.0


@dataclass(slots=True)
class _Steps:
    """The steps of a program, numbered from 0, and their losses."""

    program: RankProgram
    device: torch.device
    number: int = 0
    losses: list[float] = field(default_factory=list)

    def run(self, clock: Clock = _untimed) -> float:
        """Run the next step; return its seconds by *clock*."""
        losses: list[Tensor] = []
        time_s = clock(lambda: losses.extend(self.program.run_step(self.number)))
        self.note(losses)
        return time_s

    def run_by_scores(self, request: ProgramRequest) -> None:
        """Run the steps whose losses are compared, if a model has experts, and balance these.

        Until then these get tokens by their scores, in the steps that are counted equally many.
        """
        if request.job.transformer.experts is None:
            return
        for _ in range(REFERENCE_STEPS):
            self.run()
        request.routing.is_balanced = True

    def note(self, losses: list[Tensor]) -> None:
        """Keep the mean loss of a step that has run."""
        self.number += 1
        if losses:
            self.losses.append(sum(loss.item() for loss in losses) / len(losses))


def _device(spec: RunSpec) -> torch.device:
    if spec.backend == "nccl":
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def _count(steps: _Steps, request: ProgramRequest) -> _Counts:
    """Run the first steps under the oracle; keep what the last show, and their smallest peak.

    All of them: what a step leaves for the next, as FSDP its tensors of gathered weights, counts.
    """
    program, number = steps.program, NUM_STEPS - 1 + COUNTED_STEPS
    oracle = RankOracle(program.groups, steps.device)
    peaks = []
    with ExitStack() as counting:
        if isinstance(program, DataParallelModuleProgram):
            # Device 0 has all that one device can have.
            oracles = [oracle, *(RankOracle({}) for _ in program.devices.others)]
            runs = devices_counted(program, oracles, number)
        else:
            counting.enter_context(oracle)
            runs = run_counted(program, oracle, number)
        steps.run_by_scores(request)
        for losses in runs:
            steps.note(losses)
            peaks.append((oracle.peak_bytes, oracle.bytes_at_peak))
    peak_bytes, kinds = min(peaks[-COUNTED_STEPS:], key=lambda each: each[0])
    calls = oracle.collectives
    if isinstance(program, DataParallelModuleProgram):
        calls = program.devices.traffic(0)
    return _Counts(oracle=oracle, collectives=calls, peak_bytes=peak_bytes, bytes_at_peak=kinds)


def _staleness(program: RankProgram) -> tuple[tuple[int, int], ...]:
    if isinstance(program, AsynchronousServers) and program.server is not None:
        return tuple(sorted(program.staleness.items()))
    return ()


def _timed_step(steps: _Steps, spec: RunSpec, rank: int, number: int) -> float:
    """Run a step that all ranks start together, unless each is on its own; return its seconds."""
    enter_phase(spec, rank, RunPhase.step(number))
    if isinstance(steps.program, AsynchronousServers):
        return steps.run(_by_clock)
    if steps.device.type == "cuda":
        dist.barrier(device_ids=[steps.device.index])
        return steps.run(_by_events)
    dist.barrier()
    return steps.run(_by_clock)


def _by_clock(step: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def _by_events(step: Callable[[], None]) -> float:
    """Return the seconds between two events of the device's main stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / KILO  # PyTorch counts milliseconds


def _traced_step(steps: _Steps, saved: SavedPlan, spec: RunSpec, rank: int) -> dict[str, float]:
    """Run one more step on GPUs; on a rank of each kind trace it and return its communication.

    The trace stands beside the measurement, for Perfetto: what ``simulate --trace`` writes can
    be opened next to it.
    """
    if steps.device.type != "cuda":
        return {}
    if rank not in default_ranks(saved.plan):
        steps.run()
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        steps.run()
        torch.cuda.synchronize()
    heartbeat = read_heartbeat(spec.results, rank)
    index = heartbeat.plan if heartbeat is not None and heartbeat.plan is not None else 0
    path = measurement_path(spec.results, rank, index).with_suffix(".trace.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return communication_times(path)


def communication_times(path: Path) -> dict[str, float]:
    """Return the seconds of each kind of communication in a step's trace.

    Where a process may not look at its device (in a container without the right to) a trace has
    no kernels: what was measured before must not be lost with it.
    """
    try:
        kinds = read_job_trace(path).kinds
    except PlanError as error:
        _LOG.warning("no times of communication: %s", error)
        return {}
    return {each.kind: each.time_s for each in kinds if each.kind.startswith(COMMUNICATION)}
