"""What exports start, counted as one rank: it does what its plan predicts."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_count

from meshwright import main
from meshwright.planner.export import export_plan, get_framework
from meshwright.planner.reports import SavedPlan, json_text, plan_document
from meshwright.validate.cli import plan_of_options

SEQ_LEN, HEAD_WIDTH = 2048, 128
GPT = """
name = "small"
num_layers = 2
hidden_size = 1024
num_heads = 8
vocab_size = 4096
seq_len = 2048
"""
LLAMA = f"""{GPT}
ffn_hidden_size = 3072
gated_mlp = true
tied_embeddings = false
positions = "rotary"
norm = "rmsnorm"
attention_bias = false
output_bias = false
mlp_bias = false
dropout = false
"""
# What a user has to write; an export's notes say the rest of it.
SCRIPTS = {
    "gpt": """
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=2, n_embd=1024, n_head=8, vocab_size=4096, n_positions=2048)
model = GPT2LMHeadModel(config)
""",
    "llama": """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(num_hidden_layers=2, hidden_size=1024, num_attention_heads=8, intermediate_size=3072)
model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, max_position_embeddings=2048, **sizes))
""",
}
# What from_pretrained of version 4.57 does with a tp_plan, whose weights come from a file.
SCRIPTS["split"] = f"""{SCRIPTS["llama"]}
from transformers.integrations.tensor_parallel import distribute_model, shard_and_distribute_module
def split(model, mesh):
    distribute_model(model, None, mesh, mesh.size())
    for name, each in list(model.named_parameters()):
        given = model, each, each, name, each.dtype, True, mesh.get_local_rank(), mesh
        shard_and_distribute_module(*given)
"""
LOOP = """
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
accelerator = {accelerator}
if "split" in globals():
    split(model, accelerator.torch_device_mesh["tp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
while True:
    ids = torch.randint(4096, ({size}, 2048), device=accelerator.device)
    with accelerator.accumulate(model):
        whole = torch.ones_like(ids)
        loss = model(input_ids=ids, labels=ids, attention_mask=whole, use_cache=False).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def plan(tmp_path: Path) -> Callable[[str, str], SavedPlan]:
    """Return what makes a plan of a model and of options, and leaves its file in the folder."""

    def make(text: str, options: str) -> SavedPlan:
        model = tmp_path / "small.toml"
        model.write_text(text)
        words = options if not text else f"{model} --global-batch 16 {options}"
        saved = plan_of_options(words, "dgx-h100")
        (tmp_path / "plan.json").write_text(json_text(plan_document(saved)))
        return saved

    return make


def disagreeing(folder: Path, rank: int, *words: str) -> set[str]:
    """Count one rank of what *words* start; return the quantities that are not as in the plan."""
    plan, out = str(folder / "plan.json"), folder / "count.json"
    options = ["--plan", plan, "--rank", str(rank), "--json", str(out)]
    command = [sys.executable, "-P", "-m", "meshwright", "count", *options, "--", *words]
    status = subprocess.run(command, cwd=folder, check=False, timeout=600).returncode
    (found,) = json.loads(out.read_text())["comparison"]["ranks"]
    failed = {each["quantity"] for each in found["checks"] if each["verdict"] == "FAIL"}
    assert status == (1 if failed else 0)
    return failed


@pytest.mark.parametrize(
    "options",
    [
        "--stack ddp",
        "--stack ddp --recompute full --micro-batch 2",
        "--stack ddp --find-unused --precision fp32",
        "--stack fsdp --dp-shard 4 --recompute full",
        "--stack fsdp --no-reshard-after-forward --precision fp16",
        "--stack fsdp --no-sync-each-microbatch",
    ],
)
def test_the_script_for_torchrun_counts_as_its_plan(
    options: str, plan: Callable[[str, str], SavedPlan], tmp_path: Path
) -> None:
    plan(GPT, f"--gpus 8 {options}")
    out = tmp_path / "job"
    assert main(["export", str(tmp_path / "plan.json"), "--to", "torchrun", "--out", str(out)]) == 0
    assert disagreeing(tmp_path, 0, str(out / "train.py")) == set()


def script_of(model: str, notes: list[str]) -> str:
    """Return a user's script that does what an export's notes tell it to do."""
    said = [note.removeprefix("your script: ") for note in notes]
    accelerator = next((note for note in said if note.startswith("Accelerator(")), "Accelerator()")
    (size,) = (found[1] for note in said if (found := re.match(r"DataLoader.*=(\d+)\)", note)))
    return SCRIPTS[model] + LOOP.format(accelerator=accelerator, size=size)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt", "--stack ddp --micro-batch 2"),
        ("llama", "--stack ddp"),
        ("llama", "--stack fsdp"),
        ("llama", "--stack fsdp --dp-shard 4"),
        ("llama", "--stack fsdp --no-reshard-after-forward"),
        ("llama", "--stack fsdp --recompute full"),
        ("gpt", "--stack fsdp --recompute full --micro-batch 2"),
    ],
)
def test_what_accelerate_launches_counts_as_its_plan(
    model: str,
    options: str,
    plan: Callable[[str, str], SavedPlan],
    tmp_path: Path,
) -> None:
    saved = plan(GPT if model == "gpt" else LLAMA, f"--gpus 8 --set kernels=eager {options}")
    assert disagreeing(tmp_path, 5, *launched(saved, model, tmp_path)) == set()


def launched(saved: SavedPlan, model: str, folder: Path) -> tuple[str, ...]:
    """Write what Accelerate launches of a plan, in a *folder*; return the words that do."""
    handed = export_plan(saved, get_framework("accelerate"))
    config, script = folder / "accelerate.yaml", folder / "train.py"
    config.write_text(handed.files["accelerate.yaml"])
    script.write_text(script_of(model, handed.notes))
    launch = ("-m", "accelerate.commands.launch", "--main_process_port", "0")
    return (*launch, "--config_file", str(config), str(script))


@pytest.fixture(scope="session")
def transformers_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the last transformers that Accelerate 1.15 splits layers with."""
    folder = tmp_path_factory.mktemp("transformers-4")
    names = ["transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--target", str(folder), *names], check=True, timeout=300)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        "--tp 2",
        "--tp 4 --micro-batch 2 --no-reshard-after-forward",
        "--tp 2 --dp-shard 2",
        "--tp 2 --recompute full --micro-batch 2",
    ],
)
def test_what_accelerate_splits_by_a_tp_plan_counts_as_its_plan(
    options: str,
    plan: Callable[[str, str], SavedPlan],
    tmp_path: Path,
    transformers_4: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(transformers_4), prepend=os.pathsep)
    saved = plan(LLAMA, f"--gpus 8 --stack fsdp --set kernels=eager {options}")
    words = launched(saved, "split", tmp_path)
    assert disagreeing(tmp_path, 5, *words) == {"FLOPs"}
    (found,) = json.loads((tmp_path / "count.json").read_text())["comparison"]["ranks"]
    (flops,) = (each for each in found["checks"] if each["quantity"] == "FLOPs")
    # Version 4.57 multiplies frequencies by positions as matrices, alike for all sequences.
    angles = saved.plan.num_microbatches(saved.job) * 2 * (HEAD_WIDTH // 2) * SEQ_LEN
    assert flops["measured"] - flops["predicted"] == angles


@pytest.mark.parametrize("rank", [0, 7])
def test_torchtitan_in_two_dimensions_counts_as_its_plan(
    rank: int,
    plan: Callable[[str, str], SavedPlan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = "--gpus 8 --tp 2 --pp 2 --sequence-parallel --global-batch 4 --seq-len 1024"
    saved = plan("", f"llama3-8b {layout} --stack torchtitan@0.2 --set kernels=eager")
    files = export_plan(saved, get_framework("torchtitan")).files
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.toml").write_text(files["train.toml"])
    (assets,) = (
        text for name, text in test_count.FILES.findall(test_count.PAGE) if "assets" in name
    )
    (tmp_path / "assets.py").write_text(assets)
    runpy.run_path("assets.py")
    start = ["-m", "torchtitan.train", "--job.config_file", "train.toml"]
    assert not disagreeing(tmp_path, rank, *start)
