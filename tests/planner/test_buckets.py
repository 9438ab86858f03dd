"""Gradient buckets: small ones pay start-up times, large ones are exposed at the end."""

import json
from pathlib import Path

import pytest
from words_said import said_once

import meshwright

DDP = ["simulate", "gpt2-xl", "--cluster", "a100-4xhdr200", "--gpus", "64", "--global-batch", "64"]
DDP += ["--stack", "ddp"]
# One layer of GPT-2 XL has 123 MB of fp32 gradients, the model 6.2 GB.
SIZES_MB = [1, 150, 400, 1000, 2000, 4000, 8000]


def step_time_s(folder: Path, *options: str) -> float:
    document = folder / "step.json"
    assert meshwright.main([*DDP, *options, "--json", str(document)]) == 0
    return float(json.loads(document.read_text(encoding="utf-8"))["step_time_s"])


@pytest.mark.usefixtures("no_pictures")
def test_bucket_sizes_have_an_interior_minimum_and_the_plan_file_keeps_them(tmp_path: Path) -> None:
    """One bucket hides nothing; many small ones hide all but the last."""
    times = [step_time_s(tmp_path, "--bucket-size", f"{size} MB") for size in SIZES_MB]
    assert max(times) == times[-1]
    assert min(times) < 0.9 * times[-1]
    assert min(times) not in (times[0], times[-1])
    out = tmp_path / "out"
    step_time_s(tmp_path, "--bucket-size", "1000 MB", "--out", str(out))
    again = tmp_path / "again.json"
    assert (
        meshwright.main(["simulate", "--plan", str(out / "plan.json"), "--json", str(again)]) == 0
    )
    data = json.loads(again.read_text(encoding="utf-8"))
    assert data["step_time_s"] == times[SIZES_MB.index(1000)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--bucket-size", "25"], "has no unit"),
        (["--bucket-size", "1 B"], "holds no gradient"),
        (["--bucket-size", "25 MB", "--stack", "megatron-lm-2021"], "not offered by stack"),
    ],
)
def test_a_bucket_size_that_means_nothing_is_refused(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meshwright.main(said_once([*DDP, *options])) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
