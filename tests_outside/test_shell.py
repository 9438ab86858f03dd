"""Scripts that start plans, in the eyes of ShellCheck."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planner.export import export_plan, get_framework
from meshwright.validate.cli import plan_of_options
from meshwright.validate.launch import RunSpec, emit_slurm, emit_torchrun

# ShellCheck asks about text in single quotes that looks as if it should expand (SC2016): on each
# node it does, in the shell that srun starts there; in the name of a folder it must not.
CHECK = [str(Path(sys.executable).with_name("shellcheck")), "--exclude=SC2016", "-"]
LLAMA = "llama3-8b --global-batch 64 --seq-len 4096 --gpus"
GPT = "gpt2 --global-batch 64 --gpus"
PLANS = {
    "megatron-lm": (f"{LLAMA} 16 --tp 2 --pp 2 --stages 15,17", f"{LLAMA} 8 --tp 8"),
    "megatron-bridge": (f"{LLAMA} 16 --pp 2 --stages 15,17", f"{LLAMA} 8 --tp 8"),
    "torchtitan": (
        f"{LLAMA} 16 --stack torchtitan@0.2 --pp 2",
        f"{LLAMA} 16 --stack torchtitan-2026-08 --pp 2",
    ),
    "deepspeed": (f"{GPT} 16 --stack deepspeed", f"{GPT} 8 --stack deepspeed"),
    "accelerate": (f"{GPT} 16 --stack ddp", f"{GPT} 8 --stack fsdp"),
    "torchrun": (f"{GPT} 16 --stack ddp", f"{LLAMA} 8 --stack fsdp"),
}
HOSTILE = """a'; touch x; '"$(touch x) `touch x` ${x:=y} \\"""
NAMED = {"torchtitan", "megatron-bridge"}  # which know a model by its name


def scripts(framework: str) -> Iterator[str]:
    """Yield the scripts of a framework's plans, of models with a hostile name where it may be."""
    chosen = get_framework(framework)
    for words in PLANS[framework]:
        saved = plan_of_options(words, "dgx-b200")
        if framework not in NAMED:
            model = saved.job.model.model_copy(update={"name": HOSTILE})
            saved = replace(saved, job=replace(saved.job, model=model))
        for slurm in (False, True):
            for name, text in export_plan(saved, chosen, slurm=slurm).files.items():
                if name.endswith((".sh", ".sbatch")):
                    yield text


def checked(script: str) -> str:
    """Return what ShellCheck says about a script."""
    done = subprocess.run(CHECK, input=script, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("framework", PLANS)
def test_scripts_of_exports_are_clean(framework: str) -> None:
    found = list(scripts(framework))
    assert found
    for script in found:
        assert checked(script) == ""


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_scripts_of_runs_are_clean(backend: str) -> None:
    saved = plan_of_options(PLANS["megatron-lm"][0], "dgx-b200")
    for folder in ("results", "my folder", "-rf", "it's $(touch x)"):
        spec = RunSpec(plans=(Path("plan.json"),), backend=backend, results=Path(folder))
        for emit in (emit_slurm, emit_torchrun):
            assert checked(emit(saved, spec, spec_file=Path(folder) / "spec.json")) == ""


def test_a_word_without_quotes_is_seen() -> None:
    assert "SC2086" in checked("#!/bin/bash\nls $1\n")
