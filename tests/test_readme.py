"""The README says what the program does today: its commands, tables and library example."""

import re
import shlex
from pathlib import Path

import pytest

import meshwright
from meshwright.hwprofiles import Precision, Recompute, StageSplit, load_cluster, load_stack
from meshwright.simulator import ParallelPlan, TrainingJob, load_model, resolve_stages, simulate
from meshwright.validate.published import scoreboard

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SESSIONS = re.findall(r"```\n\$ meshwright (.*)\n((?:.*\n)*?)```", README)


def test_the_two_set_up_commands_exist() -> None:
    root = Path(__file__).parents[1]
    for command in re.findall(r"^bash (\S+)$", README, flags=re.MULTILINE):
        assert (root / command).is_file()
    gate = (root / ".ci" / "run").read_text(encoding="utf-8")
    assert "bash scripts/test" in gate


@pytest.mark.parametrize(("command", "shown"), SESSIONS, ids=[each[0][:24] for each in SESSIONS])
def test_commands_print_what_the_readme_shows(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    assert meshwright.main(shlex.split(command)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [line.rstrip() for line in shown.splitlines()]


def test_there_are_commands_to_compare() -> None:
    assert [command.split()[0] for command, _ in SESSIONS] == ["search", "simulate"]


def test_the_library_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_table_1_is_what_the_scoreboard_computes() -> None:
    rows = {
        name: (float(predicted), error)
        for name, predicted, error in re.findall(
            r"^\| ([\d.]+B) \|.*\| ([\d.]+) s \| ([-+][\d.]+%) \|$", README, flags=re.MULTILINE
        )
    }
    computed = {
        each.id.rsplit("_", 1)[-1]: each
        for each in scoreboard().comparisons
        if each.id.startswith("narayanan21_t1")
    }
    assert rows.keys() == computed.keys()
    errors = []
    for name, each in computed.items():
        errors.append(each.predicted / each.published - 1)
        assert rows[name] == (round(each.predicted, 2), f"{errors[-1]:+.1%}")
    mean = sum(map(abs, errors)) / len(errors)
    assert mean <= 0.05
    assert f"| mean absolute error | | | | | {mean:.1%} |" in README


def test_the_layout_rows_are_what_the_simulator_computes() -> None:
    for name, batch in (("megatron-1t", 3072), ("gpt3-175b", 1536)):
        model = load_model(name)
        job = TrainingJob(
            model=model, global_batch_size=batch, seq_len=2048, precision=Precision.FP16
        )
        stages = resolve_stages(model, 2048, 64, StageSplit.EVEN)
        plan = ParallelPlan(tp=8, pp=64, dp=6, recompute=Recompute.FULL, stages=stages)
        step = simulate(job, plan, load_cluster("dgx-a100"), load_stack("megatron-lm-2021"))
        shown = f"{step.step_time_s:.1f} s | {step.mfu_fraction:.1%} | {step.bubble_fraction:.1%} |"
        row = rf"^\| {name}, .*pp 64 x dp 6 x tp 8, .*{re.escape(shown)}$"
        assert re.search(row, README, re.MULTILINE)


def test_gpt3_on_1024_gpus_takes_about_34_days() -> None:
    """Narayanan et al. 2021, section 5.1: 34 days for 300 B tokens at 140 TFLOP/s a GPU."""
    job = TrainingJob(
        model=load_model("gpt3-175b"),
        global_batch_size=1536,
        seq_len=2048,
        precision=Precision.FP16,
    )
    plan = ParallelPlan(tp=8, pp=16, dp=8, recompute=Recompute.FULL, stages=(6,) * 16)
    step = simulate(job, plan, load_cluster("dgx-a100"), load_stack("megatron-lm-2021"))
    days = 300e9 / step.tokens_per_s / 86_400
    assert days == pytest.approx(34, rel=0.05)
    assert f"{days:.1f} days at {step.hardware_flops_per_s_per_gpu / 1e12:.0f} TFLOP/s" in README
