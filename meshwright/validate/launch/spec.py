"""Spec of a run of real processes: a small JSON file that every rank reads."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from meshwright.hwprofiles import one_line, shown_path
from meshwright.simulator import PlanError
from meshwright.validate.ranks import RESULT_FILE

Count = Annotated[int, Field(strict=True, ge=1, le=10**6)]
Seconds = Annotated[float, Field(gt=0, le=10**6, allow_inf_nan=False)]

# ``module:function`` from plan, spec and rank to a `RankMeasurement`. A folder of results may come
# from anywhere, so a worker imports nothing else that a file names; who starts it may allow more.
MEASURES = (
    "meshwright.validate.runs.measure:measure_rank",
    "meshwright.validate.calibration.steps.clock:measure_steps",
)
MEASURE_VARIABLE = "MESHWRIGHT_MEASURE"
SHUTDOWN_S = 60.0  # to leave the group, to write results, to stop what hangs


class RunPhase:
    """Phases of a rank, in order; timed steps are between the warm-up and the report."""

    INIT = "init"
    BUILD = "build"
    WARM_UP = "warm-up"
    REPORT = "report"
    DONE = "done"

    @staticmethod
    def step(number: int) -> str:
        """Return the phase of a timed step.

        >>> RunPhase.step(2)
        'step 2'
        """
        return f"step {number}"


@dataclass(frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid"))
class RunSpec:
    """Plans of a run, and its time limits.

    Args:
        plans: Plan files, run one after the other by the same processes.
        backend: Backend of the process group: "gloo" on CPUs, "nccl" on GPUs.
        results: Folder of the files that ranks write; one run, one folder.
        num_steps: Timed steps of each plan.
        warmup_steps: Steps before them; the first one makes the communicators.
        init_timeout_s: Longest wait to join, and in everything before a plan's first timed step.
        step_timeout_s: Longest timed step, and longest wait for another rank in it.
        threads_per_rank: CPU threads of each rank.
        measure: One of `MEASURES`.
    """

    plans: Annotated[tuple[Path, ...], Field(min_length=1)]
    backend: Literal["gloo", "nccl"]
    results: Path
    num_steps: Count = 3
    warmup_steps: Count = 1
    init_timeout_s: Seconds = 300.0
    step_timeout_s: Seconds = 60.0
    threads_per_rank: Count = 1
    measure: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = MEASURES[0]

    def limit_s(self, phase: str) -> float:
        """Return the longest wait for another rank in *phase*, in seconds."""
        return self.step_timeout_s if phase.startswith("step ") else self.init_timeout_s

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of a rank for one plan, in order."""
        steps = (RunPhase.step(number) for number in range(self.num_steps))
        before = (RunPhase.INIT, RunPhase.BUILD, RunPhase.WARM_UP)
        return (*before, *steps, RunPhase.REPORT, RunPhase.DONE)

    @property
    def deadline_s(self) -> float:
        """Seconds after which a run that obeys its limits has ended.

        Joining, then for each plan: building, the warm-up, the steps and the report.
        """
        of_plan_s = 3 * self.init_timeout_s + self.num_steps * self.step_timeout_s
        return self.init_timeout_s + len(self.plans) * of_plan_s + SHUTDOWN_S


_ADAPTER = TypeAdapter(RunSpec)


def write_spec(spec: RunSpec, path: Path) -> None:
    """Write *spec* as JSON, in one piece; its relative paths mean files beside *path*."""
    # Any rank of any node may write it: each has a draft of its own.
    draft = path.with_name(f".{path.name}-{os.uname().nodename}-{os.getpid()}.draft")
    draft.write_bytes(_ADAPTER.dump_json(spec, indent=1) + b"\n")
    draft.replace(path)


def read_spec(path: Path) -> RunSpec:
    """Return the spec that `write_spec` wrote, its paths resolved beside *path*.

    Raises:
        PlanError: If the file cannot be read or says something that cannot be.
    """
    try:
        spec = _ADAPTER.validate_python(RESULT_FILE.read_json(path))
    except ValidationError as error:
        raise PlanError(f"{shown_path(path)}: {one_line(error)}") from None
    folder = path.resolve().parent
    plans = tuple(folder / plan for plan in spec.plans)
    return replace(spec, plans=plans, results=folder / spec.results)
