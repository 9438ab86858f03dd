"""Counts of each device of one process (DataParallel), on tensors without data."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.planner.reports import SavedPlan
from meshwright.validate.counting import RankOracle, fake_cluster, measurement_of
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.strategies import (
    DataParallelModuleProgram,
    build_data_parallel_module,
)
from meshwright.validate.ranks import RankMeasurement

NUM_STEPS = 2  # the first makes optimizer states


def measure_devices(saved: SavedPlan) -> tuple[RankMeasurement, ...]:
    """Return the counts of each device in a step of a plan whose replicas are in one process.

    A device is called a rank; its messages have their kinds for axes.

    Raises:
        PlanError: If PyTorch cannot express the plan.
    """
    request = ProgramRequest.of(saved, 0, torch.device("cpu"), initialise=False)
    with fake_cluster(0, 1):
        program = build_data_parallel_module(request)
        return tuple(
            replace(
                measurement_of(oracle, device, saved.plan.dp),
                collectives=program.devices.traffic(device),
            )
            for device, oracle in enumerate(count_devices(program))
        )


def count_devices(program: DataParallelModuleProgram) -> list[RankOracle]:
    """Return the oracle of each device after the last of a few steps."""
    oracles = [RankOracle({}) for _ in range(program.devices.count)]
    for _ in devices_counted(program, oracles, NUM_STEPS):
        pass  # the counts of the last are kept
    return oracles


def devices_counted(
    program: DataParallelModuleProgram, oracles: Sequence[RankOracle], num_steps: int
) -> Iterator[list[Tensor]]:
    """Run steps, the work of each device under its oracle; after each yield its losses."""
    program.devices.work_of = oracles.__getitem__
    for step in range(num_steps):
        program.devices.copies.clear()
        for device, oracle in enumerate(oracles):
            for tensor, kind in program.persistent_tensors_on(device):
                oracle.mark(tensor, kind)
            oracle.start_step()
        yield program.run_step(step)
    program.devices.work_of = lambda _: nullcontext()
