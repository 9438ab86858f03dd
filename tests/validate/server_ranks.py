"""A script: train plans of workers and servers on processes of this machine.

``python server_ranks.py CASES RESULT``: CASES is a pickled dict of (job, plan), RESULT a JSON file
with, by name, what each rank showed. Ranks are forked from one process that has imported
everything and computed nothing.
"""

import gc
import json
import multiprocessing
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first optimizer otherwise, in each rank
import torch.distributed as dist

from meshwright.hwprofiles import load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.validate.counting.oracle import RankOracle
from meshwright.validate.programs.contract.request import ProgramRequest
from meshwright.validate.programs.strategies.parameter_server import (
    AsynchronousServers,
    build_servers,
)
from meshwright.validate.ranks.server_layout import num_processes
from meshwright.validate.runs.fake import run_counted

NUM_STEPS = 3
TIMEOUT_S = 120
STACK = "parameter-server"


def show(job: TrainingJob, plan: ResolvedPlan, rank: int) -> dict[str, Any]:
    program = build_servers(
        ProgramRequest(
            job=job,
            plan=plan,
            stack=load_stack(STACK),
            rank=rank,
            device=torch.device("cpu"),
            initialise=True,
            num_microbatches=plan.num_microbatches(job),
            dropout=0.0,
        )
    )
    oracle = RankOracle(program.groups)
    with oracle:
        steps = list(run_counted(program, oracle, NUM_STEPS))
    shown = {
        "losses": [[loss.item() for loss in losses] for losses in steps],
        "collectives": oracle.collectives,
    }
    if isinstance(program, AsynchronousServers):
        shown |= {"arrivals": program.arrivals, "staleness": sorted(program.staleness.items())}
    return shown


def run_rank(rank: int, cases: dict[str, tuple[TrainingJob, ResolvedPlan]], folder: Path) -> None:
    torch.set_num_threads(1)
    shown = {}
    for number, (name, (job, plan)) in enumerate(cases.items()):
        world_size = num_processes(plan, load_stack(STACK))
        if rank < world_size:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(folder / f"store-{number}"), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            shown[name] = show(job, plan, rank)
            dist.barrier()
            dist.destroy_process_group()
    (folder / f"shown-{rank}.json").write_text(json.dumps(shown), encoding="utf-8")


def main(cases_path: Path, result: Path) -> int:
    cases = pickle.loads(cases_path.read_bytes())
    most = max(num_processes(plan, load_stack(STACK)) for _, plan in cases.values())
    gc.freeze()  # what was imported is no garbage, and no rank needs a copy of it
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run_rank, args=(rank, cases, result.parent)) for rank in range(most)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        return 1
    shown: dict[str, list[Any]] = {name: [] for name in cases}
    for rank in range(most):
        file = result.parent / f"shown-{rank}.json"
        for name, found in json.loads(file.read_text(encoding="utf-8")).items():
            shown[name].append(found)
    result.write_text(json.dumps(shown), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
