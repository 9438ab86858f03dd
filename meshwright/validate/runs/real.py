"""Runs of all ranks of a plan: here, or brought back from a cluster."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from meshwright.hwprofiles import Strategy, format_bytes, shown_path
from meshwright.planner.options import scratch_folder
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import PlanError, count_parameters, simulate
from meshwright.validate.launch import (
    SPEC_NAME,
    Launcher,
    RunFailure,
    RunOutcome,
    RunSpec,
    collect_run,
    write_launch_folder,
)
from meshwright.validate.ranks import Backend, is_asynchronous, num_processes

# Resident in a process that has imported PyTorch 2.13 for CPUs: 266 MB on Linux.
PROCESS_BYTES = 300_000_000
REFERENCE_BYTES_PER_PARAMETER = 16  # fp32 weights, gradients and Adam's two moments
REFERENCE_STEPS = 3
LAUNCH_NOTES = "README.md"


def check_host(saved: SavedPlan, backend: Backend) -> None:
    """Refuse a plan that this machine cannot run.

    Raises:
        PlanError: If it has too few GPUs, or not the memory of all ranks and of the reference.
    """
    if backend is Backend.NCCL:
        _check_gpus(num_processes(saved.plan, saved.stack))
        return
    memory = simulate(saved.job, saved.plan, saved.cluster, saved.stack).memory
    processes = num_processes(saved.plan, saved.stack)
    is_mesh = saved.stack.strategy is Strategy.MESH
    ranks_of_stage = saved.plan.world_size // saved.plan.pp if is_mesh else 1
    stages_bytes = sum(stage.peak_bytes + stage.host_bytes for stage in memory.by_stage)
    ranks_bytes = stages_bytes * ranks_of_stage
    # The reference runs after the ranks have ended.
    needs_bytes = max(
        ranks_bytes + processes * PROCESS_BYTES,
        reference_bytes(saved),
    )
    has_bytes = host_bytes()
    if needs_bytes > has_bytes:
        needs, has = format_bytes(needs_bytes), format_bytes(has_bytes)
        raise PlanError(
            f"--backend gloo: {processes:,} ranks need about {needs}, this machine has "
            f"{has}; allowed: a smaller plan, --backend fake"
        )


def check_backend(saved: SavedPlan, backend: Backend) -> None:
    """Refuse what no process of a strategy can do on NCCL.

    Raises:
        PlanError: Naming what is allowed.
    """
    if backend is not Backend.NCCL:
        return
    if saved.stack.strategy is Strategy.DATAPARALLEL:
        raise PlanError(
            f"--backend nccl: the one process of stack {saved.stack.name} talks to nobody; "
            "allowed: fake, gloo"
        )
    if is_asynchronous(saved):
        raise PlanError(
            "--backend nccl cannot take a message from whoever comes first, as asynchronous "
            "servers do; allowed: fake, gloo"
        )


def reference_bytes(saved: SavedPlan) -> int:
    """Return the bytes with which one process trains the whole model, without activations."""
    return count_parameters(saved.job.model) * REFERENCE_BYTES_PER_PARAMETER


def reference_of(saved: SavedPlan) -> list[float]:
    """Return the losses of the first steps of one process, on one thread as each rank has."""
    import torch  # noqa: PLC0415 - takes seconds

    from meshwright.validate.programs.pytorch import reference_losses  # noqa: PLC0415 - imports torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        multiple = saved.stack.vocabulary_multiple
        return reference_losses(
            saved.job,
            REFERENCE_STEPS,
            vocabulary_multiple=multiple,
            of_transformers=saved.stack.transformers_layers,
        )
    finally:
        torch.set_num_threads(num_threads)


def host_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_gpus(world_size: int) -> None:
    import torch  # noqa: PLC0415 - takes seconds

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < world_size:
        has = f"{found} of {world_size}" if found else "no"
        raise PlanError(
            f"--backend nccl needs a GPU for each rank; PyTorch finds {has} CUDA devices here; "
            "allowed: --backend gloo or fake, or --emit for a cluster"
        )


@contextmanager
def results_folder(out: Path | None) -> Iterator[Path]:
    """Yield a folder for what ranks write: a new one in *out*, else scratch that goes."""
    if out is None:
        with scratch_folder(Path(tempfile.gettempdir())) as scratch:
            yield scratch / "results"
        return
    number = 1
    while (out / f"run-{number}").exists():
        number += 1
    yield out / f"run-{number}"


def kept_failure(failure: RunFailure, out: Path | None) -> RunFailure:
    """Return *failure* with its files where they stay, in the system's folder if not in *out*."""
    if out is not None:
        return failure
    kept = Path(tempfile.mkdtemp(prefix="meshwright-validate-"))
    return replace(failure, folder=failure.folder.rename(kept))


def collected(text: str, saved: SavedPlan) -> RunOutcome:
    """Return the outcome of the run in the folder of ``--collect``.

    Raises:
        PlanError: If there is no run, or more than one, or one of another number of ranks.
    """
    outcome = collect_run(_run_folder(Path(text)), num_processes(saved.plan, saved.stack))
    if len(outcome.measurements) > 1:
        num_plans = len(outcome.measurements)
        raise PlanError(f"--collect {shown_path(Path(text))} is of {num_plans} plans; allowed: one")
    return outcome


def _run_folder(folder: Path) -> Path:
    """Return *folder*, or the only run below it."""
    if (folder / SPEC_NAME).is_file():
        return folder
    spec_files = sorted([*folder.glob(f"*/{SPEC_NAME}"), *folder.glob(f"results/*/{SPEC_NAME}")])
    names = [shown_path(each.parent) for each in spec_files]
    if len(names) == 1:
        return spec_files[0].parent
    there = f"holds {len(names)} runs" if names else f"holds no {SPEC_NAME}"
    allowed = ", ".join(names) if names else "the folder results/... that a run made"
    raise PlanError(f"--collect {shown_path(folder)} {there}; allowed: {allowed}")


def write_launch(saved: SavedPlan, spec: RunSpec, folder: Path, *, launcher: Launcher) -> str:
    """Write a launch folder with its instructions; return these.

    Raises:
        PlanError: If the plan does not fill its nodes.
    """
    script = write_launch_folder(saved, spec, folder, launcher=launcher)
    notes = _notes(script.name, launcher)
    (folder / LAUNCH_NOTES).write_text(notes, encoding="utf-8", newline="\n")
    return notes


def _notes(script: str, launcher: Launcher) -> str:
    is_slurm = launcher is Launcher.SLURM
    start, results = ("sbatch", "job-NUMBER") if is_slurm else ("bash", "run-NAME")
    return "\n".join(
        (
            "1. Copy this folder to where all nodes see it; activate an environment with",
            "   meshwright[validate] and the PyTorch of the machine.",
            "2. In the folder, start the run; the head of the script says what else it takes:",
            f"   {start} {script}",
            "3. Bring back its results, into this folder, and compare:",
            f"   meshwright validate plan.json --collect results/{results}",
            "",
        )
    )
