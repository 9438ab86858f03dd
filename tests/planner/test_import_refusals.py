"""Files that no plan means, and files whose meaning is in one word: what a newcomer may write."""

import json
import shutil
from pathlib import Path

import pytest

from meshwright.__main__ import main

MEGATRON = (
    "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048"
    " --max-position-embeddings 2048 --tokenizer-type NullTokenizer --vocab-size 50000"
    " --micro-batch-size 1 --global-batch-size 128 --bf16"
)
RUN = f"torchrun --nnodes 2 --nproc-per-node 8 {MEGATRON}"
SPEED = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": 1}}'
TOLD = "--model gpt2 --seq-len 1024 --recompute none"
TASKS = f"#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun torchrun --nnodes 2 {MEGATRON}"
REFUSED = {
    "NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0 leave megatron-lm unfused attention": (
        f"export NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0\n{RUN}"
    ),
    "'NVTE_NEW_KERNEL' of megatron-lm is unknown": f"NVTE_NEW_KERNEL=1 {RUN}",
    "CUDA_LAUNCH_BLOCKING=1 of megatron-lm is in no plan": f"CUDA_LAUNCH_BLOCKING=1 {RUN}",
    "attention-backend=local of megatron-lm": f"{RUN} --attention-backend local",
    "per-virtual-pipeline-stage=4 of megatron-lm is in no plan; allowed: one stage": (
        f"{RUN} --num-layers-per-virtual-pipeline-stage 4"
    ),
    "allowed: without num-virtual-stages-per-pipeline-rank": (
        f"{RUN} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4"
        " --num-virtual-stages-per-pipeline-rank 2"
    ),
    "--use-fsdp of accelerate says a layout beside that of pretrain_gpt.py": (
        f"accelerate launch --num_processes 8 --use_fsdp {MEGATRON}"
    ),
    "${!MORE} at line 1 is not read": f"{RUN} --save ${{!MORE}}",
    "line 1: $SIZE at line 1 is not set in the file": f"{RUN} --ddp-bucket-size $SIZE",
    "line 1: --lr has no value": f"{RUN} --lr",
    "line 1: --swiglu=true takes no value": f"{RUN} --swiglu=true",
    "overlap-param-gather=true of megatron-lm": (
        f"{RUN} --use-distributed-optimizer --overlap-param-gather"
    ),
    "allowed: 4096 positions or more": f"{RUN} --seq-length 4096",
    "--gpus 32 is not what the file says; allowed: 16": f"mpirun -np 16 python {MEGATRON}",
    "$MORE at line 1 is not set in the file": f"{RUN} --data-path texts $MORE",
    "pretrain_bert.py of megatron-lm trains an encoder": RUN.replace("_gpt", "_bert"),
    "srun starts 8 of torchrun on each node": f"#!/bin/bash\n{TASKS}",
    "line 1: 'aaaa": f"torchrun -m torchtitan.train --job.config_file {'a' * 300}.toml",
    "torchrun starts no program": RUN.replace(" pretrain", " \\ \n pretrain"),
    "2 ranks on 2 nodes are not those of dgx-h100": (
        f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=8\nsrun -N 2 -n 2 python {MEGATRON}"
    ),
    "tp-comm-overlap=true of megatron-lm": (
        f"{RUN} --tensor-model-parallel-size 2 --tp-comm-overlap"
    ),
    "fp8-recipe=blockwise of megatron-lm is in no plan; allowed: mxfp8, delayed": (
        f"{RUN} --fp8-format hybrid --fp8-recipe blockwise"
    ),
    "fsdp-config.backward_prefetch=None of transformers is in no plan": (
        "torchrun --nproc-per-node 8 run_clm.py --bf16 --fsdp full_shard"
        """ --fsdp_config '{"version": 1}'"""
    ),
}

FILES = Path(__file__).parents[1] / "golden" / "imports"
LAUNCHED = "finetune.py --learning_rate 1e-5"
NEMO, FOUNDRY = "nemo-gpt3-20b.yaml", "llm-foundry-mpt-7b.yaml"
CHANGED = [
    (
        "deepspeed-stage-3.json",
        '"bf16": {',
        '"bfloat16": {"enabled": false},\n"bf16": {',
        "line 6: bf16.enabled and bfloat16.enabled are one key",
    ),
    ("torchtitan-launch.sh", "=4 $overrides", "=4 seq=8192 tp4", "'tp4' belongs to no option"),
    ("accelerate-launch.sh", LAUNCHED, f"{LAUNCHED} $MORE", "$MORE at line 8 is not set"),
    ("accelerate-launch.sh", LAUNCHED, f"{LAUNCHED} zero3", "'zero3' belongs to no option"),
    ("accelerate-launch.sh", LAUNCHED, f"{LAUNCHED} --zero 3", "--zero of finetune.py may change"),
    (NEMO, "devices: 8", "devices: [0, 1]", "trainer.devices=[0, 1] of nemo is in no plan"),
    (
        FOUNDRY,
        "\nprecision:",
        "\ncompile_config: {}\nprecision:",
        "compile_config={} of llm-foundry",
    ),
    (
        "bridge-recipe.sh",
        " $OVERRIDES\n",
        " $OVERRIDES --model.sequence_parallel=false\n",
        "--model.sequence_parallel is no option of run_recipe.py",
    ),
    (
        "bridge-recipe.sh",
        " $OVERRIDES\n",
        " $OVERRIDES model.virtual_pipeline_model_parallel_size=5\n",
        "=5 on 2 pipeline ranks of megatron-bridge does not divide its 32 layers",
    ),
]


def imported(name: str, text: str, told: str, folder: Path) -> int:
    (folder / name).write_text(text, encoding="utf-8")
    words = ["import", str(folder / name), "--cluster", "dgx-h100", *told.split()]
    return main([*words, "--out", str(folder / "plan.json")])


def test_a_name_with_a_dot_is_no_section_whoever_names_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed, and Accelerate, would not find it there either."""
    told = f"{TOLD} --gpus 8 --global-batch 64"
    dotted = '{"zero_optimization.stage": 3, "train_batch_size": 64}'
    assert imported("a.json", dotted, told, tmp_path) == 2
    assert "line 1: 'zero_optimization.stage' is one name" in capsys.readouterr().err
    text = "distributed_type: FSDP\nfsdp_config.fsdp_version: 2\nnum_processes: 8\n"
    (tmp_path / "b.yaml").write_text(text, encoding="utf-8")
    launch = "accelerate launch --config_file b.yaml own.py"
    assert imported("a.sh", launch, told, tmp_path) == 2
    assert "b.yaml line 2: 'fsdp_config.fsdp_version' is one name" in capsys.readouterr().err


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_framework_refuses_or_no_plan_says_is_refused(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "--gpus 32" if "--gpus" in said else ""
    assert imported("a.sh", REFUSED[said], told, tmp_path) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(("name", "word", "other", "said"), CHANGED)
def test_one_word_that_no_plan_means_is_refused(
    name: str, word: str, other: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(FILES, tmp_path / "files")  # what a file names lies beside it
    text = (folder / name).read_text(encoding="utf-8")
    assert word in text
    assert imported(name, text.replace(word, other), "", folder) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "told", "meant"),
    [
        ("a.json", SPEED, f"{TOLD} --gpus 8", {"precision": "bf16"}),
        ("a.sh", f"NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0 {RUN}", "", {"attention": "flash"}),
        ("a.sh", f"mpirun -np 16 python {MEGATRON}", "", {"dp": 16}),
        ("a.sh", f"srun -N2 --ntasks-per-node 8 python {MEGATRON}", "", {"dp": 16}),
    ],
)
def test_what_a_newcomer_writes_means_what_it_says(
    name: str, text: str, told: str, meant: dict[str, object], tmp_path: Path
) -> None:
    assert imported(name, text, told, tmp_path) == 0
    saved = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert {**saved["job"], **saved["plan"]}.items() >= meant.items()


def test_a_refusal_is_a_line_that_a_terminal_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported("a.sh", "torchrun my_train.py", "", tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--from megatron-lm" in line
    assert len(line.replace(str(tmp_path), "")) < 300


def test_a_closed_standard_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["import", "-", "--cluster", "dgx-h100"]) == 2
    assert "standard input: it is closed" in capsys.readouterr().err
