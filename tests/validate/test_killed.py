"""A kill -9 at some moment: nobody runs on, the same command again ends as if nothing had been."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from killing.processes import MARK, left_running, marked

LONG_S = 60.0
STEP = ["simulate", "gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "16"]
COMMAND = ["-m", "meshwright"]
# Few kernels; the second never ends in a first run.
CALIBRATE = """
import sys, time
from meshwright import main
from meshwright.hwprofiles import Precision
from meshwright.validate.calibration.measure import device_bench
from meshwright.validate.calibration.measure.stopwatch import measure_batch
from meshwright.validate.calibration.rows.cases import BenchmarkCase
from meshwright.validate.calibration.rows.rows import CaseGroup
cases = [
    BenchmarkCase(CaseGroup.LAUNCH, "add", Precision.FP32, (1,)),
    BenchmarkCase(CaseGroup.GEMM, "forward", Precision.FP32, (64, 256, 128, 1)),
    BenchmarkCase(CaseGroup.MEMORY, "add", Precision.FP32, (64, 256)),
]
def measured(batch, *rest):
    if cases[0] not in batch and sys.argv[2] == "first":
        time.sleep(600)
    return measure_batch(batch, *rest)
device_bench.device_cases, device_bench.BATCH_CASES = (lambda *_: cases), 1
device_bench.measure_batch = measured
sys.exit(main(["calibrate", "--device", "cpu", "--out", sys.argv[1]]))
"""


def killed(words: list[str], mark: str, moment: Callable[[], bool]) -> None:
    """Kill a command at the *moment*; fail unless all it started has ended soon after."""
    environment = {**os.environ, MARK: mark}
    with subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.DEVNULL
    ) as command:
        until = time.monotonic() + LONG_S
        while not moment() and time.monotonic() < until:
            assert command.poll() is None
            time.sleep(0.005)
        command.kill()
    assert left_running(lambda: marked(mark), 5) == []


def test_a_folder_of_results_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    words = [*COMMAND, *STEP, "--out"]
    subprocess.run([sys.executable, *words, tmp_path / "usual"], check=True, capture_output=True)
    killed(
        [*words, str(tmp_path / "out")],
        "results",
        lambda: any(tmp_path.glob(".meshwright-*/files/*.json")),
    )
    assert any(tmp_path.glob(".meshwright-*/files"))
    assert not (tmp_path / "out").exists()
    subprocess.run([sys.executable, *words, tmp_path / "out"], check=True, capture_output=True)
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "usual").iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "usual"]


def test_a_calibration_loses_no_row(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "out" / "measurements.csv"

    def rows() -> list[str]:
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if not line.startswith("#")][1:]

    words = ["-c", CALIBRATE, str(tmp_path / "out")]
    killed([*words, "first"], "calibration", lambda: bool(rows()))
    kept = rows()
    assert len(kept) == 1
    subprocess.run([sys.executable, *words, "second"], check=True, capture_output=True)
    assert rows()[:1] == kept
    assert len(rows()) == 3
