"""What a JSON, TOML or YAML says of its layout, read at its keys alone."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import yaml

Claims = dict[str, object]
ADAM = {"adam", "adamw", "fusedadam", "onebitadam"}
INEXPRESSIBLE = ("auto", None)
FLAVORS = {
    ("llama3", "debugmodel"): (6, 256),
    ("llama3", "8B"): (32, 4096),
    ("llama3", "70B"): (80, 8192),
    ("llama3", "405B"): (126, 16384),
    ("qwen3", "0.6B"): (28, 1024),
    ("qwen3", "1.7B"): (28, 2048),
    ("qwen3", "4B"): (36, 2560),
    ("qwen3", "8B"): (36, 4096),
    ("qwen3", "14B"): (40, 5120),
    ("qwen3", "32B"): (64, 5120),
    ("qwen3", "30B-A3B"): (48, 2048),
    ("qwen3", "235B-A22B"): (94, 4096),
}


def at(tree: object, path: str, otherwise: object = None) -> object:
    """Return the value at a path of keys joined by dots.

    >>> at({"a": {"b": 1}}, "a.b"), at({"a": None}, "a.b", 2)
    (1, 2)
    """
    for key in path.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return otherwise
        tree = tree[key]
    return tree


def configuration_claims(path: Path, told: Mapping[str, str]) -> Claims | None:
    """Return what a file says of its plan, by names of a plan's fields; None where it trains none.

    Args:
        path: Of the file.
        told: Options that were given beside it, for what it leaves to them.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        tree: object = tomllib.loads(text)
        return torchtitan_claims(tree) if at(tree, "training") is not None else None
    if path.suffix == ".json":
        try:
            tree = json.loads(text)
        except json.JSONDecodeError:
            return None  # a template
        is_theirs = at(tree, "zero_optimization") or at(tree, "train_batch_size")
        return deepspeed_claims(tree, told) if is_theirs else None
    tree = yaml.safe_load(text)
    return accelerate_claims(tree, told) if at(tree, "distributed_type") else None


def torchtitan_claims(tree: object) -> Claims:
    """Return what a TOML of torchtitan 0.1 or 0.2 says."""

    def degree(name: str) -> object:
        sections = ("parallelism", "training", "experimental")  # the later ones in 0.1
        told = (at(tree, f"{each}.{name}_parallel_degree") for each in sections)
        return next((each for each in told if each is not None), 1)

    name, flavor = str(at(tree, "model.name")), str(at(tree, "model.flavor", "debugmodel"))
    sizes = FLAVORS.get((name, flavor), (-1, -1))  # of others no plan is right
    converters = at(tree, "model.converters") or at(tree, "float8.enable_float8_linear")
    param = at(tree, "training.mixed_precision_param", "bfloat16")
    claims: Claims = {
        "num_layers": sizes[0],
        "hidden_size": sizes[1],
        "seq_len": at(tree, "training.seq_len", 2048),
        "tp": degree("tensor"),
        "pp": degree("pipeline"),
        "cp": degree("context"),
        "ep": degree("expert"),
        "precision": "fp8" if converters else {"bfloat16": "bf16"}.get(str(param), "fp32"),
        "offload": "parameters" if at(tree, "training.enable_cpu_offload") else "none",
        **_recompute(tree),
    }
    if claims["pp"] == 1:
        claims["microbatch_size"] = at(
            tree, "training.local_batch_size", at(tree, "training.batch_size", 8)
        )
    batch = at(tree, "training.global_batch_size", -1)
    if batch != -1:
        claims["global_batch_size"] = batch
    if str(at(tree, "optimizer.name", "AdamW")) not in ("Adam", "AdamW"):
        claims["optimizer"] = at(tree, "optimizer.name")
    return claims


def _recompute(tree: object) -> Claims:
    mode = at(tree, "activation_checkpoint.mode", "selective")
    option = str(at(tree, "activation_checkpoint.selective_ac_option", "2"))
    if mode != "selective":
        return {"recompute": mode}
    if option == "op":
        return {"recompute": "selective-op"}
    every = {"recompute_method": "every", "recompute_layers": int(option)}
    return {"recompute": "full", **(every if option != "1" else {})}


def deepspeed_claims(tree: object, told: Mapping[str, str]) -> Claims:
    """Return what a DeepSpeed JSON says."""
    claims: Claims = {"zero_stage": at(tree, "zero_optimization.stage", 0)}
    formats = [each for each in ("bf16", "fp16") if at(tree, f"{each}.enabled") is True]
    is_open = "auto" in (at(tree, "bf16.enabled"), at(tree, "fp16.enabled"))
    claims["precision"] = (formats or [told.get("precision") if is_open else "fp32"])[0]
    for field, key in (
        ("global_batch_size", "train_batch_size"),
        ("microbatch_size", "train_micro_batch_size_per_gpu"),
    ):
        if at(tree, key) not in INEXPRESSIBLE:
            claims[field] = at(tree, key)
    steps = at(tree, "gradient_accumulation_steps")
    if steps not in INEXPRESSIBLE and isinstance(steps, int):
        claims["num_microbatches"] = steps
    claims["tp"] = at(tree, "tensor_parallel.autotp_size", 0) or 1
    claims["offload"] = _offload(
        at(tree, "zero_optimization.offload_optimizer.device"),
        at(tree, "zero_optimization.offload_param.device"),
    )
    if at(tree, "zero_optimization.cpu_offload") is True:
        claims["offload"] = "optimizer"
    if str(at(tree, "optimizer.type", "AdamW")).lower() not in ADAM:
        claims["optimizer"] = at(tree, "optimizer.type")
    return claims


def accelerate_claims(tree: object, told: Mapping[str, str]) -> Claims:
    """Return what a YAML of ``accelerate config`` says."""
    kind, mixed = str(at(tree, "distributed_type")), str(at(tree, "mixed_precision", "no"))
    claims: Claims = {"precision": {"no": "fp32", "False": "fp32"}.get(mixed, mixed)}
    if at(tree, "num_processes") is not None:
        claims["world_size"] = at(tree, "num_processes")
    degrees = "parallelism_config.parallelism_config_"
    claims["tp"] = at(tree, degrees + "tp_size", 1)
    for field, key in (("dp_shard", "dp_shard_size"), ("cp", "cp_size")):
        if at(tree, degrees + key) is not None:
            claims[field] = at(tree, degrees + key)
    section = "fsdp_config." if kind == "FSDP" else "deepspeed_config."
    if kind == "FSDP":
        strategy = str(at(tree, section + "fsdp_sharding_strategy", "FULL_SHARD"))
        claims["zero_stage"] = 3 if strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "1", "2") else -1
        if at(tree, section + "fsdp_version", 1) == 1:
            claims["reshard_after_forward"] = strategy in ("FULL_SHARD", "1")
        full = at(tree, section + "fsdp_activation_checkpointing", False)  # noqa: FBT003
        claims["recompute"] = "full" if full else told.get("recompute", "none")
        claims["offload"] = "parameters" if at(tree, section + "fsdp_offload_params") else "none"
    elif kind == "DEEPSPEED":
        claims["zero_stage"] = at(tree, section + "zero_stage", 2)
        claims["offload"] = _offload(
            at(tree, section + "offload_optimizer_device"),
            at(tree, section + "offload_param_device"),
        )
        steps = at(tree, section + "gradient_accumulation_steps")
        if isinstance(steps, int):
            claims["num_microbatches"] = steps
        if at(tree, section + "deepspeed_config_file"):
            del claims["zero_stage"], claims["offload"], claims["precision"]
    elif kind in ("MULTI_GPU", "NO"):
        claims["zero_stage"] = 0
    else:
        claims["distributed_type"] = kind  # no plan has it
    return claims


def _offload(optimizer: object, parameters: object) -> str:
    if parameters not in (None, "none"):
        return "parameters"
    return "none" if optimizer in (None, "none") else "optimizer"
