"""BERT-Large with DeepSpeed on up to 1,024 V100: the published times, and what they are predicted.

Published: announcement of 2020-05-28, Table 1; the rows are tests/golden/training_times.csv.
"""

import csv
from functools import cache
from typing import NamedTuple

from documents.pages import ROOT
from meshwright import (
    Precision,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_cluster,
    load_model,
    load_stack,
    simulate,
)

TABLE = ROOT / "tests" / "golden" / "training_times.csv"
STACK = "deepspeed-lamb-2020"
SMALLEST = 16
SECONDS_A_MINUTE = 60


class Published(NamedTuple):
    """A published time, and how far the scaling efficiency may be from its own."""

    minutes: float
    abs_tol: float


class Phase(NamedTuple):
    """A phase of the training: its sequences, batches and how many sequences it takes."""

    seq_len: int
    global_batch_size: int
    microbatch_size: int
    num_sequences: float


# DeepSpeed tutorial "BERT Pre-training", table of the record's configuration: 64K and 32K batches,
# microbatches of 64 and 8, 403M and 18 to 22M samples. The tokenizer's vocabulary is padded to a
# multiple of 8 and about 15 % of the positions are scored (its code and the announcement).
PHASES = (Phase(128, 65536, 64, 403e6), Phase(512, 32768, 8, 20e6))
MODEL = load_model("bert-large").model_copy(
    update={"vocab_size": 30528, "scored_fraction": 0.15625}
)


def published_times() -> dict[int, Published]:
    """Return the published rows by number of devices."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        int(row["num_gpus"]): Published(float(row["minutes"]), float(row["abs_tol"]))
        for row in rows
    }


@cache
def step_of_phase(phase: Phase, num_gpus: int, stack: str = STACK) -> StepResult:
    """Return the simulated step of a phase on so many devices."""
    job = TrainingJob(
        model=MODEL,
        global_batch_size=phase.global_batch_size,
        seq_len=phase.seq_len,
        precision=Precision.FP16,
    )
    plan = ResolvedPlan(
        dp=num_gpus, microbatch_size=phase.microbatch_size, stages=(MODEL.num_layers,)
    )
    step = simulate(job, plan, load_cluster("dgx-2"), load_stack(stack))
    assert step.memory.fits, "the runs were made"
    return step


def predicted_minutes(num_gpus: int, stack: str = STACK) -> float:
    """Return the predicted minutes of both phases."""
    steps = [(phase, step_of_phase(phase, num_gpus, stack)) for phase in PHASES]
    seconds = sum(
        step.step_time_s * phase.num_sequences / phase.global_batch_size for phase, step in steps
    )
    return seconds / SECONDS_A_MINUTE


def efficiency(minutes: dict[int, float], num_gpus: int) -> float:
    """Return device-minutes on the smallest cluster over those on *num_gpus*."""
    return minutes[SMALLEST] * SMALLEST / (minutes[num_gpus] * num_gpus)
