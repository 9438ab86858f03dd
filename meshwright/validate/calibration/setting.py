"""The options of a calibration, read and checked."""

import re
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import Precision, load_device, shown
from meshwright.planner.options import option_name
from meshwright.planner.reports import check_folder, output_path
from meshwright.simulator import PlanError
from meshwright.validate.calibration.fit import check_stacks, read_peak
from meshwright.validate.calibration.options import CalibrateOptions
from meshwright.validate.calibration.rows import FILE_NAME, Accelerator

MAX_RANKS = 64
MAX_BUDGET_S = 1e6
DEFAULT_NAME = "calibrated"
MEASURING = ("ranks", "precision", "peak", "budget_seconds")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}", re.ASCII)


class CalibrationSetting(NamedTuple):
    """Checked options of a calibration.

    Args:
        accelerator: Device to measure, if any.
        name: Of the profiles.
        folder: Their folder; None where a trace is only shown.
        num_ranks: Processes of the collectives; 1 for none.
        precision: Number format of the kernels.
        like: Built-in device whose datasheet to take.
        peak: Peaks that the user gives.
        budget_s: Longest time to measure for.
        stacks: Built-in ones to write as this processor runs them.
        nccl_tests: Outputs of nccl-tests.
        traces: Of jobs that ran.
        force: Whether old rows are dropped.
    """

    accelerator: Accelerator | None
    name: str
    folder: Path | None
    num_ranks: int
    precision: Precision
    like: str | None
    peak: dict[Precision, float]
    budget_s: float
    stacks: tuple[str, ...]
    nccl_tests: tuple[Path, ...]
    traces: tuple[Path, ...]
    force: bool

    @property
    def makes_profiles(self) -> bool:
        """Whether there is a machine, or nccl-tests output, to fit profiles to."""
        return self.accelerator is not None or bool(self.nccl_tests)


def read_setting(options: CalibrateOptions) -> CalibrationSetting:
    """Return the checked *options*.

    Raises:
        PlanError: If one is out of range, would do nothing, or they ask for nothing.
    """
    _check_presence(options)
    ranks, budget_s = options.ranks, options.budget_seconds
    if ranks is not None and not 2 <= ranks <= MAX_RANKS:
        raise PlanError(f"--ranks {ranks} is out of range; allowed 2 to {MAX_RANKS}")
    if budget_s is not None and not 0 < budget_s <= MAX_BUDGET_S:
        allowed = f"more than 0, up to {MAX_BUDGET_S:g}"
        raise PlanError(f"--budget-seconds {budget_s:g} is out of range; allowed {allowed}")
    if options.like is not None:
        load_device(options.like)
    default = Precision.FP32 if options.device is Accelerator.CPU else Precision.BF16
    precision = options.precision or default
    peak = read_peak(options.peak)
    name = _read_name(options.name)
    return CalibrationSetting(
        accelerator=options.device,
        name=name,
        folder=_read_folder(options, name),
        num_ranks=ranks or 1,
        precision=precision,
        like=options.like,
        peak={} if peak is None else {precision: peak},
        budget_s=MAX_BUDGET_S if budget_s is None else budget_s,
        stacks=check_stacks(options.stack or (), options.device),
        nccl_tests=tuple(output_path("--nccl-tests", each) for each in options.nccl_tests or ()),
        traces=tuple(output_path("--trace", each) for each in options.trace or ()),
        force=options.force,
    )


def _check_presence(options: CalibrateOptions) -> None:
    """Raise PlanError where an option is missing, or would do nothing."""
    if options.device is not None:
        return
    if not options.nccl_tests and not options.trace:
        raise PlanError(
            "calibrate has nothing to do; allowed: --device cuda or cpu, --nccl-tests FILE, "
            "--trace FILE"
        )
    for field in MEASURING:
        if getattr(options, field) is not None:
            raise PlanError(f"{option_name(field)} has no effect without --device cuda or cpu")
    if not options.nccl_tests:
        for field in ("like", "name"):
            if getattr(options, field) is not None:
                raise PlanError(f"{option_name(field)} has no effect with --trace alone")


def _read_name(name: str | None) -> str:
    if name is not None and not _NAME.fullmatch(name):
        allowed = "up to 80 letters, digits, - and _"
        raise PlanError(f"--name {shown(name)} is no name; allowed: {allowed}")
    return name or DEFAULT_NAME


def _read_folder(options: CalibrateOptions, name: str) -> Path | None:
    """Return the folder of results; one with rows may be continued."""
    text = options.out
    if text is None:
        if options.device is None and not options.nccl_tests:
            return None
        text = name
    has_rows = options.device is not None and (output_path("--out", text) / FILE_NAME).is_file()
    return check_folder(text, force=options.force or has_rows)
