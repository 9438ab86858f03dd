"""A script: train cases on processes of this machine, and write what they showed.

``python pytorch_ranks.py WORLD_SIZE CASES RESULT``: CASES is a pickled dict of (job, plan, stack
name), RESULT a JSON file with, by name, of each step the mean loss and the norm of the gradients.
Ranks are forked from one process that has imported everything and computed nothing.
"""

import json
import multiprocessing
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining  # slow to import: once, before the fork

from meshwright.hwprofiles import load_stack
from meshwright.simulator import ParallelPlan, TrainingJob
from meshwright.validate.programs.contract.request import ProgramRequest, RankProgram
from meshwright.validate.programs.pytorch import programs as pytorch_programs

NUM_STEPS = 3
TIMEOUT_S = 120


def build(job: TrainingJob, plan: ParallelPlan, stack: str, rank: int) -> RankProgram:
    make = pytorch_programs.build_ddp if stack == "ddp" else pytorch_programs.build_fully_sharded
    request = ProgramRequest(
        job=job,
        plan=plan,
        stack=load_stack(stack),
        rank=rank,
        device=torch.device("cpu"),
        initialise=True,
        num_microbatches=plan.num_microbatches(job),
        dropout=0.0,
    )
    return make(request)


def record_norms() -> list[float]:
    """Return a list that gets the norm of the gradients whenever they are clipped."""
    norms: list[float] = []
    clip = pytorch_programs.clip_gradients

    def clip_and_record(*args: Any) -> torch.Tensor:
        norm = clip(*args)
        norms.append(norm.item())
        return norm

    pytorch_programs.clip_gradients = clip_and_record
    return norms


def mean_over_ranks(losses: list[torch.Tensor]) -> float:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [loss.item() for loss in losses])
    values = [value for of_rank in gathered for value in of_rank]
    return sum(values) / len(values)


def run_rank(rank: int, world_size: int, cases: Path, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{result}.store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    norms, shown = record_norms(), {}
    for name, (job, plan, stack) in pickle.loads(cases.read_bytes()).items():
        program = build(job, plan, stack, rank)
        losses = [mean_over_ranks(program.run_step(step)) for step in range(NUM_STEPS)]
        shown[name] = (losses, list(norms))
        norms.clear()
    if rank == 0:
        result.write_text(json.dumps(shown))
    dist.destroy_process_group()


def main() -> int:
    world_size, cases, result = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run_rank, args=(rank, world_size, cases, result))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
