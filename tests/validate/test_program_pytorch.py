"""The PyTorch programs train as one process does: gloo with two and with four processes."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from meshwright.hwprofiles import Attention, ContextParallel, Precision, Recompute
from meshwright.simulator import ModelSpec, ResolvedPlan, TrainingJob
from meshwright.simulator.model import Experts
from meshwright.validate.programs.pytorch import reference
from meshwright.validate.programs.pytorch.reference import reference_losses

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 3
LIMIT_S = 240
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "vocab_size": 512,  # no layout of these tests pads it
    "seq_len": 16,
}
GPT = ModelSpec(name="tiny-gpt", **SIZES)
LLAMA = ModelSpec(
    name="tiny-llama",
    num_kv_heads=2,
    ffn_hidden_size=48,
    gated_mlp=True,
    tied_embeddings=False,
    positions="rotary",
    norm="rmsnorm",
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    dropout=False,
    **SIZES,
)
EXPERTS = Experts(num_experts=8, experts_per_token=2, hidden_size=16, shared_hidden_size=24)
SIZES_OF_QWEN = {"name": "tiny-qwen", "qk_norm": "head", "head_dim": 16, "experts": EXPERTS}
QWEN = LLAMA.model_copy(update=SIZES_OF_QWEN)


class Case(NamedTuple):
    """A plan on a stack."""

    model: ModelSpec
    stack: str
    plan: ResolvedPlan


class Outcome(NamedTuple):
    """Mean loss and norm of the gradients of each step."""

    losses: list[float]
    norms: list[float]


def plan(**fields: Any) -> ResolvedPlan:
    usual = {"stages": (4,), "zero_stage": 3, "attention": Attention.FLASH}
    return ResolvedPlan(**(usual | fields))


OPERATORS = Recompute.SELECTIVE_OP
PIPELINE = {"pp": 2, "stages": (2, 2)}
# Plans that test_agreement_gloo.py does not train, and one of each kind for the norms.
CASES = {
    "fsdp kept, microbatch of two": Case(
        GPT, "fsdp", plan(dp=2, reshard_after_forward=False, microbatch_size=2)
    ),
    "cp gathered llama": Case(LLAMA, "torchtitan@0.2", plan(cp=2, dp=2)),
    "cp tp ring": Case(
        GPT,
        "torchtitan@0.2",
        plan(cp=2, tp=2, sequence_parallel=True, cp_type=ContextParallel.RING, microbatch_size=2),
    ),
    "1f1b operators llama": Case(
        LLAMA, "torchtitan@0.2", plan(pp=2, stages=(1, 3), recompute=OPERATORS)
    ),
    "pp tp sp, full recompute llama": Case(
        LLAMA,
        "torchtitan@0.2",
        plan(tp=2, pp=2, stages=(0, 4), sequence_parallel=True, recompute=Recompute.FULL),
    ),
    "experts": Case(QWEN, "torchtitan@0.2", plan(dp=2)),
    "ep of all ranks, pp": Case(QWEN, "torchtitan@0.2", plan(dp=2, ep=2, **PIPELINE)),
    "ep hsdp": Case(QWEN, "torchtitan@0.2", plan(dp=4, dp_shard=2, ep=2)),
    "gpipe fsdp": Case(GPT, "torchtitan@0.2", plan(dp=2, schedule="gpipe", **PIPELINE)),
}


def job_of(model: ModelSpec) -> TrainingJob:
    return TrainingJob(model=model, global_batch_size=4, seq_len=16, precision=Precision.FP32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What the ranks of all cases showed: see `pytorch_ranks.py`."""
    folder = tmp_path_factory.mktemp("pytorch")
    asked = {name: (job_of(case.model), case.plan, case.stack) for name, case in CASES.items()}
    (folder / "cases").write_bytes(pickle.dumps(asked))
    script = Path(__file__).with_name("pytorch_ranks.py")
    run = subprocess.run(
        [sys.executable, "-W", "error", script, folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    again = folder / "again" / "result.json"
    shown = json.loads((again if again.exists() else folder / "result.json").read_text())
    return {name: Outcome(*values) for name, values in shown.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Outcome]:
    """What one process computes, by model."""
    norms: list[float] = []
    clip = reference.clip_gradients

    def clip_and_record(*args: Any) -> None:
        norms.append(clip(*args).item())

    outcomes = {}
    with patch.object(reference, "clip_gradients", clip_and_record):
        for model in (GPT, LLAMA, QWEN):
            losses = reference_losses(job_of(model), NUM_STEPS)
            outcomes[model.name] = Outcome(losses, norms.copy())
            norms.clear()
    return outcomes


def assert_trains_alike(outcome: Outcome, expected: Outcome) -> None:
    # fp32 sums in another order: 1e-7 was seen.
    assert outcome.losses == pytest.approx(expected.losses, abs=1e-5)
    assert outcome.norms == pytest.approx(expected.norms, rel=1e-4)


def test_one_process_learns(alone: dict[str, Outcome]) -> None:
    for outcome in alone.values():
        assert len(set(outcome.losses)) == len(outcome.norms) == NUM_STEPS
        assert all(5 < loss < 8 for loss in outcome.losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_processes_train_as_one(
    name: str, trained: dict[str, Outcome], alone: dict[str, Outcome]
) -> None:
    assert_trains_alike(trained[name], alone[CASES[name].model.name])
