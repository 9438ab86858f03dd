"""Plans as configurations of frameworks: there and back, and what is refused."""

import json
from pathlib import Path

import pytest

from meshwright import main
from meshwright.planner.export import FRAMEWORKS

CLUSTER = ["--cluster", "dgx-h100"]
LLAMA = ["llama3-8b", *CLUSTER, "--global-batch", "64", "--seq-len", "4096"]
TITAN = [*LLAMA, "--stack", "torchtitan"]
# Plans by framework: options of simulate, and what an import has to be told.
PLANS: dict[str, list[tuple[list[str], list[str]]]] = {
    "torchtitan": [
        ([*TITAN, "--gpus", "8"], []),
        ([*TITAN, "--gpus", "16", "--dp-shard", "8", "--recompute", "full"], []),
        ([*TITAN, "--gpus", "16", "--tp", "8", "--sequence-parallel", "--micro-batch", "4"], []),
        ([*TITAN, "--gpus", "16", "--recompute", "selective-op", "--precision", "fp32"], []),
        ([*TITAN, "--gpus", "64", "--tp", "2", "--pp", "4", "--sequence-parallel"], []),
        ([*TITAN, "--gpus", "16", "--pp", "2", "--vpp", "2", "--stages", "7,9,8,8"], []),
        ([*TITAN, "--gpus", "8", "--pp", "4", "--schedule", "gpipe", "--micro-batch", "2"], []),
        ([*TITAN, "--gpus", "8", "--offload", "parameters", "--no-reshard-after-forward"], []),
        ([*TITAN, "--gpus", "8", "--precision", "fp8", "--set", "kernels=eager"], []),
    ],
}
ROUNDS = [
    pytest.param(name, words, told, id=f"{name}-{number}")
    for name, plans in PLANS.items()
    for number, (words, told) in enumerate(plans)
]


def made_plan(words: list[str], folder: Path) -> Path:
    """Return the plan file of options of simulate."""
    assert main(["simulate", *words, "--out", str(folder / "plan"), "--force"]) == 0
    return folder / "plan" / "plan.json"


@pytest.mark.parametrize(("name", "words", "told"), ROUNDS)
def test_a_plan_comes_back_from_a_framework_as_it_was(
    name: str, words: list[str], told: list[str], tmp_path: Path
) -> None:
    plan, out, again = made_plan(words, tmp_path), tmp_path / "out", tmp_path / "again.json"
    for version in FRAMEWORKS[name].versions or (None,):
        chosen = [] if version is None else ["--framework-version", version]
        if version == "0.3" and "fp8" in words:
            continue
        assert main(["export", str(plan), "--to", name, *chosen, "--out", str(out)]) == 0
        source = ["--from", name, *CLUSTER, *told]
        assert main(["import", str(out), *source, "--out", str(again)]) == 0
        assert json.loads(again.read_text()) == json.loads(plan.read_text())


def test_every_framework_is_tried_with_six_plans() -> None:
    assert {name: len(plans) >= 6 for name, plans in PLANS.items()} == {
        name: True for name, framework in FRAMEWORKS.items() if framework.read is not None
    }
