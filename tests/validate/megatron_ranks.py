"""A script: train the plans of a file on processes of this machine, and write what they lost.

``python megatron_ranks.py CASES RESULT``: CASES is a pickled list of (name, job, plan, stack
name, dropout), RESULT a JSON file of the mean loss of each step by name. Ranks are forked from
one process that has imported everything and computed nothing.
"""

import json
import multiprocessing
import pickle
import sys
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from hwprofiles import load_stack
from simulator import ParallelPlan, TrainingJob
from validate.program.contract import ProgramRequest
from validate.program.megatron import MegatronProgram

NUM_STEPS = 3
TIMEOUT_S = 60


class Case(NamedTuple):
    name: str
    job: TrainingJob
    plan: ParallelPlan
    stack: str
    dropout: float


def train(case: Case, rank: int) -> list[float]:
    """Return the mean loss of each step over all replicas."""
    torch.manual_seed(rank)
    program = MegatronProgram(
        ProgramRequest(
            job=case.job,
            plan=case.plan,
            stack=load_stack(case.stack),
            rank=rank,
            device=torch.device("cpu"),
            initialise=True,
            num_microbatches=case.plan.num_microbatches(case.job),
            dropout=case.dropout,
        )
    )
    means = []
    for step in range(NUM_STEPS):
        losses = program.run_step(step)
        total = torch.tensor([sum(float(each) for each in losses), float(len(losses))])
        dist.all_reduce(total)
        means.append((total[0] / total[1]).item())
    return means


def run_rank(rank: int, cases: list[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    world_size = cases[0].plan.world_size
    results = {}
    for number, case in enumerate(cases):
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / f"store-{world_size}-{number}"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        results[case.name] = train(case, rank)
        dist.destroy_process_group()
    if rank == 0:
        (folder / f"losses-{world_size}.json").write_text(json.dumps(results), encoding="utf-8")


def main(cases_path: Path, result: Path) -> int:
    cases = [Case(*each) for each in pickle.loads(cases_path.read_bytes())]
    cases.sort(key=lambda case: case.plan.world_size)
    context = multiprocessing.get_context("fork")
    losses: dict[str, list[float]] = {}
    for world_size, group in groupby(cases, key=lambda case: case.plan.world_size):
        arguments = (list(group), result.parent)
        ranks = [
            context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
        losses |= json.loads((result.parent / f"losses-{world_size}.json").read_text("utf-8"))
    result.write_text(json.dumps(losses), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
