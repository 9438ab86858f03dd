"""What ``--plan`` supplies, and what options beside it change."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from meshwright import main

pytestmark = pytest.mark.usefixtures("no_pictures")
STEP = ["simulate", "gpt2", "--cluster", "dgx-a100", "--gpus", "16", "--global-batch", "32"]
LAYOUT = ["--tp", "2", "--pp", "2", "--recompute", "full"]


def document(*words: str) -> dict:
    """Return what a command prints as JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*words, "--json", "-"]) == 0
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plan") / "out"
    document(*STEP, *LAYOUT, "--out", str(folder))
    return str(folder / "plan.json")


def test_supplies_everything(plan: str) -> None:
    expected = document(*STEP, *LAYOUT)
    assert document("simulate", "--plan", plan) == expected


def test_gpus_change_the_data_parallel_degree(plan: str) -> None:
    assert document("simulate", "--plan", plan, "--gpus", "32")["plan"]["dp"] == 8


def test_dp_changes_the_number_of_gpus(plan: str) -> None:
    assert document("simulate", "--plan", plan, "--dp", "2")["num_gpus"] == 8


def test_tp_keeps_the_number_of_gpus(plan: str) -> None:
    found = document("simulate", "--plan", plan, "--tp", "4")
    assert (found["num_gpus"], found["plan"]["dp"]) == (16, 2)


def test_pp_gives_new_stages(plan: str) -> None:
    assert document("simulate", "--plan", plan, "--pp", "4")["plan"]["stages"] == [3] * 4


def test_vpp_gives_a_new_schedule(plan: str) -> None:
    plan_fields = document("simulate", "--plan", plan, "--vpp", "2")["plan"]
    assert plan_fields["schedule"] == "interleaved"


def test_model_and_cluster_change(plan: str) -> None:
    words = ["gpt2-medium", "--plan", plan, "--cluster", "dgx-h100", "--global-batch", "64"]
    found = document("simulate", *words)
    assert found["model"]["name"] == "gpt2-medium"
    assert found["cluster"] == "dgx-h100"
    assert found["job"]["global_batch_size"] == 64
    assert found["plan"]["recompute"] == "full"
    assert found["plan"]["stages"] == [12, 12]


def test_changed_facts_are_kept_shown_and_changed_back(plan: str, tmp_path: Path) -> None:
    words = [*STEP, *LAYOUT, "--set", "loss=in-place", "--set", "inter_node.latency=9 us"]
    first = document(*words, "--out", str(tmp_path / "set"))
    assert first["changed_facts"] == {
        "loss": {"value": "in-place", "built_in": "fused"},
        "inter_node.latency_s": {"value": 9e-6, "built_in": 5e-6},
    }
    saved = str(tmp_path / "set" / "plan.json")
    assert document("simulate", "--plan", saved) == first
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        assert main(["simulate", "--plan", saved]) == 0
    assert "set         inter_node.latency = 9 us (built in: 5 us)" in report.getvalue()
    back = ["--set", "loss=fused", "--set", "inter_node.latency=5 us"]
    assert document("simulate", "--plan", saved, *back) == document("simulate", "--plan", plan)


def test_gradient_options_are_kept_and_overridden(tmp_path: Path) -> None:
    words = ["simulate", "gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "32"]
    words += ["--stack", "ddp", "--reduce-precision", "bf16", "--sync-each-microbatch"]
    words += ["--gradient-precision", "fp32"]
    first = document(*words, "--out", str(tmp_path / "ddp"))
    saved = str(tmp_path / "ddp" / "plan.json")
    again = document("simulate", "--plan", saved)
    assert again == first
    kept = ("gradient_precision", "reduce_precision", "sync_each_microbatch")
    assert [again["plan"][field] for field in kept] == ["fp32", "bf16", True]
    off = document("simulate", "--plan", saved, "--no-sync-each-microbatch")
    assert off["plan"]["sync_each_microbatch"] is False
    assert off["step_time_s"] < again["step_time_s"]


def test_offloading_is_kept_and_can_be_taken_back(tmp_path: Path) -> None:
    words = [*STEP, "--stack", "torchtitan@0.2", "--offload", "parameters"]
    expected = document(*words, "--out", str(tmp_path / "out"))
    saved = str(tmp_path / "out" / "plan.json")
    assert document("simulate", "--plan", saved) == expected
    assert expected["plan"]["offload"] == "parameters"
    assert 0 < expected["memory"]["host_bytes"] < expected["memory"]["host_capacity_bytes"]
    plain = document("simulate", "--plan", saved, "--offload", "none")
    assert "host_bytes" not in plain["memory"]
    assert plain["step_time_s"] < expected["step_time_s"]
