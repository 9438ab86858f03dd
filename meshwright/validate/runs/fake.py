"""One process as one rank of any plan: built, run for some steps, and counted; no GPU, no network.

Torch is imported late: whoever only reads results does not wait for it.
"""
# ruff: noqa: PLC0415

import gc
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from typing import TYPE_CHECKING

from meshwright.hwprofiles import Offload, Strategy
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import PlanError
from meshwright.validate.ranks import RankMeasurement, num_processes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.validate.counting import RankOracle
    from meshwright.validate.programs.contract import RankProgram

NUM_STEPS = 3  # of real processes, so that losses show whether they train alike


def check_torch(command: str = "validate") -> None:
    """Raise PlanError where PyTorch, which a *command* needs, is not installed."""
    if find_spec("torch") is None:
        raise PlanError(
            f'{command} needs PyTorch; install it with: pip install "meshwright[validate]"'
        )


def measure_fakes(saved: SavedPlan, ranks: Iterable[int]) -> Iterator[RankMeasurement]:
    """Yield the counts of each of *ranks*; of devices that share a process, of all at once.

    Raises:
        PlanError: If the stack has no program, or it cannot express the plan.
    """
    if saved.stack.strategy is Strategy.DATAPARALLEL:
        from meshwright.validate.runs.devices import measure_devices

        devices = measure_devices(saved)
        yield from (devices[rank] for rank in ranks)
        return
    for rank in ranks:
        yield measure_fake(saved, rank)


def measure_fake(saved: SavedPlan, rank: int) -> RankMeasurement:
    """Return the counts of *rank* in a step of the plan's program, on fake tensors.

    If the plan offloads, in a process of their own: PyTorch is given a device beside the host
    there, and keeps it, and a thread that runs its backward, to the end.

    Raises:
        PlanError: If the stack has no program, or it cannot express the plan.
    """
    if saved.plan.offload is Offload.NONE:
        return _measure(saved, rank)
    check_torch()
    from meshwright.planner.sweep import script_runs_once

    # Spawned: a forked process would inherit autograd's state.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        with script_runs_once():
            measured = other.submit(_measure, saved, rank)
        return measured.result()


def _measure(saved: SavedPlan, rank: int) -> RankMeasurement:
    with counted_step(saved, rank) as oracle:
        from meshwright.validate.counting import measurement_of

        return measurement_of(oracle, rank, num_processes(saved.plan, saved.stack))


@contextmanager
def counted_step(saved: SavedPlan, rank: int) -> Iterator["RankOracle"]:
    """Yield the oracle that has counted a step of *rank*; its program still lives.

    If the plan offloads, nothing may have run backward in this process before.
    """
    check_torch()
    from meshwright.validate.counting import RankOracle, fake_cluster
    from meshwright.validate.programs import build_program
    from meshwright.validate.programs.contract import ProgramRequest, Routing

    device = _device(saved)
    with fake_cluster(rank, num_processes(saved.plan, saved.stack)):
        request = ProgramRequest.of(saved, rank, device, initialise=False)
        program = build_program(replace(request, routing=Routing(is_balanced=True)))
        oracle = RankOracle(program.groups, device)
        with oracle:
            for _ in run_counted(program, oracle, program.settling_steps + 1):
                pass  # the counts of the last are kept
        yield oracle


def _device(saved: SavedPlan) -> "torch.device":
    import torch

    if saved.plan.offload is Offload.NONE:
        return torch.device("cpu")
    from meshwright.validate.counting import dummy_accelerator

    return dummy_accelerator()


def run_counted(
    program: "RankProgram", oracle: "RankOracle", num_steps: int, *, first_step: int = 0
) -> Iterator[list["Tensor"]]:
    """Run steps of *program*, each counted afresh; after each yield its losses, if any."""
    for step in range(first_step, first_step + num_steps):
        gc.collect()  # what a step left in cycles of references dies at no certain time else
        for tensor, kind in program.persistent_tensors():
            oracle.mark(tensor, kind)
        oracle.start_step()
        yield program.run_step(step)
