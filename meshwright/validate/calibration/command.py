"""``meshwright calibrate``: measure, fit profiles, write them.

Imports are local, so that the other commands wait for none of it, and files are read without
PyTorch.
"""
# ruff: noqa: PLC0415

import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.simulator import PlanError
from meshwright.validate.calibration.options import CalibrateOptions

if TYPE_CHECKING:
    from meshwright.validate.calibration.results import Measured
    from meshwright.validate.calibration.rows import Machine, RowFile
    from meshwright.validate.calibration.setting import CalibrationSetting

REPORT_WIDTH = 100
# Part of --budget-seconds for collectives, where there are ranks.
COLLECTIVE_SHARE = 0.35


def run_calibrate(options: CalibrateOptions) -> int:
    """Run ``meshwright calibrate``; return its exit status.

    Raises:
        PlanError: If what fits or measures is not installed, or an option is wrong.
    """
    from meshwright.planner.cli import print_report
    from meshwright.validate.calibration.results import read_runs, write_results
    from meshwright.validate.calibration.setting import read_setting

    setting = read_setting(options)
    runs = read_runs(setting.nccl_tests)
    _show_traces(setting)
    if setting.folder is None or not setting.makes_profiles:
        return 0
    if find_spec("scipy") is None:  # before minutes of measuring
        raise PlanError(
            'a fit needs SciPy; install it with: pip install "meshwright[calibrate]", or '
            "meshwright[validate], which has PyTorch, too"
        )
    measured = None if setting.accelerator is None else _measure(setting, setting.folder)
    setting.folder.mkdir(parents=True, exist_ok=True)
    report = write_results(setting, setting.folder, measured, runs)
    return print_report(report, REPORT_WIDTH)


def _show_traces(setting: "CalibrationSetting") -> None:
    """Print each trace's device time by kernel kind; write it as CSV if there is a folder."""
    from meshwright.planner.cli import print_report
    from meshwright.validate.calibration.report import trace_report, write_trace
    from meshwright.validate.traces import read_job_trace

    traces = [(path, read_job_trace(path)) for path in setting.traces]
    for number, (path, trace) in enumerate(traces, start=1):
        if setting.folder is not None:
            setting.folder.mkdir(parents=True, exist_ok=True)
            write_trace(trace, setting.folder / f"trace-{number}.csv")
        print_report(trace_report(path, trace), REPORT_WIDTH)


def _measure(setting: "CalibrationSetting", folder: Path) -> "Measured":
    """Return the rows of this machine, after measuring those that are missing.

    Raises:
        PlanError: If PyTorch is not installed, or the machine lacks what was asked for.
        KeyboardInterrupt: If the user stops it; what was measured is kept.
    """
    assert setting.accelerator is not None  # the caller measures only then
    try:
        from meshwright.validate.calibration.measure import measure_device, probe_machine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise PlanError(
            f"--device {setting.accelerator} needs PyTorch; install it with: "
            'pip install "meshwright[validate]"'
        ) from None
    from meshwright.planner.cli import progress_bar
    from meshwright.validate.calibration.collectives import measure_collectives
    from meshwright.validate.calibration.results import Measured

    file = open_rows(
        folder, probe_machine(setting.accelerator, setting.num_ranks), force=setting.force
    )
    end_s = time.monotonic() + setting.budget_s
    # Kernels go first; the time that they leave unused goes to the collectives, too.
    kept_s = COLLECTIVE_SHARE * setting.budget_s if setting.num_ranks > 1 else 0.0
    coverage = {}
    try:
        with progress_bar() as progress:
            coverage["kernels"] = measure_device(
                file, setting.precision, deadline_s=end_s - kept_s, progress=progress
            )
            if setting.num_ranks > 1:
                coverage["collectives"] = measure_collectives(
                    file, setting.num_ranks, deadline_s=end_s, progress=progress
                )
    except KeyboardInterrupt:
        sys.stderr.write(f"{len(file.rows)} rows are kept; the same command goes on from there\n")
        raise
    return Measured(file, coverage)


def open_rows(folder: Path, machine: "Machine", *, force: bool) -> "RowFile":
    """Return the row file in *folder*: a new one, or that of an earlier run.

    Raises:
        PlanError: If it holds rows of another machine or other software.
    """
    from datetime import UTC, datetime

    from meshwright.hwprofiles import shown_path
    from meshwright.validate.calibration.rows import FILE_NAME, RowFile

    path = folder / FILE_NAME
    if force or not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        return RowFile.start(path, machine, datetime.now(UTC).date().isoformat())
    file = RowFile.load(path)
    difference = file.machine.difference(machine)
    if difference is not None:
        raise PlanError(
            f"--out {shown_path(folder)} was measured elsewhere: {difference}; "
            "allowed: another folder, or --force"
        )
    return file
