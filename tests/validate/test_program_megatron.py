"""Megatron's program trained on real processes: every layout loses what one process does."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hwprofiles import Attention, Precision, Recompute
from simulator import ModelSpec, ParallelPlan, TrainingJob
from validate.program.reference import reference_losses

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 3
GPT = ModelSpec(
    name="tiny-gpt", num_layers=4, hidden_size=32, num_heads=4, vocab_size=256, seq_len=16
)
LLAMA = ModelSpec(
    name="tiny-llama",
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=64,
    vocab_size=256,
    seq_len=16,
    gated_mlp=True,
    tied_embeddings=False,
    positions="rotary",
    norm="rmsnorm",
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    dropout=False,
)
MODELS = {
    "gpt": GPT,
    "gpt-untied": GPT.model_copy(update={"tied_embeddings": False}),
    "llama": LLAMA,
    "llama-tied": LLAMA.model_copy(update={"tied_embeddings": True}),
}
UNFUSED, FLASH = Attention.UNFUSED, Attention.FLASH
HYBRID = ParallelPlan(
    tp=2, pp=2, dp=2, stages=(2, 2), zero_stage=1, sequence_parallel=True, attention=FLASH
)
INTERLEAVED = ParallelPlan(
    pp=2, num_virtual_stages=2, schedule="interleaved", stages=(1, 1, 1, 1), attention=FLASH
)
# Name: model, plan, stack.
CASES: dict[str, tuple[str, ParallelPlan, str]] = {
    "one": ("gpt", ParallelPlan(stages=(4,), attention=FLASH), "megatron-core"),
    "one unfused 2021": ("gpt", ParallelPlan(stages=(4,)), "megatron-lm-2021"),
    "one selective": (
        "llama",
        ParallelPlan(stages=(4,), recompute=Recompute.SELECTIVE),
        "megatron-lm-2022",
    ),
    "tp2": ("gpt", ParallelPlan(tp=2, stages=(4,), attention=FLASH), "megatron-core"),
    "tp2 2021 full": (
        "gpt",
        ParallelPlan(tp=2, stages=(4,), recompute=Recompute.FULL, microbatch_size=2),
        "megatron-lm-2021",
    ),
    "tp2 sp": (
        "gpt",
        ParallelPlan(tp=2, stages=(4,), sequence_parallel=True, attention=FLASH),
        "megatron-core",
    ),
    "tp2 sp llama": (
        "llama",
        ParallelPlan(tp=2, stages=(4,), sequence_parallel=True, attention=FLASH),
        "megatron-core",
    ),
    "tp2 sp selective 2022": (
        "gpt-untied",
        ParallelPlan(tp=2, stages=(4,), sequence_parallel=True, recompute=Recompute.SELECTIVE),
        "megatron-lm-2022",
    ),
    "tp2 sp full": (
        "llama-tied",
        ParallelPlan(tp=2, stages=(4,), sequence_parallel=True, recompute=Recompute.FULL),
        "megatron-core",
    ),
    "pp2 gpipe": (
        "gpt",
        ParallelPlan(pp=2, stages=(2, 2), schedule="gpipe"),
        "megatron-lm-2021",
    ),
    "pp2 uneven": ("llama", ParallelPlan(pp=2, stages=(3, 1), attention=FLASH), "megatron-core"),
    "pp2 interleaved": ("gpt", INTERLEAVED, "megatron-core"),
    "pp2 interleaved llama": (
        "llama-tied",
        replace(INTERLEAVED, recompute=Recompute.FULL),
        "megatron-core",
    ),
    "dp2 2021": ("gpt", ParallelPlan(dp=2, stages=(4,)), "megatron-lm-2021"),
    "dp2": ("gpt", ParallelPlan(dp=2, stages=(4,), attention=FLASH), "megatron-core"),
    "dp2 zero": (
        "gpt-untied",
        ParallelPlan(dp=2, stages=(4,), zero_stage=1, attention=FLASH),
        "megatron-core",
    ),
    "dp2 zero 2022": ("llama", ParallelPlan(dp=2, stages=(4,), zero_stage=1), "megatron-lm-2022"),
    "tp2 pp2": ("gpt", ParallelPlan(tp=2, pp=2, stages=(2, 2)), "megatron-lm-2021"),
    "tp2 pp2 interleaved sp": (
        "gpt",
        replace(INTERLEAVED, tp=2, sequence_parallel=True),
        "megatron-core",
    ),
    "pp4": ("llama-tied", ParallelPlan(pp=4, stages=(1, 1, 1, 1)), "megatron-lm-2022"),
    "hybrid": ("gpt", HYBRID, "megatron-core"),
    "hybrid llama": ("llama", HYBRID, "megatron-core"),
    "hybrid 2021": (
        "gpt-untied",
        ParallelPlan(tp=2, pp=2, dp=2, stages=(2, 2), recompute=Recompute.FULL),
        "megatron-lm-2021",
    ),
}
# Other number formats and dropout: they train, near the same losses.
NEAR: dict[str, tuple[str, ParallelPlan, str, Precision, float]] = {
    f"{precision} {stack}": ("gpt", plan, stack, precision, dropout)
    for stack, plan, precision, dropout in (
        ("megatron-core", HYBRID, Precision.BF16, 0.0),
        ("megatron-lm-2022", replace(HYBRID, attention=UNFUSED, zero_stage=0), Precision.FP16, 0.0),
        (
            "megatron-lm-2021",
            ParallelPlan(tp=2, pp=2, dp=2, stages=(2, 2), recompute=Recompute.FULL),
            Precision.FP16,
            0.0,
        ),
        ("megatron-lm-2022", replace(HYBRID, attention=UNFUSED), Precision.FP32, 0.1),
    )
}


def job_of(model: str, precision: Precision = Precision.FP32) -> TrainingJob:
    return TrainingJob(model=MODELS[model], global_batch_size=8, seq_len=16, precision=precision)


@cache
def reference(model: str) -> list[float]:
    return reference_losses(job_of(model), NUM_STEPS)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("megatron")
    cases = [
        (name, job_of(model), plan, stack, 0.0) for name, (model, plan, stack) in CASES.items()
    ] + [
        (name, job_of(model, precision), plan, stack, dropout)
        for name, (model, plan, stack, precision, dropout) in NEAR.items()
    ]
    (folder / "cases").write_bytes(pickle.dumps(cases))
    script = Path(__file__).with_name("megatron_ranks.py")
    run = subprocess.run(
        [sys.executable, "-W", "error", script, folder / "cases", folder / "result.json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-8000:]
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_layout_loses_what_one_process_does(
    name: str, losses: dict[str, list[float]]
) -> None:
    assert losses[name] == pytest.approx(reference(CASES[name][0]), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR)
def test_other_formats_and_dropout_train_alike(name: str, losses: dict[str, list[float]]) -> None:
    assert losses[name] == pytest.approx(reference(NEAR[name][0]), abs=0.05)
