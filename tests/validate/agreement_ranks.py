"""A script: run the steps of plans on processes of this machine, and write what they showed.

``python agreement_ranks.py FOLDER``: ``cases`` there is a pickled dict of plans by name;
``result`` will be a pickled dict of the measurements of all ranks, by the same names. Ranks are
forked from one process that has imported everything and computed nothing.
"""

import gc
import multiprocessing
import pickle
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # imported by the first operator otherwise, in each rank
import torch.distributed as dist
import torch.distributed.pipelining  # slow to import, too
from fake_checks import counted_ranks

from meshwright.hwprofiles import Offload
from meshwright.planner.reports.plan_file import SavedPlan
from meshwright.validate.counting.oracle import RankOracle
from meshwright.validate.programs.build import build_program
from meshwright.validate.programs.contract.request import ProgramRequest, Routing
from meshwright.validate.ranks.measurement import RankMeasurement
from meshwright.validate.runs.fake import NUM_STEPS, run_counted

TIMEOUT_S = 120


def num_steps(saved: SavedPlan) -> int:
    """Return how many steps show what each does: the second of DDP is not yet like the third."""
    return NUM_STEPS if saved.stack.name.startswith("ddp@") else NUM_STEPS - 1


def means_of(steps: Iterable[list[torch.Tensor]]) -> tuple[float, ...]:
    return tuple(sum(each.item() for each in losses) / len(losses) for losses in steps if losses)


def count(saved: SavedPlan, rank: int) -> RankMeasurement:
    routing = Routing()
    program = build_program(
        ProgramRequest(
            job=saved.job,
            plan=saved.plan,
            stack=saved.stack,
            rank=rank,
            device=torch.device("cpu"),
            initialise=True,
            num_microbatches=saved.plan.num_microbatches(saved.job),
            dropout=0.0,
            routing=routing,
        )
    )
    oracle, last = RankOracle(program.groups), num_steps(saved) - 1
    # Settled, only the last is counted; where peaks are compared, what is left from the others too.
    first = last if saved.plan.offload is Offload.NONE else 0
    means = means_of(map(program.run_step, range(first)))
    if saved.job.model.experts is not None:  # counts are of balanced experts, losses are not
        means += means_of(map(program.run_step, range(first, last + 1)))
        routing.is_balanced = True
    if rank in counted_ranks(saved.plan):
        with oracle:
            counted = means_of(run_counted(program, oracle, last + 1 - first, first_step=first))
    else:
        counted = means_of(map(program.run_step, range(first, last + 1)))
    losses = means if routing.is_balanced else means + counted
    return RankMeasurement(
        rank=rank,
        world_size=saved.plan.world_size,
        backend="gloo",
        flops=oracle.flops,
        collectives=oracle.collectives,
        peak_bytes=oracle.peak_bytes,
        bytes_at_peak=oracle.bytes_at_peak,
        losses=losses,
    )


def run_rank(rank: int, cases: dict[str, SavedPlan], folder: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for number, (name, saved) in enumerate(cases.items()):
        world_size = saved.plan.world_size
        if rank >= world_size:
            return
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / f"store-{number}"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        everyone: list[RankMeasurement | None] = [None] * world_size
        dist.all_gather_object(everyone, count(saved, rank))
        results[name] = everyone
        dist.destroy_process_group()
    (folder / "result").write_bytes(pickle.dumps(results))


def main(folder: Path) -> int:
    cases: dict[str, SavedPlan] = pickle.loads((folder / "cases").read_bytes())
    # Ranks that the later plans do not have end before them.
    cases = dict(sorted(cases.items(), key=lambda each: -each[1].plan.world_size))
    most = max(saved.plan.world_size for saved in cases.values())
    gc.collect()
    gc.freeze()  # a step looks for garbage: in all that was imported, and each rank would copy it
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, cases, folder)) for rank in range(most)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
