"""Megatron Bridge: a recipe with overrides of its ConfigContainer.

Overrides are those of scripts/training/run_recipe.py, keys those of ConfigContainer
(src/megatron/bridge/training/config.py) in v0.6.0
(https://github.com/NVIDIA-NeMo/Megatron-Bridge, commit 51885cf1) and, under ``model``, of
Megatron-Core's TransformerConfig.
"""

from collections.abc import Mapping

from meshwright.hwprofiles import Precision
from meshwright.planner.export.launch import Export, Framework
from meshwright.planner.export.megatron_core import (
    BATCHES,
    groups_row,
    shards_row,
    shared_rows,
    stages_row,
)
from meshwright.planner.export.table import Facts, Keys, Row, Words
from meshwright.planner.export.texts import command_words, single_quoted

WORDS = Words("megatron-bridge")
# Recipes of src/megatron/bridge/recipes/llama by the name of a model.
RECIPES: Mapping[object, object] = {
    "llama2-7b": "llama2_7b_pretrain_config",
    "llama3-8b": "llama3_8b_pretrain_config",
    "llama3-70b": "llama3_70b_pretrain_config",
    "llama3-405b": "llama31_405b_pretrain_config",
}
# Recipes of mixed_precision.py; current scaling of fp8 keeps the outer layers in bf16.
PRECISIONS: Mapping[object, object] = {
    Precision.BF16: "bf16_mixed",
    Precision.FP16: "fp16_mixed",
    Precision.FP8: "bf16_with_fp8_delayed_scaling_mixed",
    Precision.MXFP8: "bf16_with_mxfp8_mixed",
}
SHARDS = ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer")
SHARDED: Keys = {
    "ddp.use_megatron_fsdp": True,
    "ddp.data_parallel_sharding_strategy": "optim_grads_params",
    "checkpoint.ckpt_format": "fsdp_dtensor",
}


def table() -> tuple[Row, ...]:
    """Return the correspondences."""
    words = WORDS
    return (
        words.choice("model", "recipe", RECIPES),
        *(words.same(field, f"train.{key}") for field, key in BATCHES.items()),
        words.same("seq_len", "dataset.seq_length"),
        words.told(("dp", "world_size"), lambda _: None),
        shards_row(words, SHARDS, SHARDED, off=False),
        *shared_rows(words, "model.{}".format, overlap="comm_overlap.{}".format, off=False),
        stages_row(
            words,
            "model.pipeline_model_parallel_layout",
            "model.virtual_pipeline_model_parallel_size",
            says_both=True,
        ),
        groups_row(words, "model.microbatch_group_size_per_vp_stage"),
        words.choice("precision", "mixed_precision", PRECISIONS),
        # grad_reduce_in_fp32 of these recipes.
        words.rule("gradient_precision", _kept),
        words.choice(
            "stack.overlap_gradient_reduce", "ddp.overlap_grad_reduce", {True: True, False: False}
        ),
        _overlap(),
    )


def _kept(facts: Facts) -> Precision:
    return Precision.FP16 if facts.get("precision") is Precision.FP16 else Precision.FP32


def _overlap() -> Row:
    """Return the row of gathers under computation, of which there are none without shards."""
    fact, key = "stack.overlap_parameter_gather", "ddp.overlap_param_gather"

    def write(facts: Facts) -> Keys:
        return {key: bool(facts.get(fact)) and facts.number("zero_stage") > 0}

    def read(keys: Keys, facts: Facts) -> Keys:
        return {fact: keys[key]} if key in keys and facts.number("zero_stage") else {}

    return Row(fields=(fact,), keys=(key,), write=write, read=read)


def _command(export: Export) -> tuple[str, ...]:
    keys = dict(export.keys)
    recipe = keys.pop("recipe")
    start = f"scripts/training/run_recipe.py --recipe {recipe} --mode pretrain --dataset mock"
    return (start, *(single_quoted(f"{key}={_hydra(value)}") for key, value in keys.items()))


def _hydra(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _read(text: str) -> Keys:
    """Return the overrides of a script, and its recipe; the runner's own options are no keys."""
    words = command_words(text)
    found: Keys = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        key, sign, value = word.partition("=")
        if word == "--recipe":
            found["recipe"] = following
        elif sign and ("." in key or key == "mixed_precision") and not word.startswith("-"):
            found[key] = _value(value)
    return found


def _value(text: str) -> object:
    plain: Mapping[str, object] = {"null": None, "true": True, "false": False}
    if text in plain:
        return plain[text]
    return int(text) if text.isdigit() else text


FRAMEWORK = Framework(
    name="megatron-bridge",
    source="Megatron Bridge v0.6.0",
    write_table=lambda *_: table(),
    read_table=lambda _: table(),
    files=lambda _: {},
    command=_command,
    is_script=lambda _: True,
    read=_read,
    stack=lambda _: "megatron-core",
    harmless=(
        *("dataset.*", "logger.*", "checkpoint.*", "scheduler.*", "tokenizer.*", "rng.*"),
        *("profiling.*", "validation.*", "optimizer.lr", "optimizer.min_lr", "optimizer.adam_*"),
        *("optimizer.weight_decay", "optimizer.clip_grad", "train.train_iters", "train.exit_*"),
        *("train.manual_gc*", "env_vars.*", "straggler.*", "ft.*", "model.mtp_loss_*"),
    ),
)
