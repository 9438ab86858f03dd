"""Steps and stages of plans on one GPU beside their predictions.

``python -m meshwright.validate.gpu_check`` runs it.
Each plan is run by ``meshwright validate`` in a process of its own, so that one that fails leaves
the others alone; what has been measured is not measured again.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.hwprofiles import (
    Device,
    FileKind,
    ProfileError,
    load_device,
    one_line,
    shown_path,
    suggestion,
)
from meshwright.planner.reports import SavedPlan, json_text, plan_document
from meshwright.simulator import PlanError
from meshwright.validate.calibration import Accelerator
from meshwright.validate.cli import DEFAULT_STEPS, plan_of_options
from meshwright.validate.gpu_rows import CheckedRow, read_rows, write_tables

FILE = "gpu_plans.csv"
PLANS_FILE = FileKind(title="CSV file of plans", most_bytes=1_000_000, error=PlanError)
CLUSTERS = {Accelerator.CUDA: "dgx-h200", Accelerator.CPU: "localhost-cpu"}
# The programs' attention, whatever a stack's own software runs.
FLASH_KERNEL = "sdpa-fa2"
DEFAULT_LIMIT_S = 300.0
ERRORS = "errors.txt"
USER_MISTAKE = 2


class GpuPlan(BaseModel):
    """Plan given as options of ``meshwright simulate``, and the part of it to run.

    Args:
        name: Its name in the tables.
        kind: "step": whole steps of its only rank; "probe": the stages of one of its ranks.
        rank: Rank to run.
        options: Model and options, all but the cluster.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[\w.-]+( [\w.-]+)*$")]
    kind: Literal["step", "probe"]
    rank: int
    options: str

    @property
    def folder(self) -> str:
        """Name of the folder of its results."""
        return self.name.replace(" ", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSetting:
    """Settings of the check.

    Args:
        accelerator: GPU, or to try the command out a processor.
        out: Folder of the results.
        cluster: Name or file of the cluster that is predicted.
        device: Calibrated device to put into it, if there is one.
        steps: Timed steps of each plan.
        limit_s: Longest time for one plan.
    """

    accelerator: Accelerator
    out: Path
    cluster: str
    device: Device | None
    steps: int
    limit_s: float


def load_gpu_plans(path: Path | None = None) -> tuple[GpuPlan, ...]:
    """Return the plans of a file, by default the built-in ones, in their order.

    Raises:
        PlanError: If the file cannot be read, or a line is no plan.

    >>> load_gpu_plans()[0].kind
    'step'
    """
    if path is None:
        text, shown = (files("meshwright.validate") / "data" / FILE).read_text("utf-8"), FILE
    else:
        text, shown = PLANS_FILE.read_text(path), shown_path(path)
    _, lines = PLANS_FILE.parse_table(text, shown)
    try:
        return tuple(GpuPlan.model_validate(line.cells) for line in lines)
    except ValidationError as error:
        raise PlanError(f"--plans {shown}: {one_line(error)}") from None


def saved_plan(plan: GpuPlan, setting: GpuSetting) -> SavedPlan:
    """Return the plan on the setting's device.

    Raises:
        PlanError: If no plan can be so, or steps are asked for of one that has several ranks.
    """
    saved = plan_of_options(plan.options, setting.cluster)
    if plan.kind == "step" and saved.plan.world_size > 1:
        raise PlanError(
            f"plan {plan.name}: steps need --gpus 1, not {saved.plan.world_size}; allowed: probe"
        )
    if saved.stack.flash_kernel:
        stack = saved.stack.model_copy(update={"flash_kernel": FLASH_KERNEL})
        saved = replace(saved, stack=stack)
    if setting.device is not None:
        cluster = saved.cluster.model_copy(update={"device": setting.device})
        saved = replace(saved, cluster=cluster)
    return saved


def check_plan(plan: GpuPlan, setting: GpuSetting) -> list[CheckedRow]:
    """Return the rows of a plan, run unless it has been.

    Raises:
        PlanError: If no plan can be so.
    """
    folder = setting.out / plan.folder
    rows = read_rows(plan.name, plan.rank, folder)
    if rows:
        return rows
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "plan.json"
    file.write_text(json_text(plan_document(saved_plan(plan, setting))), encoding="utf-8")
    command = [sys.executable, "-m", "meshwright", "validate", str(file)]
    command += ["--steps", str(setting.steps), "--out", str(folder / "run"), "--force"]
    if plan.kind == "probe":
        command += ["--backend", "probe", "--device", setting.accelerator]
        command += ["--rank", str(plan.rank)]
    else:
        on_gpu = setting.accelerator is Accelerator.CUDA
        command += ["--backend", "nccl" if on_gpu else "gloo"]
    reason = _run(command, folder / ERRORS, setting.limit_s)
    rows = read_rows(plan.name, plan.rank, folder)
    return rows or [CheckedRow.failed(plan.name, plan.rank, reason, datetime.now(UTC).date())]


def _run(command: Sequence[str], errors: Path, limit_s: float) -> str:
    """Run *command*; return the line that says why it failed, if it did."""
    # Modules are found where this process finds them, in the same order.
    paths = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:g} s"
    errors.write_text(done.stdout + done.stderr, encoding="utf-8")
    mistakes = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    lines = [*mistakes, *done.stdout.splitlines(), *reversed(done.stderr.splitlines())]
    return next((line for line in lines if line.strip()), f"ended with status {done.returncode}")


def check_plans(
    plans: Sequence[GpuPlan], names: Collection[str], setting: GpuSetting
) -> Iterator[list[CheckedRow]]:
    """Yield the rows of each plan of *names*; the tables in the folder are whole after each.

    Args:
        plans: All, in the order of the tables; of others than *names* what has been measured.
        names: Names of the plans to run.
        setting: Settings of the check.

    Raises:
        PlanError: If a plan cannot be so.
    """
    chosen = [plan for plan in plans if plan.name in names]
    for plan in chosen:
        saved_plan(plan, setting)  # what cannot be is refused before the measuring
    rows = {plan.name: read_rows(plan.name, plan.rank, setting.out / plan.folder) for plan in plans}
    for plan in chosen:
        rows[plan.name] = check_plan(plan, setting)
        write_tables([row for each in rows.values() for row in each], setting.out)
        yield rows[plan.name]


def main(words: Sequence[str] | None = None) -> int:
    """Run the plans that *words* name, by default those of the process.

    Returns:
        1 if one of them failed, 2 for a user's mistake, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m meshwright.validate.gpu_check", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="plans to run [all]")
    parser.add_argument("--out", required=True, type=Path, help="folder to write, or to continue")
    parser.add_argument("--device", choices=list(Accelerator), default=Accelerator.CUDA)
    parser.add_argument("--cluster", help="cluster to predict for [dgx-h200]")
    parser.add_argument("--profile", type=Path, help="calibrated device to put into it")
    parser.add_argument("--plans", type=Path, help="other plans, a file as gpu_plans.csv")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="steps to time")
    parser.add_argument("--limit-seconds", type=float, default=DEFAULT_LIMIT_S)
    options = parser.parse_args(words)
    try:
        return _check(options)
    except (PlanError, ProfileError) as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_MISTAKE


def _check(options: argparse.Namespace) -> int:
    accelerator = Accelerator(options.device)
    setting = GpuSetting(
        accelerator=accelerator,
        out=options.out,
        cluster=options.cluster or CLUSTERS[accelerator],
        device=None if options.profile is None else load_device(options.profile),
        steps=options.steps,
        limit_s=options.limit_seconds,
    )
    plans = {plan.name: plan for plan in load_gpu_plans(options.plans)}
    for name in options.names:
        if name not in plans:
            raise PlanError(f"unknown plan {name!r}; {suggestion(name, plans)}")
    failures = 0
    for rows in check_plans(list(plans.values()), options.names or list(plans), setting):
        failures += any(row.failure for row in rows)
        sys.stdout.write("".join(f"{row}\n" for row in rows if row.is_main))
        sys.stdout.flush()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
