"""Profiles fitted to the rows, written with residuals and a picture, and their report."""

from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType

from meshwright.hwprofiles import (
    Cluster,
    Device,
    Link,
    load_cluster,
    load_device,
    load_link,
    single_line,
)
from meshwright.simulator import PlanError
from meshwright.validate.calibration.fit import (
    calibrated_device,
    calibrated_link,
    combined_rows,
    draw_residuals,
    evidence,
    launch_floor,
    residuals_of,
    write_profiles,
    write_residuals,
    write_stacks,
)
from meshwright.validate.calibration.report import calibration_report
from meshwright.validate.calibration.rows import (
    Accelerator,
    CaseGroup,
    Coverage,
    NcclRun,
    Row,
    RowFile,
    read_nccl_tests,
)
from meshwright.validate.calibration.setting import CalibrationSetting


class Measured(NamedTuple):
    """Rows of this machine, and their coverage of the cases."""

    file: RowFile
    coverage: dict[str, Coverage]


class Profiles(NamedTuple):
    """Written profiles, loaded again as a simulation loads them, and all files."""

    device: Device | None
    link: Link | None
    cluster: Cluster | None
    files: list[Path]


def write_results(
    setting: CalibrationSetting, folder: Path, measured: Measured | None, runs: list[NcclRun]
) -> RenderableType:
    """Write profiles, residuals and picture into *folder*; return the report.

    Raises:
        PlanError: If the rows are too few for a profile.
    """
    file = measured.file if measured is not None else None
    head = evidence(file.machine, file.date) if file is not None else "read from nccl-tests"
    measured_rows = file.rows if file is not None else []
    collectives = combined_rows(measured_rows, [row for run in runs for row in run.rows])
    rows = [
        row for row in measured_rows if row.case.group is not CaseGroup.COLLECTIVE
    ] + collectives
    profiles = _write_profiles(setting, folder, file, collectives, runs)
    accelerator = file.machine.accelerator if file is not None else Accelerator.CUDA
    residuals = residuals_of(rows, profiles.device, profiles.link, launch_floor(rows, accelerator))
    tables, picture = folder / "residuals.csv", folder / "residuals.png"
    write_residuals(residuals, tables)
    draw_residuals(residuals, f"{setting.name}: {head}", picture)
    return calibration_report(
        f"{setting.name}: {head}",
        residuals,
        device=profiles.device,
        link=profiles.link,
        coverage=measured.coverage if measured is not None else {},
        files=[*profiles.files, tables, picture],
    )


def _write_profiles(
    setting: CalibrationSetting,
    folder: Path,
    file: RowFile | None,
    collectives: list[Row],
    runs: list[NcclRun],
) -> Profiles:
    """Write the profiles and read them again: the residuals are those of the files."""
    name = setting.name
    device: Device | str | None = setting.like
    if file is not None:
        device = calibrated_device(file, f"{name}-device", like=setting.like, peak=setting.peak)
    link = None
    if collectives:
        sources = _origins(file, runs)
        link = calibrated_link(collectives, f"{name}-link", f"inside {name}, calibrated", sources)
    largest = max((row.case.sizes[1] for row in collectives), default=1)
    files = write_profiles(folder, name, device=device, link=link, num_devices=largest)
    return Profiles(
        device=load_device(folder / f"{name}-device.toml") if file is not None else None,
        link=None if link is None else load_link(folder / f"{name}-link.toml"),
        cluster=None if device is None else load_cluster(folder / f"{name}.toml"),
        files=files + _write_stacks(setting, folder, file),
    )


def _write_stacks(setting: CalibrationSetting, folder: Path, file: RowFile | None) -> list[Path]:
    """Write the stacks of ``--stack``; only a measured machine has any."""
    if file is None:
        return []
    source = evidence(file.machine, file.date)
    return write_stacks(folder, setting.name, setting.stacks, file.rows, source)


def _origins(file: RowFile | None, runs: list[NcclRun]) -> dict[Row, str]:
    """Return the source of each row of a collective."""
    origins: dict[Row, str] = {}
    if file is not None:
        origins |= dict.fromkeys(file.rows, evidence(file.machine, file.date))
    for run in runs:
        origin = f"nccl-tests, {single_line(run.path.name)}, on {run.device}"
        origins |= dict.fromkeys(run.rows, origin)
    return origins


def read_runs(paths: tuple[Path, ...]) -> list[NcclRun]:
    """Return the runs in files of nccl-tests.

    Raises:
        PlanError: If one is no such file, or two are of the same operation and ranks.
    """
    runs: list[NcclRun] = []
    for path in paths:
        run = read_nccl_tests(path)
        same = [each for each in runs if (each.op, each.num_ranks) == (run.op, run.num_ranks)]
        if same:
            raise PlanError(
                f"--nccl-tests {path} and {same[0].path} are both of {run.op} over "
                f"{run.num_ranks} ranks; allowed: one file for each"
            )
        runs.append(run)
    return runs
