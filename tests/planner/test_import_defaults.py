"""What files of torchtitan, DeepSpeed and Accelerate mean by what they leave out, or leave open.

Each row is what the framework's own classes make of the file: DeepSpeedConfig of 0.19.8,
ConfigManager of torchtitan 0.2.2, FullyShardedDataParallelPlugin and ParallelismConfig of
Accelerate 1.15.
"""

import json
from pathlib import Path

import pytest

from meshwright.__main__ import main

SPEED = "--model gpt2 --seq-len 1024 --gpus 8 --recompute none --attention unfused"
SHARDED = (
    "--model llama3-8b --seq-len 1024 --global-batch 64 --micro-batch 1 --attention flash"
    " --sync-each-microbatch"
)
TITAN = "--gpus 16"
FSDP = """distributed_type: FSDP
num_processes: 16
num_machines: 2
mixed_precision: bf16
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_version: 1
"""
MESH = """parallelism_config:
  parallelism_config_tp_size: 2
"""
MODEL = '[model]\nname = "llama3"\nflavor = "8B"\n'
ENGINE = """distributed_type: DEEPSPEED
num_processes: 8
deepspeed_config:
  zero_stage: 2
"""
ENGINES = "--model gpt2 --seq-len 1024 --micro-batch 2 --recompute none --attention unfused"
LAUNCH = (
    "deepspeed --num_gpus 4 run_clm.py --model_name_or_path openai-community/gpt2-xl --bf16"
    " --dtype float32 --block_size 1024 --per_device_train_batch_size 2 --output_dir out"
)


def speed(**keys: object) -> str:
    """Return a file of DeepSpeed with a batch."""
    return json.dumps({"train_batch_size": 64, **keys})


AUTO = {"enabled": "auto"}
STAGE_AUTO = speed(zero_optimization={"stage": "auto"})
BOTH = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
MEANT = [
    ("a.json", speed(), SPEED, {"precision": "fp32", "zero_stage": 0}),
    ("a.json", speed(bf16=AUTO, fp16=AUTO), f"{SPEED} --precision fp16", {"precision": "fp16"}),
    ("a.json", speed(bfloat16={"enabled": True}), SPEED, {"precision": "bf16"}),
    ("a.json", speed(zero_optimization=True), SPEED, {"zero_stage": 1}),
    ("a.json", STAGE_AUTO, f"{SPEED} --zero 2", {"zero_stage": 2}),
    ("a.sh", LAUNCH, "--gpus 4 --global-batch 8", {"dp": 4}),
    ("a.yaml", ENGINE, f"{ENGINES} --global-batch 32", {"global_batch_size": 32}),
    (
        "a.json",
        speed(zero_optimization={"stage": 2, "cpu_offload": True}),
        SPEED,
        {"offload": "optimizer"},
    ),
    ("a.yaml", FSDP + "  fsdp_sharding_strategy: 4\n", SHARDED, {"dp_shard": 8, "dp": 16}),
    ("a.yaml", FSDP + "  sharding_strategy: 2\n", SHARDED, {"reshard_after_forward": False}),
    ("a.toml", MODEL, TITAN, {"microbatch_size": 8, "seq_len": 2048, "recompute_layers": 2}),
    ("a.toml", MODEL + "[training]\nbatch_size = 2\n", TITAN, {"microbatch_size": 2}),
    ("a.toml", MODEL + "[float8]\nemulate = true\n", TITAN, {"precision": "bf16"}),
]
REFUSED = [
    ("a.json", speed(bf16=AUTO), SPEED, "--precision (bf16.enabled is auto)"),
    ("a.sh", LAUNCH, "--gpus 8 --global-batch 16", "4 ranks a node are not those of 8 ranks"),
    ("a.json", STAGE_AUTO, SPEED, "--zero (zero_optimization.st"),
    ("a.yaml", ENGINE, ENGINES, "--global-batch (sequences of one optimizer step)"),
    (
        "a.yaml",
        FSDP.replace("prefetch", "prefetch_policy"),
        SHARDED,
        "fsdp_backward_prefetch_policy=",
    ),
    ("a.toml", MODEL + '[compile]\nenable = "auto"\n', TITAN, "compile.enable=auto"),
    ("a.json", speed(**BOTH), SPEED, "bf16.enabled and fp16.enabled of deepspeed are both true"),
    ("a.json", speed(optimizer={"type": "SGD"}), SPEED, "optimizer.type=SGD"),
    (
        "a.json",
        speed(zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": 0}),
        SPEED,
        "allowed: more than 0",
    ),
    ("a.yaml", FSDP + "  fsdp_sharding_strategy: NO_SHARD\n", SHARDED, "allowed: FULL_SHARD"),
    (
        "a.yaml",
        FSDP + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n",
        SHARDED,
        "fsdp_reshard_after_forward=SHARD_GRAD_OP",
    ),
    ("a.yaml", FSDP.replace("  fsdp_backward_prefetch: BACKWARD_PRE\n", ""), SHARDED, "_PRE"),
    ("a.yaml", FSDP.replace(": 1\n", ": 2\n") + MESH, SHARDED, "dp_shard_size=1"),
    ("a.yaml", FSDP + "dynamo_backend: INDUCTOR\n", SHARDED, "dynamo_config.dynamo_backend="),
    ("a.toml", MODEL + "[compile]\nenable = true\n", TITAN, "allowed: ['model']"),
    ("a.toml", MODEL + '[optimizer]\nname = "Muon"\n', TITAN, "optimizer.name=Muon"),
]


def imported(name: str, text: str, told: str, folder: Path) -> int:
    (folder / name).write_text(text, encoding="utf-8")
    words = ["import", str(folder / name), "--cluster", "dgx-h100", *told.split()]
    return main([*words, "--out", str(folder / "plan.json")])


@pytest.mark.parametrize(("name", "text", "told", "meant"), MEANT)
def test_what_a_file_leaves_out_is_as_its_framework_has_it(
    name: str, text: str, told: str, meant: dict[str, object], tmp_path: Path
) -> None:
    assert imported(name, text, told, tmp_path) == 0
    saved = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert {**saved["job"], **saved["plan"]}.items() >= meant.items()


@pytest.mark.parametrize(("name", "text", "told", "said"), REFUSED)
def test_what_a_file_leaves_open_is_asked_for_and_what_no_plan_says_is_refused(
    name: str, text: str, told: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(name, text, told, tmp_path) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()
