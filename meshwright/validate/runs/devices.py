"""What each device of one process holds, computes and copies, on tensors without data."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from meshwright.planner.reports import SavedPlan
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.strategies import (
    DataParallelModuleProgram,
    build_data_parallel_module,
)
from meshwright.validate.ranks import RankMeasurement

NUM_STEPS = 2  # the first makes optimizer states


def measure_devices(saved: SavedPlan) -> tuple[RankMeasurement, ...]:
    """Return what each device does in a step of a plan whose replicas are in one process.

    A device is called a rank; its messages have their kinds for axes.

    Raises:
        PlanError: If PyTorch cannot express the plan.
    """
    request = ProgramRequest.of(saved, 0, torch.device("cpu"), initialise=False)
    with fake_cluster(0, 1):
        program = build_data_parallel_module(request)
        return tuple(
            RankMeasurement(
                rank=device,
                world_size=saved.plan.dp,
                backend="fake",
                flops=oracle.flops,
                collectives=program.devices.traffic(device),
                peak_bytes=oracle.peak_bytes,
                bytes_at_peak=oracle.bytes_at_peak,
            )
            for device, oracle in enumerate(count_devices(program))
        )


def count_devices(program: DataParallelModuleProgram) -> list[RankOracle]:
    """Return what each device has counted in the last of a few steps."""
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
