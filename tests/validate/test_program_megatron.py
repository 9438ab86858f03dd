"""Megatron's program trained on real processes: every layout learns what one process does."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

from meshwright.hwprofiles import Attention, ContextParallel, Precision, Recompute  # noqa: E402
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob  # noqa: E402
from meshwright.simulator.model import Experts, LatentAttention  # noqa: E402
from meshwright.validate.programs.contract.weights import token_batch  # noqa: E402
from meshwright.validate.programs.layers import Ends, LayerOptions, VirtualStage  # noqa: E402
from meshwright.validate.programs.pytorch.parts import (  # noqa: E402
    initialise_whole,
    plain_parts,
    tie_embeddings,
)
from meshwright.validate.programs.pytorch.reference import reference_losses  # noqa: E402

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
EXPERTS = Experts(num_experts=8, experts_per_token=2, hidden_size=16)
# A gate weighs what shared experts make (Qwen2-MoE).
QWEN = LLAMA.model_copy(
    update={"experts": EXPERTS.model_copy(update={"shared_hidden_size": 24, "shared_gate": True})}
)
# Norms of wide heads (Qwen3).
HEADS = LLAMA.model_copy(update={"qk_norm": "head", "head_dim": 16})
# Sigmoid scores, shared experts beside routed ones, a dense layer first (DeepSeek-V3).
MIXED = HEADS.model_copy(
    update={
        "experts": EXPERTS.model_copy(
            update={"scores": "sigmoid", "shared_hidden_size": 24, "first_dense_layers": 1}
        )
    }
)
# The same with latent attention and routing biases.
DEEPSEEK = MIXED.model_copy(
    update={
        "qk_norm": "none",
        "head_dim": 8,
        "num_kv_heads": 4,
        "latent": LatentAttention(
            query_rank=12, kv_rank=8, plain_head_dim=6, rotary_head_dim=4, value_head_dim=8
        ),
        "experts": MIXED.experts.model_copy(update={"routing_bias": True}),
    }
)
MODELS = {
    "deepseek": DEEPSEEK,
    "qwen": QWEN,
    "mixed": MIXED,
    "gpt": GPT,
    "gpt-untied": GPT.model_copy(update={"tied_embeddings": False}),
    "llama": LLAMA,
    "llama-tied": LLAMA.model_copy(update={"tied_embeddings": True}),
    "sinks": LLAMA.model_copy(
        update={
            "tied_embeddings": True,
            "attention_sinks": True,
            "window": 5,
            "layer_pattern": "WF",
        }
    ),
}
UNFUSED, FLASH = Attention.UNFUSED, Attention.FLASH
HYBRID = ResolvedPlan(
    tp=2, pp=2, dp=2, stages=(2, 2), zero_stage=1, sequence_parallel=True, attention=FLASH
)
INTERLEAVED = ResolvedPlan(
    pp=2, num_virtual_stages=2, schedule="interleaved", stages=(1, 1, 1, 1), attention=FLASH
)
# Name: model, plan, stack. What test_agreement_gloo.py trains beside another way is not here.
CASES: dict[str, tuple[str, ResolvedPlan, str]] = {
    "one unfused 2021": ("gpt", ResolvedPlan(stages=(4,)), "megatron-lm-2021"),
    "one selective": (
        "llama",
        ResolvedPlan(stages=(4,), recompute=Recompute.SELECTIVE, microbatch_size=2),
        "megatron-lm-2022",
    ),
    "tp2 2021 full": (
        "gpt",
        ResolvedPlan(tp=2, stages=(4,), recompute=Recompute.FULL, microbatch_size=2),
        "megatron-lm-2021",
    ),
    "deepseek": ("deepseek", replace(HYBRID, ep=4, etp=1), "megatron-core"),
    "tp2 sp full": (
        "llama-tied",
        ResolvedPlan(
            tp=2, stages=(4,), sequence_parallel=True, recompute=Recompute.FULL, microbatch_size=2
        ),
        "megatron-core",
    ),
    "pp2 uneven": ("llama", ResolvedPlan(pp=2, stages=(3, 1), attention=FLASH), "megatron-core"),
    "pp2 interleaved llama": (
        "llama-tied",
        replace(INTERLEAVED, recompute=Recompute.FULL),
        "megatron-core",
    ),
    "dp2 zero 2022": ("llama", ResolvedPlan(dp=2, stages=(4,), zero_stage=1), "megatron-lm-2022"),
    "tp2 pp2 interleaved sp": (
        "gpt",
        replace(INTERLEAVED, tp=2, sequence_parallel=True),
        "megatron-core",
    ),
    "pp2 dp2 interleaved zero": (
        "gpt",
        replace(INTERLEAVED, dp=2, zero_stage=1),
        "megatron-core",
    ),
    "pp4": ("llama-tied", ResolvedPlan(pp=4, stages=(1, 1, 1, 1)), "megatron-lm-2022"),
    "cp2 tp2 sp ring": (
        "gpt",
        replace(HYBRID, pp=1, cp=2, stages=(4,), cp_type=ContextParallel.RING),
        "megatron-core",
    ),
    "cp4 ring full": (
        "llama",
        ResolvedPlan(
            cp=4, stages=(4,), attention=FLASH, recompute=Recompute.FULL, microbatch_size=2
        ),
        "megatron-core",
    ),
    "cp2 pp2 all-to-all": (
        "sinks",
        ResolvedPlan(
            cp=2,
            pp=2,
            dp=2,
            stages=(2, 2),
            zero_stage=0,  # each rank has all gradients
            attention=FLASH,
            cp_type=ContextParallel.ALL_TO_ALL,
        ),
        "megatron-core",
    ),
    "cp2 tp2 gathered": (
        "llama",
        replace(HYBRID, pp=1, cp=2, stages=(4,), cp_type=ContextParallel.ALL_GATHER),
        "megatron-core",
    ),
    "cp4 ring of swaps": (
        "gpt",
        ResolvedPlan(
            cp=4,
            cp_inner=2,
            cp_type=ContextParallel.HYBRID_RING,
            microbatch_size=2,
            stages=(4,),
            zero_stage=1,
            attention=FLASH,
        ),
        "megatron-core",
    ),
    "ep2 dp4": (
        "mixed",
        ResolvedPlan(dp=4, ep=2, stages=(4,), zero_stage=1, recompute=Recompute.FULL),
        "megatron-core",
    ),
    "ep2 etp2": (
        "qwen",
        replace(HYBRID, ep=2, etp=2, recompute=Recompute.SELECTIVE),
        "megatron-core",
    ),
    "tp2 experts": ("mixed", replace(HYBRID, dp=1), "megatron-core"),
    "hybrid 2021": (
        "gpt-untied",
        ResolvedPlan(tp=2, pp=2, stages=(2, 2), recompute=Recompute.FULL),
        "megatron-lm-2021",
    ),
}
# Other number formats and dropout: they train, near the same losses.
NEAR: dict[str, tuple[str, ResolvedPlan, str, Precision, float]] = {
    f"{precision} {stack}": ("gpt", plan, stack, precision, dropout)
    for stack, plan, precision, dropout in (
        ("megatron-core", HYBRID, Precision.BF16, 0.0),
        (
            "megatron-lm-2022",
            replace(HYBRID, pp=1, stages=(4,), attention=UNFUSED, zero_stage=0),
            Precision.FP16,
            0.0,
        ),
        (
            "megatron-lm-2021",
            ResolvedPlan(pp=2, dp=2, stages=(2, 2), recompute=Recompute.FULL),
            Precision.FP16,
            0.0,
        ),
        (
            "megatron-lm-2022",
            ResolvedPlan(tp=2, dp=2, stages=(4,), zero_stage=1, recompute=Recompute.FULL),
            Precision.FP32,
            0.1,
        ),
    )
}


class Shown(NamedTuple):
    """What the ranks of a plan showed: see `megatron_ranks.py`."""

    losses: list[float]
    norms: list[float]
    spread: float
    sinks: list[float]


def job_of(model: str, precision: Precision = Precision.FP32) -> TrainingJob:
    return TrainingJob(model=MODELS[model], global_batch_size=4, seq_len=16, precision=precision)


@cache
def reference(model: str) -> list[float]:
    return reference_losses(job_of(model), NUM_STEPS, vocabulary_multiple=128)


@cache
def reference_norms(model: str) -> dict[str, float]:
    """Return the norms of the first step's gradients, by plain PyTorch."""
    job = job_of(model)
    parts = plain_parts(job.model, vocab_size=job.model.vocab_size, dropout=0.0)
    kernel = UNFUSED if job.model.latent is None else FLASH
    options = LayerOptions(attention=kernel, recompute=Recompute.NONE, dropout=0.0)
    layers = range(job.model.num_layers)
    stage = VirtualStage(job.model, layers, options, parts, Ends(embedding=True, head=True))
    if job.model.tied_embeddings:
        tie_embeddings(stage)
    initialise_whole(stage, job.model)
    tokens, targets = token_batch(job, 0, range(job.global_batch_size))
    F.cross_entropy(stage(tokens).flatten(0, 1), targets.flatten()).backward()
    return {name: each.grad.norm().item() for name, each in stage.named_parameters()}


def reference_norm(model: str) -> float:
    return torch.tensor([*reference_norms(model).values()]).norm().item()


def reference_sinks(model: str) -> list[float]:
    return [norm for name, norm in reference_norms(model).items() if name.endswith("sinks")]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shown]:
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
        [sys.executable, "-W", "error", script, folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-8000:]
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {name: Shown(*each) for name, each in result.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_layout_learns_what_one_process_does(name: str, shown: dict[str, Shown]) -> None:
    model = CASES[name][0]
    assert shown[name].losses == pytest.approx(reference(model), abs=1e-5)
    # Adam does not see the scale of a gradient, so the losses alone would not show a wrong one.
    assert shown[name].norms[0] == pytest.approx(reference_norm(model), rel=1e-5)
    assert shown[name].spread <= 1e-6
    found = shown[name].sinks  # of the first stage's layers
    assert found == pytest.approx(reference_sinks(model)[: len(found)], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR)
def test_other_formats_and_dropout_train_alike(name: str, shown: dict[str, Shown]) -> None:
    model = NEAR[name][0]
    assert shown[name].losses == pytest.approx(reference(model), abs=0.05)
    assert shown[name].norms[0] == pytest.approx(reference_norm(model), rel=0.3)
    assert shown[name].spread <= 1e-6
