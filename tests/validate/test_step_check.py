"""Steps on this machine against their prediction: the check, its table, and stacks on a CPU."""

import csv
import re
from pathlib import Path

import pytest

from meshwright.hwprofiles import Precision, ProfileError, list_stacks, load_device, load_stack
from meshwright.simulator import PlanError
from meshwright.validate.calibration import Accelerator
from meshwright.validate.calibration.fit.profile_files import device_toml
from meshwright.validate.calibration.fit.stack_file import (
    SERIAL,
    check_stacks,
    stack_toml,
    write_stacks,
)
from meshwright.validate.calibration.rows.rows import BenchmarkCase, CaseGroup, Row
from meshwright.validate.calibration.steps.check import main, read_shape
from meshwright.validate.calibration.steps.clock import StepRecord, machine_busy_s
from meshwright.validate.calibration.steps.table import (
    COLUMNS,
    HEADS,
    MeasuredStep,
    StepComparison,
    markdown,
    measured_step,
    write_comparisons,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "cpu_steps.md"
FP32 = Precision.FP32
LAUNCH = Row(BenchmarkCase(CaseGroup.LAUNCH, "add", FP32, (1,)), 3e-6, 3e-6, 3e-6, 9)
ATTENTION = Row(
    BenchmarkCase(CaseGroup.ATTENTION, "forward", FP32, (4, 64, 64)), 1e-4, 1e-4, 1e-4, 9
)
WITHIN = 0.25


def table_of(text: str) -> list[dict[str, str]]:
    """Return the rows of the table of steps in a document."""
    lines = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("|")]
    start = lines.index(list(HEADS))
    body = lines[start + 2 :]
    rows = body[: next((n for n, cells in enumerate(body) if len(cells) != len(HEADS)), None)]
    return [dict(zip(HEADS, cells, strict=True)) for cells in rows]


def test_the_documents_table_is_what_the_check_prints_and_its_errors_are_right() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = table_of(text)
    assert {row["stack"] for row in rows} == {"ddp", "fsdp"}
    assert len(rows) >= 12
    for row in rows:
        read_shape(row["shape"])
        predicted = float(row["predicted"].removesuffix(" ms"))
        for times, error in zip(HEADS[3:7:3], HEADS[4:8:3], strict=True):
            measured = float(row[times].partition(" ms")[0])
            told = float(row[error].removesuffix("%")) / 100
            assert abs(told) <= WITHIN
            assert told == pytest.approx(predicted / measured - 1, abs=0.01)


def test_every_number_of_the_document_has_a_date_and_a_version() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert re.search(r"20\d\d-\d\d-\d\d", text)
    assert re.search(r"PyTorch \d+\.\d+", text)


def test_a_step_is_that_of_the_slowest_rank_and_others_are_what_is_left() -> None:
    records = [StepRecord(0, 2.0, 1.5, 3.4), StepRecord(0, 1.9, 1.7, 3.4)]
    assert measured_step(records, 2) == MeasuredStep(2.0, 1.7, 0.05)
    assert measured_step([StepRecord(0, 2.0, 1.5, None)], 2).others_fraction is None
    busy_s = machine_busy_s()
    assert busy_s is None or busy_s > 0


def test_only_quiet_steps_are_compared_by_the_wall_clock(tmp_path: Path) -> None:
    steps = (
        MeasuredStep(1.0, 0.9, 0.0),
        MeasuredStep(1.2, 0.9, 0.05),
        MeasuredStep(4.0, 1.1, 0.5),
        MeasuredStep(4.0, 1.1, None),
    )
    lines = [
        StepComparison("ddp", "1x64x16x1x1", 1.1, steps),
        StepComparison("fsdp", "1x64x16x1x1", 1.1, steps[2:]),
    ]
    assert (lines[0].num_quiet, lines[0].quiet) == (2, (1.05, 1.1, 1.15))
    assert (lines[1].num_quiet, lines[1].quiet) == (0, None)
    first, second = (line.strip("| \n").split(" | ") for line in markdown(lines).splitlines()[2:])
    assert first[4:8] == ["+10.0%", "2 of 4", "1100 ms (1050 to 1150)", "+0.0%"]
    assert second[4:8] == ["+0.0%", "0 of 2", "-", "-"]
    write_comparisons(lines, tmp_path / "steps.csv")
    with (tmp_path / "steps.csv").open(encoding="ascii", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == COLUMNS
    assert (rows[0]["quiet_median_s"], rows[1]["quiet_median_s"]) == ("1.1", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shape", "4x512"], "LAYERSxHIDDENxSEQxMICROBATCHxNUMBER"),
        (["--shape", "4x500x256x1x1"], "a multiple of 64"),
        (["--shape", "0x512x256x1x1"], "numbers from 1 on"),
        (["--ranks", "1"], "allowed 2 to 64"),
        (["--rounds", "0"], "allowed 1 to 1000"),
        (["--steps", "0"], "allowed 1 to 1000"),
        (["--stack", "deepspeed"], "no PyTorch program"),
        (["--stack", "none"], "none"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--cluster", "localhost-cpu", "--stack", "ddp", "--out", str(tmp_path / "new")]
    assert main([*base, *words]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_tiny_steps_are_run_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stacks(tmp_path, "here", ("fsdp",), [LAUNCH, ATTENTION], "a test")
    monkeypatch.chdir(Path(__file__).parents[2])
    stacks = ["--stack", "ddp", "--stack", str(tmp_path / "here-fsdp.toml")]
    shapes = ["--shape", "1x64x16x1x2"]
    few = ["--rounds", "1", "--steps", "1", "--out", str(tmp_path / "out")]
    assert main(["--cluster", "localhost-cpu", *stacks, *shapes, *few]) == 0
    rows = table_of(capsys.readouterr().out)
    assert [(row["stack"], row["shape"]) for row in rows] == [
        (stack, shape) for stack in ("ddp@2.13", "fsdp@2.13") for shape in shapes[1::2]
    ]
    assert all(row["quiet steps"].endswith("of 1") for row in rows)
    assert (tmp_path / "out" / "steps.csv").is_file()


@pytest.mark.parametrize("name", list_stacks())
def test_each_stack_has_a_file_for_a_processor(name: str, tmp_path: Path) -> None:
    (path,) = write_stacks(tmp_path, "here", (name,), [LAUNCH, ATTENTION], "a test")
    old, new = load_stack(name), load_stack(path)
    assert path.name == f"here-{name}.toml"
    assert (new.name, new.kernel_gap_s, new.tp_overlap_fraction) == (name, 3e-6, 0.0)
    assert {getattr(new, key) for key in SERIAL if key.startswith("overlap")} == {False}
    assert new.flash_kernel == ("sdpa-fa2" if old.flash_kernel else "")
    assert "measured by a test" in new.fitted_source
    kept = set(type(old).model_fields) - {*SERIAL, "kernel_gap_s", "flash_kernel"}
    changed = {key for key in kept if getattr(old, key) != getattr(new, key)}
    assert changed == {"title", "fitted_source"}


def test_a_stack_without_rows_keeps_its_gap_and_its_kernel() -> None:
    text = stack_toml("fsdp", [], "a test")
    assert 'kernel_gap = "14 us"' in text
    assert 'flash_kernel = "fa2-2023"' in text


def test_stacks_of_a_calibration_are_checked() -> None:
    assert check_stacks(("ddp", "fsdp"), Accelerator.CPU) == ("ddp", "fsdp")
    with pytest.raises(PlanError, match="no effect without --device cpu"):
        check_stacks(("ddp",), Accelerator.CUDA)
    with pytest.raises(PlanError, match="stands twice"):
        check_stacks(("ddp", "ddp"), Accelerator.CPU)
    with pytest.raises(ProfileError, match="dddp"):
        check_stacks(("dddp",), Accelerator.CPU)


def test_a_file_is_no_stack_to_calibrate(tmp_path: Path) -> None:
    (path,) = write_stacks(tmp_path, "here", ("ddp",), [LAUNCH], "a test")
    with pytest.raises(PlanError, match="is a file"):
        check_stacks((str(path),), Accelerator.CPU)


@pytest.mark.parametrize("name", ["h100-sxm5-80gb", "cpu-generic"])
def test_constants_of_fp8_are_written_where_a_device_has_them(name: str, tmp_path: Path) -> None:
    device = load_device(name)
    path = tmp_path / "device.toml"
    path.write_text(device_toml(device), encoding="ascii")
    assert load_device(path).gemm == device.gemm
