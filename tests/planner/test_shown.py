"""Results tell themselves in Python as their commands write them."""

import csv
import io
import json
from pathlib import Path

import pytest

from meshwright import PlanError, main
from meshwright.hwprofiles import load_cluster, load_stack
from meshwright.planner import SpaceLimits
from meshwright.planner.compare import Comparison
from meshwright.planner.search import search
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model, simulate

KNOWN = ["model", "cluster", "stack", "num_gpus", "global_batch_size", "seq_len", "precision"]
JOB = TrainingJob(model=load_model("gpt2"), global_batch_size=16, seq_len=1024)
PLACE = load_cluster("dgx-a100"), load_stack("megatron-core")
WORDS = ["gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "16", "--tp", "2"]


def headers(folder: Path) -> dict[str, list[str]]:
    return {
        path.name: next(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))
        for path in folder.glob("*.csv")
    }


def test_a_search_is_told_as_its_command_writes_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert main(["search", *WORDS, "--pp", "1", "--top", "3", "--out", str(folder)]) == 0
    found = search(JOB, *PLACE, 8, limits=SpaceLimits(tp=(2,), pp=(1,)), top=3)
    assert json.loads(json.dumps(found.to_dict())) == json.loads(
        (folder / "result.json").read_text(encoding="utf-8")
    )
    frame = found.to_frame()
    with (folder / "plans.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(frame) == list(rows[0])
    assert list(frame["step_time_s"]) == [float(row["step_time_s"]) for row in rows]
    assert found.plot()._repr_png_() == (folder / "memory_time.png").read_bytes()
    for kind in ("timeline", "breakdown", "stage_memory"):
        drawn = found.plot(kind)._repr_png_()
        assert drawn == (folder / f"{kind}.png").read_bytes()
    assert found.plans[0].plot()._repr_png_() == (folder / "timeline.png").read_bytes()
    kinds = "timeline, breakdown, stage_memory"
    with pytest.raises(PlanError, match=f"no picture 'timline' of it; allowed: {kinds}$"):
        found.plans[0].plot("timline")
    with pytest.raises(PlanError, match=f"no picture 'x' of it; allowed: memory_time, {kinds}$"):
        found.plot("x")


def test_every_table_has_what_tables_are_joined_by(tmp_path: Path) -> None:
    step, comparison = tmp_path / "step", tmp_path / "comparison"
    assert main(["simulate", *WORDS, "--out", str(step)]) == 0
    plan = str(step / "plan.json")
    words = ["compare", plan, plan, "--out", str(comparison)]
    assert main(words) == 0
    found = headers(step) | headers(comparison)
    assert sorted(found) == ["plans.csv", "stages.csv", "terms.csv"]
    for header in found.values():
        assert header[: len(KNOWN) + 1] == ["plan", *KNOWN]


def test_terms_of_a_comparison_add_up_in_its_frame() -> None:
    plans = [ResolvedPlan(tp=tp, dp=8 // tp, zero_stage=1, stages=(12,)) for tp in (1, 2)]
    steps = tuple(simulate(JOB, plan, *PLACE) for plan in plans)
    comparison = Comparison(names=("one", "two"), steps=steps)
    with pytest.raises(PlanError, match="no picture 'timeline' of it; allowed: breakdown"):
        comparison.plot("timeline")
    frame = comparison.to_frame()
    sums = frame.groupby(["plan", "unit"])["value"].sum()
    for name, step in zip(("one", "two"), steps, strict=True):
        assert sums[name, "s"] == pytest.approx(step.step_time_s, rel=1e-12)
        assert sums[name, "bytes"] == step.memory.device_bytes
