"""The script that an export for torchrun writes is the plan: counted as one rank, it agrees."""

from pathlib import Path

import pytest

from meshwright import main
from meshwright.planner.reports import json_text, plan_document
from meshwright.validate.cli import plan_of_words

MODEL = """
name = "small"
num_layers = 2
hidden_size = 256
num_heads = 4
vocab_size = 1024
seq_len = 128
"""


@pytest.mark.parametrize("options", ["--stack ddp", "--stack fsdp --dp-shard 4 --recompute full"])
def test_the_script_for_torchrun_counts_as_its_plan(options: str, tmp_path: Path) -> None:
    model, plan, out = (tmp_path / name for name in ("small.toml", "plan.json", "job"))
    model.write_text(MODEL)
    saved = plan_of_words(f"{model} --gpus 8 --global-batch 16 {options}", "dgx-h100")
    plan.write_text(json_text(plan_document(saved)))
    assert main(["export", str(plan), "--to", "torchrun", "--out", str(out)]) == 0
    assert main(["count", "--plan", str(plan), str(out / "train.py")]) == 0
