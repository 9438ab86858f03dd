"""``meshwright.validate.gpu_check``: its plans, its tables, what it keeps, on a processor."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwright.hwprofiles import load_cluster, load_device
from meshwright.planner.reports.documents import json_text
from meshwright.planner.reports.plan_file import plan_document, read_plan
from meshwright.simulator import simulate
from meshwright.validate import gpu_check
from meshwright.validate.calibration.rows.machine import Accelerator
from meshwright.validate.comparison.checks import PEAK, CheckUnit
from meshwright.validate.gpu_check import GpuPlan, GpuSetting, load_gpu_plans, main, saved_plan
from meshwright.validate.gpu_rows import REQUESTED, STEP_TIME, CheckedRow, page
from meshwright.validate.ranks.prediction import pipeline_rank

MODEL = """
name = "tiny-gpt"
num_layers = 4
hidden_size = 64
num_heads = 4
vocab_size = 512
seq_len = 64
"""
H200 = load_device("h200-sxm")
# Kernels' own memory, workspaces and the rounding of blocks come on top of what is predicted.
MOST_SHARE = 0.85


def setting(out: Path, **changes: object) -> GpuSetting:
    usual = GpuSetting(
        accelerator=Accelerator.CUDA, out=out, cluster="dgx-h200", device=None, steps=2, limit_s=300
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


@pytest.fixture
def plans(tmp_path: Path) -> Path:
    """Return a file of a step, a stage, and a plan that no program stands for."""
    model = tmp_path / "tiny.toml"
    model.write_text(MODEL, encoding="utf-8")
    lines = [
        "name,kind,rank,options",
        f"tiny step,step,0,{model} --gpus 1 --global-batch 4 --stack ddp --precision fp32",
        f"tiny stage,probe,1,{model} --gpus 2 --pp 2 --global-batch 8 --precision fp32",
        f"none,step,0,{model} --gpus 1 --global-batch 4 --stack zero-broadcast --precision fp32",
    ]
    path = tmp_path / "plans.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("plan", load_gpu_plans(), ids=lambda plan: plan.folder)
def test_a_plan_fits_the_gpu_that_it_is_for(plan: GpuPlan, tmp_path: Path) -> None:
    saved = saved_plan(plan, setting(tmp_path))
    memory = simulate(saved.job, saved.plan, saved.cluster, saved.stack).memory
    held = memory.by_stage[pipeline_rank(saved.plan, plan.rank)]
    assert held.peak_bytes < MOST_SHARE * H200.memory_capacity_bytes


def test_there_are_twelve_steps_and_four_stages_or_more() -> None:
    kinds = [plan.kind for plan in load_gpu_plans()]
    assert kinds.count("step") >= 12
    assert kinds.count("probe") >= 4
    assert len({plan.folder for plan in load_gpu_plans()}) == len(kinds)


def test_the_prediction_is_for_the_calibrated_device_and_the_programs_attention(
    tmp_path: Path,
) -> None:
    device = H200.model_copy(update={"name": "mine-device", "num_sms": 131})
    plan = next(plan for plan in load_gpu_plans() if plan.kind == "probe")
    saved = saved_plan(plan, setting(tmp_path, device=device))
    file = tmp_path / "plan.json"
    file.write_text(json_text(plan_document(saved)), encoding="utf-8")
    read = read_plan(file)
    assert read == saved
    assert read.cluster.device.num_sms == 131
    assert read.cluster.intra_node == load_cluster("dgx-h200").intra_node
    assert read.stack.flash_kernel == "sdpa-fa2"


def run(plans: Path, out: Path, *words: str) -> int:
    return main(["--plans", str(plans), "--out", str(out), "--device", "cpu", *words])


def quantities(out: Path) -> list[tuple[str, str]]:
    with (out / "gpu_check.csv").open(encoding="utf-8", newline="") as stream:
        return [(row["plan"], row["quantity"]) for row in csv.DictReader(stream)]


@pytest.mark.slow
def test_steps_and_stages_are_run_kept_and_shown(
    plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert run(plans, out, "--steps", "2") == 1
    printed = capsys.readouterr().out
    reason = "failed: error: stack zero-broadcast@2019 has no PyTorch program; "
    assert f"none: {reason}" in printed
    found = quantities(out)
    assert ("tiny step", f"{STEP_TIME} of 2 steps") in found
    assert ("tiny stage", "virtual stage 0: backward") in found
    assert {name for name, quantity in found if quantity == PEAK} == {"tiny step", "tiny stage"}
    text = (out / "gpu_check.md").read_text(encoding="utf-8")
    assert "| tiny step | ddp@2.13 | tiny-gpt | 4 x 64 | 1 |" in text
    assert "| tiny stage | megatron-core@0.18 | tiny-gpt | 1 x 2 x 1 | 1 | optimizer step |" in text
    assert "torch 2." in text
    assert f"- none: {reason.removeprefix('failed: ')}" in text

    def again(*_: object) -> str:
        pytest.fail("measured again")

    monkeypatch.setattr(gpu_check, "_run", again)
    assert run(plans, out, "tiny stage") == 0
    assert [each for each in quantities(out) if each[0] != "none"] == [
        each for each in found if each[0] != "none"
    ]


def test_a_plan_that_takes_too_long_is_ended(plans: Path, tmp_path: Path) -> None:
    assert run(plans, tmp_path / "out", "tiny step", "--limit-seconds", "0.1") == 1
    assert "took longer than 0.1 s" in (tmp_path / "out" / "gpu_check.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("line", "words", "says"),
    [
        ("", ["tiny"], "error: unknown plan 'tiny'; nearest: tiny "),
        ("a,step,0,gpt2 --gpus 2 --global-batch 2", [], "plan a: steps need --gpus 1, not 2"),
        ("a/b,step,0,gpt2 --gpus 1 --global-batch 2", [], "name: 'a/b'"),
        ("a,walk,0,gpt2 --gpus 1 --global-batch 2", [], "kind: 'walk'"),
        ("", ["--profile", "none.toml"], "none.toml"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(
    line: str, words: Sequence[str], says: str, plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with plans.open("a", encoding="utf-8") as stream:
        stream.write(line)
    assert run(plans, plans.parent / "out", *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not (plans.parent / "out").exists()


def test_the_page_shows_what_the_allocator_held_and_errors_of_the_prediction() -> None:
    row = CheckedRow(plan="a", rank=0, measured_on="2026-11-21", device="GPU", versions="torch 2")
    rows = [
        replace(
            row,
            quantity=f"{STEP_TIME} of 5 steps",
            unit=CheckUnit.SECONDS,
            predicted=0.9,
            measured=1.0,
        ),
        replace(row, quantity=PEAK, unit=CheckUnit.BYTES, predicted=2**30, measured=2**30),
        replace(row, quantity=REQUESTED, unit=CheckUnit.BYTES, predicted=2**30, measured=2**31),
    ]
    lines = page(rows).splitlines()
    assert "Measured 2026-11-21 on GPU; torch 2." in lines
    values = "900.00 ms | 1000.00 ms | -10.0% | 1.000 GiB | 1.000 GiB | +0.00% | 2.000 GiB | -50.0%"
    assert f"| a |  |  |  | 0 | {values} |" in lines
