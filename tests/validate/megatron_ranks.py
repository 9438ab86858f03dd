"""A script: train the plans of a file on processes of this machine, and write what they showed.

``python megatron_ranks.py FOLDER``: ``cases`` there is a pickled list of (name, job, plan, stack
name, dropout); ``result.json`` will have, by name, of each step the mean loss and the norm of the
gradients, and the most that two ranks differ in a weight that both hold. Ranks are forked from one
process that has imported everything and computed nothing.
"""

import gc
import json
import multiprocessing
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # imported by the first operator otherwise, in each rank
import torch.distributed as dist

from meshwright.hwprofiles import load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.validate.programs.contract.request import ProgramRequest
from meshwright.validate.programs.experts.group import ExpertGroup
from meshwright.validate.programs.megatron.buffers import gradient_view
from meshwright.validate.programs.megatron.program import MegatronProgram
from meshwright.validate.programs.megatron.weights import weight_parts

NUM_STEPS = 3
TIMEOUT_S = 60


class Case(NamedTuple):
    name: str
    job: TrainingJob
    plan: ResolvedPlan
    stack: str
    dropout: float


class Shown(NamedTuple):
    losses: list[float]
    norms: list[float]
    spread: float
    sinks: list[float]


def train(case: Case, rank: int) -> Shown:
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
    means, norms = [], []
    program.adam.gradient_norm = noted(program.adam.gradient_norm, norms)
    sinks: list[float] = []
    for step in range(NUM_STEPS):
        losses = program.run_step(step)
        total = torch.tensor([sum(float(each) for each in losses), float(len(losses))])
        dist.all_reduce(total)
        means.append((total[0] / total[1]).item())
        sinks = sinks or gradients_of_sinks(program, case, max(1.0, norms[0]))
    return Shown(means, norms, spread_of_copies(program, case, rank), sinks)


def gradients_of_sinks(program: MegatronProgram, case: Case, clipped: float) -> list[float]:
    """Return the norm of the gradient of the sinks of each layer, which was *clipped*.

    Beside those of other weights they are too small to show in the norm of all.
    """
    return [
        clipped * gradient_view(program.buffers, part.parameter).norm().item()
        for stage in program.stages
        for part in weight_parts(stage, case.job.model, case.job.model.vocab_size)
        if part.whole.name == "sinks"
    ]


Norm = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def noted(compute: Norm, norms: list[float]) -> Norm:
    def compute_and_note(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        norm = compute(gradients)
        norms.append(norm.item())
        return norm

    return compute_and_note


def spread_of_copies(program: MegatronProgram, case: Case, rank: int) -> float:
    """Return the most that two ranks differ in a norm of a weight that both hold."""
    plan, sizes = case.plan, (case.job.model, case.job.model.vocab_size)
    experts = ExpertGroup(ep_rank=rank // plan.expert_tp % plan.ep, num_ep=plan.ep)
    held = {}
    for stage in program.stages:
        for part in weight_parts(stage, *sizes, experts):
            ranks = plan.tp if part.expert is None else plan.expert_tp
            split = None if part.whole.tp_dim is None else rank % ranks
            held[part.name, part.expert, split] = part.parameter.norm().item()
    everyone: list[dict[tuple[str, int | None, int | None], float]] = [{}] * plan.world_size
    dist.all_gather_object(everyone, held)
    copies = defaultdict(list)
    for each in everyone:
        for key, norm in each.items():
            copies[key].append(norm)
    return max(max(norms) - min(norms) for norms in copies.values())


def run_rank(rank: int, cases: list[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for number, case in enumerate(cases):
        if rank >= case.plan.world_size:
            return
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / f"store-{number}"), case.plan.world_size),
            rank=rank,
            world_size=case.plan.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        results[case.name] = train(case, rank)
        dist.destroy_process_group()
    (folder / "result.json").write_text(json.dumps(results), encoding="utf-8")


def main(folder: Path) -> int:
    cases = [Case(*each) for each in pickle.loads((folder / "cases").read_bytes())]
    cases.sort(key=lambda case: -case.plan.world_size)  # ranks beyond the later ones have ended
    gc.freeze()  # what was imported is no garbage, and no rank needs a copy of it
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run_rank, args=(rank, cases, folder))
        for rank in range(cases[0].plan.world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
