"""``meshwright validate``: a plan's prediction against a fake cluster, a run or a probe.

Imports are local, so that the other commands wait for none of it, and PyTorch is imported only by
what runs it.
"""
# ruff: noqa: PLC0415

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.planner.cli import (
    STEP_WIDTH,
    check_outputs,
    print_report,
    print_written,
    progress_bar,
    show,
)
from meshwright.simulator import PlanError
from meshwright.validate.cli.options import (
    DEFAULT_STEPS,
    DEFAULT_TIMEOUT_S,
    Mode,
    ValidateOptions,
    ValidateOutput,
    mode_of,
)
from meshwright.validate.ranks import Backend

if TYPE_CHECKING:
    from meshwright.planner.reports import SavedPlan
    from meshwright.validate.comparison import Validation
    from meshwright.validate.launch import RunFailure, RunOutcome, RunSpec

DISAGREES = 1


def run_validate(options: ValidateOptions, output: ValidateOutput) -> int:
    """Run ``meshwright validate``; return its exit status."""
    from meshwright.planner.reports import read_runnable_plan

    mode = mode_of(options, output)
    if options.plan is None:
        raise PlanError("PLAN is missing; allowed: a plan.json that search or simulate wrote")
    saved = read_runnable_plan(Path(options.plan))
    folder = check_outputs(output)
    _check_program(saved)
    if mode is Mode.PROBE:
        return _probe(options, saved, output, folder)
    if mode is Mode.EMIT:
        assert folder is not None  # mode_of sees to it
        return _emit(options, saved, folder)
    if mode is Mode.FAKE:
        return _finish(_fake(options, saved), output, folder)
    if mode is Mode.COLLECT:
        return _collect(options, saved, output, folder)
    return _run(options, saved, output, folder)


def _check_program(saved: "SavedPlan") -> None:
    from meshwright.validate.runs import check_torch

    check_torch()
    from meshwright.validate.programs import check_program

    check_program(saved.stack, saved.plan)


def _fake(options: ValidateOptions, saved: "SavedPlan") -> "Validation":
    """Return the comparison of some ranks, each in a fake cluster."""
    from meshwright.validate.comparison import Validation, rank_kinds
    from meshwright.validate.ranks import capped, num_members, representative_members
    from meshwright.validate.runs import measure_fakes

    most = num_members(saved) - 1
    if options.rank is not None and not 0 <= options.rank <= most:
        raise PlanError(f"--rank {options.rank} is out of range; allowed 0 to {most}")
    ranks = representative_members(saved) if options.rank is None else (options.rank,)
    # Counts scale exactly with microbatches: few of them make the same comparison.
    capped_plan = capped(saved, ranks)
    measurements = {}
    with progress_bar() as progress:
        if progress is not None:
            progress("ranks", 0, len(ranks))
        for number, measured in enumerate(measure_fakes(capped_plan, ranks)):
            if progress is not None:
                progress("ranks", number + 1, len(ranks))
            measurements[measured.rank] = measured
    return Validation(
        saved=capped_plan,
        backend=Backend.FAKE,
        num_microbatches=saved.plan.num_microbatches(saved.job),
        measurements=measurements,
        kinds=rank_kinds(capped_plan, measurements),
    )


def _emit(options: ValidateOptions, saved: "SavedPlan", folder: Path) -> int:
    """Write a launch folder and say what to do with it."""
    from rich.text import Text

    from meshwright.hwprofiles import shown_path
    from meshwright.validate.runs import check_backend, write_launch

    assert options.emit is not None  # the mode says so
    backend = options.backend or Backend.NCCL
    check_backend(saved, backend)
    spec = _run_spec(options, backend, results=Path("results"))
    notes = write_launch(saved, spec, folder, launcher=options.emit)
    return print_report(Text(f"written  {shown_path(folder)}\n{notes}".rstrip()), STEP_WIDTH)


def _run_spec(options: ValidateOptions, backend: Backend, *, results: Path) -> "RunSpec":
    """Return the run spec of the ranks of a plan file."""
    from meshwright.validate.launch import RunSpec

    return RunSpec(
        plans=(Path(options.plan or ""),),
        backend="nccl" if backend is Backend.NCCL else "gloo",
        results=results,
        num_steps=options.steps or DEFAULT_STEPS,
        step_timeout_s=options.timeout or DEFAULT_TIMEOUT_S,
    )


def _run(
    options: ValidateOptions, saved: "SavedPlan", output: ValidateOutput, folder: Path | None
) -> int:
    """Run every rank on this machine and compare."""
    from meshwright.validate.launch import run_local
    from meshwright.validate.ranks import num_processes
    from meshwright.validate.runs import check_backend, check_host, kept_failure, results_folder

    processes = num_processes(saved.plan, saved.stack)
    if options.ranks is not None and options.ranks != processes:
        raise PlanError(f"--ranks {options.ranks} is not the plan's number; allowed: {processes}")
    backend = options.backend or Backend.GLOO
    check_backend(saved, backend)
    check_host(saved, backend)
    with results_folder(folder) as results:
        spec = _run_spec(options, backend, results=results)
        with progress_bar() as progress:
            outcome = run_local(spec, processes, progress=progress)
        if outcome.failure is not None:  # the report names the folder, which holds the reasons
            return _fail(kept_failure(outcome.failure, folder), output)
        validation = _compared(outcome, saved)
    return _finish(validation, output, folder)


def _collect(
    options: ValidateOptions, saved: "SavedPlan", output: ValidateOutput, folder: Path | None
) -> int:
    """Compare with the results of a run elsewhere."""
    from meshwright.validate.runs import collected

    outcome = collected(options.collect or "", saved)
    if options.backend is not None and options.backend != outcome.spec.backend:
        raise PlanError(
            f"--backend {options.backend} is not that of the run; allowed: {outcome.spec.backend}"
        )
    if outcome.failure is not None:
        return _fail(outcome.failure, output)
    return _finish(_compared(outcome, saved), output, folder)


def _compared(outcome: "RunOutcome", saved: "SavedPlan") -> "Validation":
    """Return the comparison of a run that ended without a failure."""
    from meshwright.validate.comparison import (
        Validation,
        last_loss_check,
        loss_check,
        rank_kinds,
        run_losses,
        staleness_checks,
        time_checks,
    )
    from meshwright.validate.ranks import predict_members, predicted_async_run, without_dropout
    from meshwright.validate.runs import host_bytes, reference_bytes, reference_of

    saved = without_dropout(saved)
    (measurements,) = outcome.measurements
    everyone = list(measurements.values())
    losses = run_losses(everyone)
    checks, rounds = [last_loss_check(losses)], predicted_async_run(saved)
    # No reference loss: of asynchronous workers, nor where one process cannot hold the model.
    if rounds is not None:
        checks += staleness_checks(rounds, everyone)
    elif outcome.spec.backend == "gloo" and reference_bytes(saved) <= host_bytes():
        checks = [loss_check(saved, losses, reference_of(saved))]
    checks += time_checks(saved, predict_members(saved, (0,))[0].step_time_s, everyone)
    return Validation(
        saved=saved,
        backend=outcome.spec.backend,
        num_microbatches=saved.plan.num_microbatches(saved.job),
        measurements=measurements,
        kinds=rank_kinds(saved, measurements),
        run_checks=tuple(checks),
    )


def _probe(
    options: ValidateOptions, saved: "SavedPlan", output: ValidateOutput, folder: Path | None
) -> int:
    """Compute one rank's stages on a device of this machine and compare."""
    from meshwright.validate.probe import (
        ProbeResult,
        first_device,
        probe_document,
        probe_report,
        run_probe,
        write_probe,
    )

    device = first_device() if options.device is None else options.device
    steps = DEFAULT_STEPS if options.steps is None else options.steps
    probed = run_probe(saved, options.rank or 0, device=device, steps=steps)
    result = ProbeResult(saved=saved, probe=probed, on_cpu=device == "cpu")
    if folder is not None:
        write_probe(result, folder)
    show(output.json, lambda: probe_document(result), lambda: probe_report(result), STEP_WIDTH)
    print_written(output)
    return 0 if result.agrees else DISAGREES


def _finish(validation: "Validation", output: ValidateOutput, folder: Path | None) -> int:
    """Write and print a comparison; return the exit status."""
    from meshwright.validate.comparison import (
        validation_document,
        validation_report,
        write_validation,
    )

    if folder is not None:
        write_validation(validation, folder)
    report = validation_report(validation)
    show(output.json, lambda: validation_document(validation), lambda: report, STEP_WIDTH)
    print_written(output)
    return 0 if validation.agrees else DISAGREES


def _fail(failure: "RunFailure", output: ValidateOutput) -> int:
    """Print the failure of a run."""
    from rich.text import Text

    from meshwright.validate.comparison import failure_document

    show(
        output.json,
        lambda: failure_document(failure),
        lambda: Text(failure.report()),
        STEP_WIDTH,
    )
    return DISAGREES
