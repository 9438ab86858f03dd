"""Counts one rank of a framework's program, for the tests and for `count.py` beside this folder.

The command counts all ranks of the plans of these names, or of all, prints how they compare with
what is predicted, and with ``--write`` records them for docs/agreement.md.
"""

import csv
import importlib
import logging
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, cast

from meshwright.planner.reports import SavedPlan
from meshwright.validate.counting import RankOracle
from meshwright.validate.outside import (
    COUNT_HEAD,
    COUNTS,
    OutsideCount,
    OutsidePlan,
    compare_outside,
    differing,
    load_outside_counts,
    load_outside_plans,
)
from meshwright.validate.programs.contract import RankProgram
from meshwright.validate.ranks import CollectiveCount, RankMeasurement
from meshwright.validate.runs.fake import NUM_STEPS, run_counted
from witnesses.boundary import cluster_answered

MODULES = {
    "torchtitan": "witnesses.torchtitan_job",
    "torchtitan 0.3": "witnesses.torchtitan_0_3_job",
    "megatron-core": "witnesses.megatron_job",
    "transformers": "witnesses.huggingface_job",
    "accelerate": "witnesses.accelerate_job",
}
MESSAGES = ("send", "recv")
ROOT = Path(__file__).parents[2]


class Framework(Protocol):
    """A module of a framework's job."""

    def answers(self) -> AbstractContextManager[object]:
        """Return the context in which the framework finds what a machine with GPUs has."""

    def job(self, saved: SavedPlan) -> RankProgram:
        """Return a rank of the job, made on a fake cluster."""


def count_rank(plan: OutsidePlan, rank: int) -> OutsideCount:
    """Return the counts of *rank* in a step of the framework's program."""
    framework = cast("Framework", importlib.import_module(MODULES[plan.framework]))
    saved = plan.saved()
    world_size = saved.plan.world_size
    with cluster_answered(rank, world_size), framework.answers():
        program = framework.job(saved)
        oracle = RankOracle(program.groups)
        with oracle:
            for _ in run_counted(program, oracle, NUM_STEPS):
                pass  # the counts of the last are kept
        measured = RankMeasurement(
            rank=rank,
            world_size=world_size,
            backend="fake",
            # Without data no kernel skips rows of padding, as it does on a GPU.
            flops=oracle.flops - getattr(program, "unpriced_flops", 0),
            collectives=_messages_named(oracle.collectives),
            peak_bytes=oracle.peak_bytes,
            bytes_at_peak=oracle.bytes_at_peak,
        )
    package = plan.framework.split()[0]
    witness = f"{package} {version(package)}"
    return OutsideCount(plan.name, witness, measured)


def _messages_named(calls: Iterable[CollectiveCount]) -> tuple[CollectiveCount, ...]:
    """Return calls whose messages are those of the pipeline, whichever group they are sent over.

    Between two stages Megatron-Core sends one way over the group of all ranks, so that both ways
    overlap (p2p_communication.py, `_p2p_ops`).
    """
    return tuple(sorted(c._replace(axis="pp") if c.op in MESSAGES else c for c in calls))


def record(counts: Sequence[OutsideCount]) -> None:
    """Write counts over those of the same plans, in the order of the plans."""
    order = [plan.name for plan in load_outside_plans()]
    new = {each.plan for each in counts}
    kept = [each for each in load_outside_counts() if each.plan in order and each.plan not in new]
    every = sorted([*kept, *counts], key=lambda each: (order.index(each.plan), each.measured.rank))
    with (ROOT / "meshwright/validate/data" / COUNTS).open(
        "w", encoding="utf-8", newline=""
    ) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COUNT_HEAD)
        writer.writerows(each.row() for each in every)


def main(words: Sequence[str]) -> int:
    """Count the plans of the names among *words*.

    Returns:
        1 if something differs that is not noted to, or agrees that is, else 0.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = [word for word in words if word != "--write"]
    surprises = 0
    for plan in load_outside_plans():
        if names and plan.name not in names:
            continue
        counts = [count_rank(plan, rank) for rank in plan.counted_ranks()]
        compared = compare_outside(plan, (each.measured for each in counts))
        differing_quantities = {quantity for checks in compared for quantity in differing(checks)}
        surprises += differing_quantities != set(plan.differs)
        sys.stdout.write(
            f"{plan.name} [{plan.options}]: differs: {' '.join(sorted(differing_quantities))}\n"
        )
        for each, checks in zip(counts, compared, strict=True):
            for quantity, failed in differing(checks).items():
                for check in failed:
                    sys.stdout.write(
                        f"  rank {each.measured.rank} {quantity}: {check.quantity}: predicted "
                        f"{check.predicted:,}, counted {check.measured:,}\n"
                    )
        sys.stdout.flush()
        if "--write" in words:
            record(counts)
    return int(surprises > 0)
