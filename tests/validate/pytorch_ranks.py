"""A script: train cases on processes of this machine, and write what they showed.

``python pytorch_ranks.py FOLDER``: ``cases`` there is a pickled dict of (job, plan, stack name);
``result.json`` will have, by name, of each step the mean loss and the norm of the gradients.
Ranks are forked from one process that has imported everything and computed nothing.
"""

import gc
import json
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining  # slow to import: once, before the fork

from meshwright.hwprofiles import load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.validate.programs.contract.request import ProgramRequest, RankProgram
from meshwright.validate.programs.pytorch import programs as pytorch_programs

NUM_STEPS = 3
TIMEOUT_S = 120


def build(job: TrainingJob, plan: ResolvedPlan, stack: str, rank: int) -> RankProgram:
    make = (
        pytorch_programs.build_ddp
        if stack.startswith("ddp")
        else pytorch_programs.build_fully_sharded
    )
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

    def recorded(clip: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def clip_and_record(*args: Any) -> torch.Tensor:
            norm = clip(*args)
            norms.append(norm.item())
            return norm

        return clip_and_record

    for name in ("clip_gradients", "clip_gradients_by_axis"):
        setattr(pytorch_programs, name, recorded(getattr(pytorch_programs, name)))
    return norms


def mean_over_ranks(losses: list[torch.Tensor]) -> float:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [loss.item() for loss in losses])
    values = [value for of_rank in gathered for value in of_rank]
    return sum(values) / len(values)


def run_rank(rank: int, cases: dict[str, Any], folder: Path) -> None:
    torch.set_num_threads(1)
    norms, shown = record_norms(), {}
    for number, (name, (job, plan, stack)) in enumerate(cases.items()):
        if rank >= plan.world_size:
            return
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / f"store-{number}"), plan.world_size),
            rank=rank,
            world_size=plan.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        program = build(job, plan, stack, rank)
        losses = [mean_over_ranks(program.run_step(step)) for step in range(NUM_STEPS)]
        shown[name] = (losses, list(norms))
        norms.clear()
        dist.destroy_process_group()
    (folder / "result.json").write_text(json.dumps(shown), encoding="utf-8")


def main(folder: Path) -> int:
    cases = pickle.loads((folder / "cases").read_bytes())
    # Ranks that the later plans do not have end before them, and write nothing.
    cases = dict(sorted(cases.items(), key=lambda each: -each[1][1].world_size))
    gc.freeze()  # what was imported is no garbage, and no rank needs a copy of it
    codes = exit_codes(cases, folder)
    if any(code is not None and code < 0 for code in codes):
        # A rank without a word was seen once in some ten runs: PyTorch's own code fell, not ours.
        sys.stderr.write(f"exit codes of ranks: {codes}; all run again\n")
        codes = exit_codes(cases, folder / "again")
    return int(any(codes))


def exit_codes(cases: dict[str, Any], folder: Path) -> list[int | None]:
    """Return how each rank of *cases* ended, below 0 by a signal; the result is in *folder*."""
    folder.mkdir(exist_ok=True)
    fork = multiprocessing.get_context("fork")
    most = max(plan.world_size for _, plan, _ in cases.values())
    ranks = [fork.Process(target=run_rank, args=(rank, cases, folder)) for rank in range(most)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
