"""The command that calibrates: a real small run, going on after a stop, and its refusals."""

import csv
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

import meshwright
from meshwright.hwprofiles import Precision, load_cluster
from meshwright.planner.options.words import as_command, option_name
from meshwright.simulator import PlanError
from meshwright.validate.calibration import Accelerator, CalibrateOptions, run_calibrate
from meshwright.validate.calibration.collectives import bench as collective_bench
from meshwright.validate.calibration.measure import device_bench
from meshwright.validate.calibration.measure.stopwatch import interleaved, measure_batch
from meshwright.validate.calibration.rows.cases import BenchmarkCase, device_cases
from meshwright.validate.calibration.rows.machine import Machine
from meshwright.validate.calibration.rows.row_file import FILE_NAME, RowFile
from meshwright.validate.calibration.rows.rows import CaseGroup, Row, collective

FP32 = Precision.FP32
FEW = [
    BenchmarkCase(CaseGroup.LAUNCH, "add", FP32, (1,)),
    *(
        BenchmarkCase(CaseGroup.GEMM, op, FP32, (64, 256, 128, 1))
        for op in ("forward", "dgrad", "wgrad")
    ),
    BenchmarkCase(CaseGroup.GEMM, "forward", FP32, (256, 256, 256, 1)),
    BenchmarkCase(CaseGroup.GEMM, "batched", FP32, (64, 64, 64, 4)),
    *(BenchmarkCase(CaseGroup.ATTENTION, op, FP32, (4, 64, 64)) for op in ("forward", "backward")),
    *(
        BenchmarkCase(CaseGroup.MEMORY, op, FP32, (64, 256))
        for op in ("add", "norm", "gelu", "silu", "softmax", "dropout")
    ),
    *(
        BenchmarkCase(CaseGroup.OPTIMIZER, op, FP32, (4096,))
        for op in ("adamw fused", "adamw foreach")
    ),
    BenchmarkCase(CaseGroup.COPY, "on device", FP32, (65536,)),
]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "p2p")
FEW_COLLECTIVES = [collective(op, size, 2) for op in OPS for size in (1024, 65536)]


TINY = [FEW[0], FEW[1], FEW[8]]


@pytest.fixture
def _tiny_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_bench, "device_cases", lambda *_: TINY)
    monkeypatch.setattr(device_bench, "BATCH_CASES", 1)


@pytest.fixture
def _few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_bench, "device_cases", lambda *_: FEW)
    monkeypatch.setattr(collective_bench, "collective_cases", lambda _: FEW_COLLECTIVES)


def options_for(folder: Path, **changes: object) -> CalibrateOptions:
    given = {"device": Accelerator.CPU, "out": str(folder)} | changes
    return CalibrateOptions(**given)  # type: ignore[arg-type]


def table(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.slow
@pytest.mark.usefixtures("_few_cases")
def test_a_small_machine_is_calibrated_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert run_calibrate(options_for(folder, ranks=2, name="here")) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert f"{len(FEW)} of {len(FEW)} kernels" in printed
    assert f"{len(FEW_COLLECTIVES)} of {len(FEW_COLLECTIVES)} collectives" in printed
    assert {path.name for path in folder.iterdir()} == {
        *(FILE_NAME, "residuals.csv", "residuals.png"),
        *("here.toml", "here-device.toml", "here-link.toml"),
    }
    assert len(table(folder / FILE_NAME)) == len(FEW) + len(FEW_COLLECTIVES)
    assert len(table(folder / "residuals.csv")) == len(FEW) + len(FEW_COLLECTIVES)
    assert (folder / "residuals.png").read_bytes().startswith(b"\x89PNG")
    cluster = load_cluster(folder / "here.toml")
    assert {fact.op.value for fact in cluster.intra_node.collectives} == set(OPS)
    command = ["simulate", "gpt2", "--cluster", str(folder / "here.toml"), "--gpus", "2"]
    job = ["--global-batch", "4", "--seq-len", "128", "--precision", "fp32", "--stack", "ddp"]
    assert meshwright.main([*command, *job]) == 0


@pytest.mark.usefixtures("_tiny_cases")
def test_a_second_run_measures_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_calibrate(options_for(tmp_path))
    before = (tmp_path / FILE_NAME).read_bytes()
    monkeypatch.setattr(device_bench, "measure_batch", lambda *_: pytest.fail("measured again"))
    assert run_calibrate(options_for(tmp_path)) == 0
    assert (tmp_path / FILE_NAME).read_bytes() == before


@pytest.mark.usefixtures("_tiny_cases")
def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(cases: Sequence[BenchmarkCase], *rest: object) -> list[Row]:
        if TINY[0] not in cases:
            raise KeyboardInterrupt
        return measure_batch(cases, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(device_bench, "measure_batch", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_calibrate(options_for(tmp_path))
    kept = table(tmp_path / FILE_NAME)
    assert 0 < len(kept) < len(TINY)
    assert f"{len(kept)} rows are kept" in capsys.readouterr().err
    monkeypatch.setattr(device_bench, "measure_batch", measure_batch)
    assert run_calibrate(options_for(tmp_path)) == 0
    rows = table(tmp_path / FILE_NAME)
    assert rows[: len(kept)] == kept
    assert len(rows) == len(TINY)


@pytest.mark.usefixtures("_tiny_cases")
def test_ctrl_c_ends_the_command_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> list[Row]:
        raise KeyboardInterrupt

    monkeypatch.setattr(device_bench, "measure_batch", stopped)
    monkeypatch.setattr(
        meshwright, "_command", lambda _name: as_command(run_calibrate, CalibrateOptions)
    )
    assert meshwright.main(["calibrate", "--device", "cpu", "--out", str(tmp_path / "o")]) == 130


@pytest.mark.usefixtures("_tiny_cases")
def test_rows_of_another_machine_are_refused_by_name_and_force_starts_anew(
    tmp_path: Path,
) -> None:
    run_calibrate(options_for(tmp_path))
    path = tmp_path / FILE_NAME
    text = path.read_text(encoding="utf-8")
    line = next(each for each in text.splitlines() if each.startswith("# versions: "))
    path.write_text(text.replace(line, "# versions: PyTorch 1.0"), encoding="utf-8")
    with pytest.raises(
        PlanError, match=r"measured elsewhere: versions PyTorch 1\.0 there, PyTorch"
    ):
        run_calibrate(options_for(tmp_path))
    assert run_calibrate(options_for(tmp_path, force=True)) == 0
    assert line in path.read_text(encoding="utf-8").splitlines()


@pytest.mark.usefixtures("_tiny_cases")
def test_links_in_a_folder_of_rows_are_replaced(tmp_path: Path) -> None:
    folder, target = tmp_path / "out", tmp_path / "elsewhere"
    run_calibrate(options_for(folder))
    names = [each.name for each in folder.iterdir()]
    for force in (True, False):  # begun anew, and gone on with
        for name in names:
            (folder / name).replace(target)
            (folder / name).symlink_to(target)
        before = target.read_bytes()
        assert run_calibrate(options_for(folder, force=force)) == 0
        assert target.read_bytes() == before
        assert not any(each.is_symlink() for each in folder.iterdir())


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(PlanError, match="is not empty; allowed: a new folder, or --force"):
        run_calibrate(options_for(tmp_path))


MACHINE = Machine(
    accelerator=Accelerator.CPU,
    device="a, machine",
    driver="Linux 6",
    versions="PyTorch 2",
    threads=1,
    num_sms=1,
    memory_bytes=2**33,
)


def test_rows_are_read_as_they_were_written_without_a_row_cut_short(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    rows = [Row(case, 1 / 3, 0.1, 2e-9, 9) for case in device_cases(Accelerator.CPU, FP32)]
    file = RowFile.start(path, MACHINE, "2026-01-02")
    file.append(rows)
    with path.open("a", encoding="utf-8") as stream:
        stream.write("gemm,forward,fp32,m=1 n=")
    read = RowFile.load(path)
    assert (read.rows, read.machine, read.date) == (rows, MACHINE, "2026-01-02")
    read.append(rows[:1])
    assert RowFile.load(path).rows == [*rows, rows[0]]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("# meshwright", "# other", "has no head of calibrate"),
        ("# threads: 1", "# threads: many", "has a row that is none"),
        ("# device: a, machine", "#", "has a row that is none"),
        ("m=64", "m=x", "has a row that is none"),
        (",0.5,", ",-0.5,", "a time is not more than 0"),
    ],
)
def test_a_broken_file_of_rows_is_refused(old: str, new: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    RowFile.start(path, MACHINE, "2026-01-02").append([Row(FEW[1], 0.5, 0.5, 0.5, 9)])
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(PlanError, match=says) as caught:
        RowFile.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": None}, "calibrate has nothing to do; allowed: --device cuda or cpu"),
        ({"ranks": 1}, "--ranks 1 is out of range; allowed 2 to 64"),
        ({"budget_seconds": 0.0}, "--budget-seconds 0 is out of range"),
        ({"budget_seconds": math.inf}, "--budget-seconds inf is out of range"),
        ({"name": "../up"}, "--name '../up' is no name; allowed: up to 80 letters"),
        ({"like": "a1000"}, "unknown device 'a1000'; nearest: a100"),
        ({"peak": "3 m"}, "--peak: '3 m' has the wrong unit"),
        ({"peak": "0 TFLOP/s"}, "is nothing; allowed: more than 0"),
        ({"device": None, "trace": ["t"], "ranks": 2}, "--ranks has no effect without --device"),
        ({"device": None, "trace": ["t"], "like": "b200"}, "--like has no effect with --trace"),
        ({"device": None, "nccl_tests": ["n"], "peak": "1 FLOP/s"}, "--peak has no effect without"),
    ],
)
def test_a_mistake_is_one_line(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        run_calibrate(options_for(tmp_path / "out", **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_too_little_for_a_profile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_bench, "device_cases", lambda *_: FEW[:1])
    with pytest.raises(PlanError, match="too little was measured for a profile; allowed: more"):
        run_calibrate(options_for(tmp_path))


def test_without_a_gpu_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(PlanError, match="PyTorch finds no GPU here; allowed: --device cpu"):
        run_calibrate(options_for(tmp_path / "out", device=Accelerator.CUDA))


def test_without_pytorch_the_extra_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("", ".device_bench", ".machine_probe", ".stopwatch", ".kernels"):
        monkeypatch.delitem(
            sys.modules, f"meshwright.validate.calibration.measure{name}", raising=False
        )
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PlanError, match=r'pip install "meshwright\[validate\]"'):
        run_calibrate(options_for(tmp_path / "out"))


def test_the_command_is_known_without_pytorch_or_pictures() -> None:
    code = (
        "import sys, meshwright.validate.calibration; "
        "sys.exit(len({'torch', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_document_tells_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "calibrate.md").read_text(encoding="utf-8")
    for field in fields(CalibrateOptions):
        assert f"| `{option_name(field.name)}" in text


def test_options_become_words() -> None:
    seen: list[CalibrateOptions] = []

    def run(options: CalibrateOptions) -> int:
        seen.append(options)
        return 0

    words = ["--device", "cpu", "--ranks", "2", "--nccl-tests", "a", "--nccl-tests", "b"]
    command = as_command(run, CalibrateOptions)
    typed = command.typed(words)
    assert typed is not None
    assert command(typed) == 0
    assert seen[0].device is Accelerator.CPU
    assert (seen[0].ranks, seen[0].nccl_tests) == (2, ["a", "b"])


def test_visits_are_interleaved_and_the_order_changes_with_the_turn() -> None:
    visits: list[BenchmarkCase] = []

    def visit(case: BenchmarkCase) -> float:
        visits.append(case)
        return float(len(visits))

    counts = dict.fromkeys(FEW[1:7], 5) | {FEW[0]: 3}
    times_s = interleaved(counts, 1, visit)
    assert {case: len(each) for case, each in times_s.items()} == counts
    turns = [visits[start : start + 7] for start in (0, 7, 14)]
    assert all(set(turn) == set(counts) for turn in turns)
    assert turns[0] != turns[1]
    again: list[BenchmarkCase] = []
    interleaved(counts, 1, lambda case: again.append(case) or 1.0)  # type: ignore[func-returns-value]
    assert again == visits
    late = interleaved(counts, 1, visit, deadline_s=time.monotonic())
    assert {len(each) for each in late.values()} == {3}


@pytest.mark.slow
def test_each_collective_is_measured_though_starting_the_ranks_took_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [collective(op, size, 2) for size in (1024, 4096, 16384) for op in OPS]
    monkeypatch.setattr(collective_bench, "collective_cases", lambda _: small)
    file = RowFile.start(tmp_path / FILE_NAME, MACHINE, "2026-01-02")
    over_s = time.monotonic()
    done = collective_bench.measure_collectives(file, 2, deadline_s=over_s, progress=None)
    assert done == (12, 15)  # the chunks that hold the first ten
    assert {row.case.op for row in file.rows} == set(OPS)


KILLED = """
import os, sys
from pathlib import Path
from meshwright.planner.options import scratch_folder
with scratch_folder(Path(sys.argv[1])):
    os.kill(os.getpid(), 9)
"""
WAITS = "import time; time.sleep(60)"
WAITS_FOR_OTHERS = "import os, time; time.sleep(60 if os.environ['RANK'] == '0' else 0)"


@pytest.mark.parametrize(
    ("code", "timeout_s", "says"),
    [
        (f"{WAITS_FOR_OTHERS}; raise SystemExit('no room left')", 30.0,
         "--ranks 2: rank 1 ended with status 1: no room left; what was measured is kept"),
        (f"{WAITS_FOR_OTHERS}; os.kill(os.getpid(), 9)", 30.0,
         "--ranks 2: rank 1 was ended by signal 9"),
        (WAITS, 0.5, "--ranks 2: rank 0 has not come forward for 0.5 s"),
    ],
)  # fmt: skip
def test_a_rank_that_dies_or_hangs_is_named_and_scratch_goes(
    code: str, timeout_s: float, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    subprocess.run([sys.executable, "-c", KILLED, scratch], check=False)
    assert len([*scratch.iterdir()]) == 1  # what a killed command leaves
    file = RowFile.start(tmp_path / FILE_NAME, MACHINE, "2026-01-02")
    with pytest.raises(PlanError, match=says):
        collective_bench.measure_collectives(
            file,
            2,
            deadline_s=time.monotonic() + 60,
            progress=None,
            timeout_s=timeout_s,
            worker=(sys.executable, "-c", code),
        )
    assert not [*scratch.iterdir()]
