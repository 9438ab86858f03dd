"""Configurations of transformers' Trainer, LLaMA-Factory and axolotl, and the plans they say."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from meshwright.planner.formats.hugging_face import hub_models
from meshwright.planner.importing import read_source
from meshwright.planner.importing.plans import Imported, import_source
from meshwright.simulator import PlanError
from meshwright.simulator.model import list_models

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "imports"
FULL, FACTORY = "llama-factory-full-zero3.yaml", "llama-factory-full-ddp.yaml"


def imported(name: str, text: str | None = None, **given: object) -> Imported:
    """Return what a file says, with *text* in its place if there is one."""
    path = FOLDER / name
    text = path.read_text(encoding="utf-8") if text is None else text
    source = read_source(path, text, None, {})
    ranks = {} if source.launched.get("world_size") else {"world_size": 8}
    return import_source(source, {"cluster": "dgx-h100", **ranks, **given}, None, None)


ZERO3 = {"zero_stage": 3, "reshard_after_forward": True, "sync_each_microbatch": True}
FSDP = {"zero_stage": 3, "reduce_precision": "bf16", "sync_each_microbatch": False}
DDP = {"zero_stage": 0, "reduce_precision": "fp32", "sync_each_microbatch": False}
IN_16_BITS = {"stack.parameter_precision": "bf16"}
# By hand: the model, the stack, microbatch, sequences of a step, tokens of one, and what else.
PLANS: Mapping[str, tuple[str, str, int, int, int, Mapping[str, object]]] = {
    FULL: (
        *("llama3-8b", "deepspeed", 2, 64, 4096),
        {
            **ZERO3,
            "precision": "bf16",
            "recompute": "full",
            "stack.recompute_stops_early": False,
            "attention": "flash",
            "stack.gradient_bucket_parameters": 4096**2,
        },
    ),
    FACTORY: (
        *("qwen2-1.5b", "ddp", 4, 32, 2048),
        {**DDP, "precision": "fp16", "recompute": "none", "find_unused": True}
        | {"attention": "unfused"},
    ),
    "llama-factory-full-fsdp.yaml": (
        *("llama2-7b", "fsdp", 1, 8, 2048),
        {**FSDP, "gradient_precision": "fp32", "recompute": "full", "offload": "parameters"}
        | {"reshard_after_forward": True},
    ),
    "axolotl-full-fsdp2.yaml": (
        *("llama3-8b", "fsdp", 1, 16, 8192),
        {**FSDP, **IN_16_BITS, "gradient_precision": "bf16", "recompute": "full", "dp_shard": 8},
    ),
    "axolotl-full-zero2.yaml": (
        *("mistral-7b", "deepspeed", 4, 128, 4096),
        {"zero_stage": 2, "offload": "optimizer", "attention": "flash", "recompute": "full"}
        | {"stack.gradient_bucket_parameters": 200_000_000},
    ),
    "transformers-ddp.sh": (
        *("gpt2-xl", "ddp", 2, 128, 1024),
        {**DDP, "precision": "bf16", "recompute": "none", "find_unused": True},
    ),
    "transformers-zero3.sh": (
        *("llama2-7b", "deepspeed", 2, 32, 4096),
        {**ZERO3, "precision": "bf16", "recompute": "full", "stack.recompute_stops_early": True},
    ),
    "transformers-fsdp.sh": (
        *("llama3-8b", "fsdp", 1, 32, 2048),
        {**FSDP, "precision": "bf16", "gradient_precision": "fp32", "recompute": "full"}
        | {"reshard_after_forward": False},
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_full_fine_tuning_is_the_plan_its_framework_makes_of_it(name: str) -> None:
    model, stack, microbatch_size, global_batch_size, seq_len, others = PLANS[name]
    found = imported(name)
    assert (found.model, found.stack) == (model, stack)
    sizes = ("microbatch_size", "global_batch_size", "seq_len")
    assert [found.values[each] for each in sizes] == [microbatch_size, global_batch_size, seq_len]
    assert {each: found.values[each] for each in others} == others


REFUSED: Mapping[str, tuple[str, str, str, str]] = {
    "LoRA": (FULL, "finetuning_type: full", "finetuning_type: lora", "finetuning_type=lora"),
    "LoRA by default": (FULL, "finetuning_type: full\n", "", "finetuning_type"),
    "a LoRA of axolotl": ("axolotl-full-fsdp1.yaml", "adapter:\n", "adapter: lora\n", "adapter"),
    "FSDP 1 of axolotl": ("axolotl-full-fsdp1.yaml", "bf16: true", "bf16: true", "fsdp_version=1"),
    "moments of 8 bits": (FULL, "stage: sft", "stage: sft\noptim: adamw_8bit", "optim=adamw_8bit"),
    "an unknown key": (FULL, "cutoff_len", "cutof_len", "'cutof_len' of llama-factory is unknown"),
    "no DeepSpeed file": (FULL, "zero3-auto.json", "zero9.json", "zero9.json' is not there"),
    "a number for a file": (FULL, "deepspeed/zero3-auto.json", "7", "deepspeed=7 is no section"),
    "packed samples": (
        *("axolotl-full-fsdp2.yaml", "sample_packing: false", "sample_packing: true"),
        "sample_packing=true",
    ),
    "another batch in the JSON": (
        *("axolotl-full-zero2.yaml", "micro_batch_size: 4", "micro_batch_size: 2"),
        "deepspeed.train_micro_batch_size_per_gpu=4",
    ),
    "FSDP around a reentrant checkpoint": (
        *("llama-factory-full-fsdp.yaml", "use_reentrant_gc: false\n", ""),
        "use_reentrant_gc=true",
    ),
    "one FSDP unit": ("llama-factory-full-fsdp.yaml", " auto_wrap", "", "fsdp=full_shard offload"),
    "ring attention": (
        *("axolotl-full-fsdp2.yaml", "dp_shard_size: 8", "context_parallel_size: 2"),
        "context_parallel_size=2",
    ),
    "DDP with some weights in fp32": (
        *("axolotl-full-zero2.yaml", "deepspeed: deepspeed/zero2-offload.json\n", ""),
        "keeps part of the weights in fp32",
    ),
    "a misspelt option": (
        *("transformers-ddp.sh", "--learning_rate 5e-5", "--learnin_rate 5e-5"),
        "'learnin_rate' of transformers is unknown",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_plan_says_is_refused_by_its_name(case: str) -> None:
    name, old, new, said = REFUSED[case]
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(PlanError) as error:
        imported(name, text.replace(old, new))
    assert said in str(error.value)


def test_all_refusals_of_a_file_stand_in_its_order_with_their_lines() -> None:
    text = (FOLDER / FULL).read_text(encoding="utf-8")
    text = text.replace("bf16: true", "bf16: true\nuse_unsloth: true\nneat_packing: true")
    with pytest.raises(PlanError) as error:
        imported(FULL, text)
    assert [each.partition(":")[0] for each in str(error.value).splitlines()] == [
        "line 30",
        "line 31",
    ]


def test_weights_that_a_script_loads_are_asked_for() -> None:
    text = (FOLDER / "transformers-ddp.sh").read_text(encoding="utf-8")
    text = text.replace("  --dtype float32 \\\n", "")
    with pytest.raises(PlanError, match="--gradient-precision"):
        imported("transformers-ddp.sh", text)
    in_16_bits = imported("transformers-ddp.sh", text, gradient_precision="bf16")
    assert in_16_bits.values["stack.parameter_precision"] == "bf16"
    assert imported("transformers-ddp.sh", text, gradient_precision="fp32").values["precision"]


@pytest.mark.parametrize("name", ["/etc/hostname", "../imports/deepspeed/zero3-auto.json"])
def test_a_file_elsewhere_is_not_read(name: str) -> None:
    text = (FOLDER / FULL).read_text(encoding="utf-8")
    with pytest.raises(PlanError, match="is not there"):
        imported(FULL, text.replace("deepspeed/zero3-auto.json", name))


def test_a_model_beside_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 999,'
        '"num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 2048,'
        '"num_key_value_heads": 8, "tie_word_embeddings": false}',
        encoding="utf-8",
    )
    path = tmp_path / "own.yaml"
    text = (FOLDER / FACTORY).read_text(encoding="utf-8").replace("Qwen/Qwen2-1.5B", "own")
    source = read_source(path, text, None, {})
    found = import_source(source, {"cluster": "dgx-h100", "world_size": 8}, None, None)
    assert not isinstance(found.model, str)
    assert (found.model.num_layers, found.model.vocab_size) == (4, 999)


def test_names_of_the_hub_are_of_built_in_models() -> None:
    assert set(hub_models().values()) <= set(list_models())


RUN_CLM = "run_clm.py --model_name_or_path gpt2 --block_size 1024 --per_device_train_batch_size 2"
# Each with its stack, ranks, sequences of a step, and what else.
LAUNCHES: Mapping[str, tuple[str, int, int, Mapping[str, object]]] = {
    f"accelerate launch --config_file transformers-fsdp2.yaml {RUN_CLM}": (
        *("fsdp", 4, 8),
        {"recompute": "full", "reshard_after_forward": False, "precision": "bf16"},
    ),
    f"accelerate launch --config_file transformers-fsdp2.yaml --num_processes 8 {RUN_CLM}": (
        *("fsdp", 8, 16),
        {"gradient_precision": "fp32"},
    ),
    "accelerate launch --num_processes 2 --use_deepspeed "
    f"--deepspeed_config_file deepspeed/zero3-auto.json {RUN_CLM} --fp16": (
        *("deepspeed", 2, 4),
        {"precision": "fp16", "zero_stage": 3},
    ),
    "accelerate launch --num_processes 8 -m axolotl.cli.train axolotl-full-fsdp2.yaml": (
        *("fsdp", 8, 16),
        {"seq_len": 8192},
    ),
    "FORCE_TORCHRUN=1 llamafactory-cli train llama-factory-full-zero3.yaml cutoff_len=1024": (
        *("deepspeed", 8, 64),
        {"seq_len": 1024},
    ),
    "axolotl train axolotl-full-fsdp2.yaml --micro-batch-size 4": ("fsdp", 8, 64, {}),
}


@pytest.mark.parametrize("command", LAUNCHES)
def test_a_launcher_says_what_its_program_leaves_open(command: str) -> None:
    stack, world_size, global_batch_size, others = LAUNCHES[command]
    found = imported("launch.sh", command)
    assert found.stack == stack
    assert found.values["world_size"] == world_size
    assert found.values["global_batch_size"] == global_batch_size
    assert {each: found.values[each] for each in others} == others


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--use_parallelism_config --parallelism_config_tp_size 2", "tp_size=2"),
        ("--use_megatron_lm", "distributed_type=MEGATRON_LM"),
        ("--use_fsdp --fsdp_auto_wrap_policy NO_WRAP", "auto_wrap_policy=NO_WRAP"),
        ("--mixed_precision fp8", "mixed_precision=fp8"),
        ("--config_file missing.yaml", "missing.yaml"),
        ("--dynamo_backend inductor", "dynamo_backend=inductor"),
    ],
)
def test_what_no_trainer_says_is_refused_of_its_launcher(options: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        imported("launch.sh", f"accelerate launch {options} {RUN_CLM} --bf16 --dtype float32")
