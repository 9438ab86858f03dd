"""Process of one rank: ``python -m meshwright.validate.launch.worker SPEC.json``."""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from meshwright.hwprofiles import Offload, ProfileError
from meshwright.planner.reports import SavedPlan, read_runnable_plan
from meshwright.simulator import PlanError
from meshwright.validate.launch.environment import WorkerEnvironment
from meshwright.validate.launch.last_words import failures_kept, watch_for_end
from meshwright.validate.launch.progress import enter_phase
from meshwright.validate.launch.records import SPEC_NAME, Heartbeat, claim_rank, keep_measurement
from meshwright.validate.launch.spec import (
    MEASURE_VARIABLE,
    MEASURES,
    RunPhase,
    RunSpec,
    read_spec,
    write_spec,
)
from meshwright.validate.ranks import RankMeasurement, num_processes

USER_MISTAKE = 2
Measure: TypeAlias = Callable[[SavedPlan, RunSpec, int], RankMeasurement]


def main(words: Sequence[str] | None = None) -> int:
    """Run one rank and return its exit status.

    Args:
        words: The spec file, and ``--results`` to write elsewhere than it says; by default
            those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m meshwright.validate.launch.worker")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(words)
    try:
        spec = read_spec(options.spec)
        if options.results is not None:
            spec = replace(spec, results=options.results.resolve())
        worker = WorkerEnvironment.of(os.environ)
        # Before torch is imported, which takes seconds: the launcher sees the rank start.
        _claim(spec, worker)
        watch_for_end(spec, worker.rank)
        with failures_kept(spec, worker.rank):
            plans = _plans(spec, worker.world_size)
            # Under torchrun, `record` hands the exception to its agent.
            from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415

            record(run_rank)(spec, worker, plans)
    except (PlanError, ProfileError) as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_MISTAKE
    return 0


def run_rank(spec: RunSpec, worker: WorkerEnvironment, plans: Sequence[SavedPlan]) -> None:
    """Join the others and measure every plan.

    Raises:
        MissingRanksError: If other ranks do not come.
    """
    import torch  # noqa: PLC0415 - a plan that cannot run needs no torch

    from meshwright.validate.launch.process_group import barrier, join, leave  # noqa: PLC0415

    torch.set_num_threads(spec.threads_per_rank)
    measure = measure_function(spec.measure)
    enter_phase(spec, worker.rank, RunPhase.INIT)  # its clock starts once torch has been imported
    offloads = any(saved.plan.offload is not Offload.NONE for saved in plans)
    control = join(spec.backend, worker, timeout_s=spec.init_timeout_s, offloads=offloads)
    for index, saved in enumerate(plans):
        enter_phase(spec, worker.rank, RunPhase.BUILD, plan=index)
        barrier(control, timeout_s=spec.init_timeout_s)
        measurement = measure(saved, spec, worker.rank)
        enter_phase(spec, worker.rank, RunPhase.REPORT)
        keep_measurement(measurement, spec.results, index)
    barrier(control, timeout_s=spec.init_timeout_s)
    leave()
    enter_phase(spec, worker.rank, RunPhase.DONE)


def check_world_size(saved: SavedPlan, world_size: int, *, name: str) -> None:
    """Check that a plan is for as many ranks as there are.

    Raises:
        PlanError: Naming both numbers.
    """
    plan, needed = saved.plan, num_processes(saved.plan, saved.stack)
    if needed != world_size:
        layout = " x ".join(f"{axis} {degree}" for axis, degree in plan.degrees.items())
        raise PlanError(f"{name} needs {needed} ranks ({layout}); this run has {world_size}")


def measure_function(name: str) -> Measure:
    """Return the function that a spec names as ``module:function``.

    Raises:
        PlanError: If it is none that may be named, or there is no such module or function.
    """
    allowed = (*MEASURES, *os.environ.get(MEASURE_VARIABLE, "").split())
    if name not in allowed:
        raise PlanError(f"measure={name} is unknown; allowed: {', '.join(allowed)}")
    module_name, _, function_name = name.partition(":")
    try:
        function: Measure = getattr(import_module(module_name), function_name)
    except (AttributeError, ModuleNotFoundError) as error:
        raise PlanError(f"measure={name}: {error}") from None
    return function


def _plans(spec: RunSpec, world_size: int) -> list[SavedPlan]:
    plans = [read_runnable_plan(path) for path in spec.plans]
    for path, saved in zip(spec.plans, plans, strict=True):
        check_world_size(saved, world_size, name=path.name)
    return plans


def _claim(spec: RunSpec, worker: WorkerEnvironment) -> None:
    """Write this rank's first heartbeat; refuse a folder that has one of an earlier run."""
    heartbeat = Heartbeat(
        rank=worker.rank,
        world_size=worker.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        phase=RunPhase.INIT,
        plan=None,
        time_s=time.time(),
    )
    if not claim_rank(heartbeat, spec.results):
        raise PlanError(
            f"results={spec.results} holds rank {worker.rank} of an earlier run; name a new folder"
        )
    if not (spec.results / SPEC_NAME).exists():  # whoever is first: any rank may never start
        write_spec(spec, spec.results / SPEC_NAME)


if __name__ == "__main__":
    sys.exit(main())
