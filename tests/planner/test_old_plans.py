"""Plan files and names of stacks of before still mean the same: their fields were null by default.

`tests/golden/plans` holds what version 0.1.0 wrote at 4aa8236, with its step times and peaks.
"""

import csv
from pathlib import Path

import pytest

from meshwright.planner.reports import plan_document, read_plan
from meshwright.simulator import simulate

FOLDER = Path(__file__).parents[1] / "golden" / "plans"
with (FOLDER / "steps.csv").open(encoding="utf-8") as file:
    STEPS = {row["plan"]: row for row in csv.DictReader(file)}


def test_every_plan_of_the_folder_has_its_step() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == STEPS.keys()


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_file_of_before_is_the_same_step(name: str) -> None:
    saved = read_plan(FOLDER / f"{name}.json")
    result = simulate(saved.job, saved.plan, saved.cluster, saved.stack)
    assert result.step_time_s == float(STEPS[name]["step_time_s"])
    assert result.memory.peak_bytes == int(STEPS[name]["peak_bytes"])
    plan = plan_document(saved)["plan"]
    assert isinstance(plan, dict)
    of_mesh = name != "servers"
    for field in ("dp_shard", *(("gradient_precision", "sync_each_microbatch") if of_mesh else ())):
        assert plan[field] is not None
