"""Predicted against measured steps on this machine.

``python -m meshwright.validate.calibration.steps.check`` runs it.
Small Llama-like models without dropout are trained for a few steps by one process a core, in
rounds over all shapes and stacks, so that a machine that slows down slows all of them.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import (
    PS_PER_S,
    Cluster,
    Precision,
    ProfileError,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.planner.reports import SavedPlan, check_folder, plan_document
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, simulate
from meshwright.simulator.model import parse_model
from meshwright.validate.calibration.steps.clock import read_steps
from meshwright.validate.calibration.steps.table import (
    MeasuredStep,
    StepComparison,
    markdown,
    measured_step,
    write_comparisons,
)
from meshwright.validate.launch import RunSpec, run_local
from meshwright.validate.programs import check_program

MEASURE = "meshwright.validate.calibration.steps.clock:measure_steps"
HEAD_DIM, VOCAB_SIZE, FFN_STEP = 64, 2048, 64
WARM_UP_STEPS = 2
MOST = {"ranks": 64, "rounds": 1000, "steps": 1000}
USER_MISTAKE = 2
TABLE = "steps.csv"


class Shape(NamedTuple):
    """A model and its batch."""

    num_layers: int
    hidden_size: int
    seq_len: int
    microbatch_size: int
    num_microbatches: int

    def __str__(self) -> str:
        """Return the shape as the command takes it.

        >>> str(Shape(4, 512, 256, 1, 2))
        '4x512x256x1x2'
        """
        return "x".join(map(str, self))


DEFAULT_SHAPES = (
    Shape(4, 512, 256, 1, 1),
    Shape(4, 512, 256, 2, 1),
    Shape(4, 512, 128, 2, 2),
    Shape(6, 640, 256, 1, 1),
    Shape(3, 768, 256, 2, 1),
    Shape(2, 768, 128, 2, 2),
)


def read_shape(text: str) -> Shape:
    """Return the shape that `Shape.__str__` wrote.

    Raises:
        PlanError: If it is no shape that runs.
    """
    words = text.split("x")
    allowed = "LAYERSxHIDDENxSEQxMICROBATCHxNUMBER, such as 4x512x256x1x1"
    if len(words) != len(Shape._fields) or not all(word.isdecimal() for word in words):
        raise PlanError(f"--shape {text!r} is none; allowed: {allowed}")
    shape = Shape(*map(int, words))
    if not all(shape) or shape.hidden_size % HEAD_DIM:
        raise PlanError(
            f"--shape {text}: allowed: numbers from 1 on, the hidden size a multiple of {HEAD_DIM}"
        )
    return shape


def saved_plan(shape: Shape, cluster: Cluster, stack: StackProfile, num_ranks: int) -> SavedPlan:
    """Return the data-parallel plan of *shape* over *num_ranks*, in fp32."""
    model = parse_model(
        {
            "name": f"llama-{shape.num_layers}x{shape.hidden_size}",
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "num_heads": shape.hidden_size // HEAD_DIM,
            "ffn_hidden_size": round(shape.hidden_size * 8 / 3 / FFN_STEP) * FFN_STEP,
            "vocab_size": VOCAB_SIZE,
            "seq_len": shape.seq_len,
            "gated_mlp": True,
            "positions": "rotary",
            "norm": "rmsnorm",
            "tied_embeddings": False,
            "dropout": False,
        },
        origin=str(shape),
    )
    job = TrainingJob(
        model=model,
        global_batch_size=num_ranks * shape.microbatch_size * shape.num_microbatches,
        seq_len=shape.seq_len,
        precision=Precision.FP32,
    )
    plan = ResolvedPlan(
        dp=num_ranks,
        microbatch_size=shape.microbatch_size,
        zero_stage=stack.zero_stage,
        attention=stack.attention,
        stages=(shape.num_layers,),
    )
    return SavedPlan(job=job, plan=plan, cluster=cluster, stack=stack)


def measured_steps(
    plans: Sequence[SavedPlan], folder: Path, *, num_rounds: int, num_steps: int
) -> list[list[MeasuredStep]]:
    """Return the steps of each plan.

    Args:
        plans: Of equal world sizes.
        folder: Folder of the plans and of the files that ranks write.
        num_rounds: Visits of each plan.
        num_steps: Steps of a visit.

    Raises:
        PlanError: If a rank fails; says which and why.
    """
    paths = [folder / f"plan-{number}.json" for number in range(len(plans))]
    for path, saved in zip(paths, plans, strict=True):
        path.write_text(json.dumps(plan_document(saved)), encoding="utf-8")
    num_ranks = plans[0].plan.world_size
    spec = RunSpec(
        plans=tuple(paths) * num_rounds,
        backend="gloo",
        results=folder / "results",
        num_steps=num_steps,
        warmup_steps=WARM_UP_STEPS,
        measure=MEASURE,
    )
    outcome = run_local(spec, num_ranks)
    if outcome.failure is not None:
        raise PlanError(outcome.failure.report())
    of_ranks = [read_steps(spec.results, rank) for rank in range(num_ranks)]
    measured: list[list[MeasuredStep]] = [[] for _ in plans]
    for records in zip(*of_ranks, strict=True):
        # The spec repeats all plans once a round.
        measured[records[0].plan % len(plans)].append(measured_step(records, os.cpu_count() or 1))
    return measured


def main(words: Sequence[str] | None = None) -> int:
    """Measure what *words* say, print the table and write it; return the exit status."""
    try:
        chosen = _parser().parse_args(words)
        folder = check_folder(chosen.out, force=False)
        lines = _lines(chosen, folder)
    except (PlanError, ProfileError) as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_MISTAKE
    write_comparisons(lines, folder / TABLE)
    sys.stdout.write(markdown(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m meshwright.validate.calibration.steps.check")
    parser.add_argument("--cluster", required=True, help="calibrated cluster file")
    parser.add_argument("--stack", action="append", required=True, help="stack file; repeat")
    parser.add_argument("--shape", action="append", help="LxHxSxMxN; repeat [six of them]")
    parser.add_argument("--ranks", type=int, default=2, help="processes [2]")
    parser.add_argument("--rounds", type=int, default=4, help="visits of each plan [4]")
    parser.add_argument("--steps", type=int, default=3, help="steps of a visit [3]")
    parser.add_argument("--out", required=True, help="folder to write")
    return parser


def _lines(chosen: argparse.Namespace, folder: Path) -> list[StepComparison]:
    for name, most in MOST.items():
        value, fewest = getattr(chosen, name), 2 if name == "ranks" else 1
        if not fewest <= value <= most:
            raise PlanError(f"--{name} {value} is out of range; allowed {fewest} to {most}")
    shapes = [read_shape(text) for text in chosen.shape or ()] or list(DEFAULT_SHAPES)
    cluster = load_cluster(chosen.cluster)
    stacks = [load_stack(name) for name in chosen.stack]
    for stack in stacks:
        check_program(stack)
    pairs = [(shape, stack) for shape in shapes for stack in stacks]
    plans = [saved_plan(shape, cluster, stack, chosen.ranks) for shape, stack in pairs]
    # Predicted first: what cannot be simulated is refused before the measuring.
    times_s = [
        simulate(each.job, each.plan, each.cluster, each.stack).step_ps / PS_PER_S for each in plans
    ]
    folder.mkdir(parents=True, exist_ok=True)
    measured = measured_steps(plans, folder, num_rounds=chosen.rounds, num_steps=chosen.steps)
    lines = [
        StepComparison(stack.name, str(shape), time_s, tuple(steps))
        for (shape, stack), time_s, steps in zip(pairs, times_s, measured, strict=True)
    ]
    return sorted(lines, key=lambda line: line.stack)


if __name__ == "__main__":
    sys.exit(main())
