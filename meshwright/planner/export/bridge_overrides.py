"""Keys of a command of Megatron Bridge's run_recipe.py: those of a recipe, then overrides.

The recipe's values come first, then the runner's own options, then overrides, the last of each.
What Bridge derives of them (runtime_config_update of training/config.py in v0.6.0) is derived here,
so that keys say what is run.
"""

import re
from collections.abc import Mapping, Sequence

from meshwright.hwprofiles import MEBI, ProfileError, shown
from meshwright.planner.configuration import (
    Options,
    OptionWord,
    Unknown,
    load_options,
    read_options,
)
from meshwright.planner.export.recipes import Recipe, load_recipes
from meshwright.planner.tables import Keys

RECIPES = "megatron-bridge-0.6"
RUNNER = "megatron-bridge-run-0.6"
# COMMON_OVERRIDE_FIELDS of run_recipe.py, of those that are read.
OPTIONS: Mapping[str, str] = {
    "global-batch-size": "train.global_batch_size",
    "micro-batch-size": "train.micro_batch_size",
    "seq-length": "dataset.seq_length",
    "tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "context-parallel-size": "model.context_parallel_size",
    "virtual-pipeline-model-parallel-size": "model.virtual_pipeline_model_parallel_size",
    "expert-model-parallel-size": "model.expert_model_parallel_size",
    "expert-tensor-parallel-size": "model.expert_tensor_parallel_size",
}
OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
LIST = re.compile(r"\[([^\[\]]*)\]")
WHOLE = re.compile(r"[+-]?\d{1,18}")
PLAIN: Mapping[str, object] = {"null": None, "true": True, "false": False}
# A section of a recipe, and what its keys decide where there is one.
COMM_OVERLAP, PRECISION = "comm_overlap", "mixed_precision"
OF_MODEL = ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
OF_PIPELINE = ("overlap_p2p_comm", "batch_p2p_comm")
OF_REPLICAS = ("overlap_grad_reduce", "overlap_param_gather", "bucket_size")
BUCKET = 128 * MEBI  # parameters of a bucket where nothing says how many
REDUCE = "grad_reduce_in_fp32"
SHARDS = ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer")


def bridge_recipe(name: str) -> Recipe:
    """Return a recipe; raises ProfileError where it is unknown, or in no plan."""
    return load_recipes(RECIPES).find(name)


def read_overrides(words: Sequence[OptionWord]) -> Options:
    """Return the keys that a command of run_recipe.py sets, its recipe's among them.

    A key of the recipe stands on the line that names it.
    """
    runner_options = read_options(words, load_options(RUNNER))
    parsed = Options({}, {}, [], runner_options.refusals)
    overrides: Keys = {}
    for name, value in runner_options.keys.items():
        # Overrides of Hydra have no dashes.
        if "." in name:
            text = f"--{name} is no option of run_recipe.py; allowed: {name}=... as an override"
            parsed.refusals.append(f"line {runner_options.lines[name]}: {text}")
        key = OPTIONS.get(name, name)
        (overrides if name in OPTIONS else parsed.keys)[key] = value
        parsed.lines[key] = runner_options.lines[name]
    for word in runner_options.words:
        _add_override(word, overrides, parsed)
    recipe, line = _recipe(parsed)
    if recipe is not None:
        _complete(recipe, line, overrides, parsed)
    return parsed


def _add_override(word: OptionWord, overrides: Keys, parsed: Options) -> None:
    match = OVERRIDE.fullmatch(word.text)
    if match is None:
        parsed.words.append(word)
        return
    sign, key, text = match.groups()
    is_key = "." in key or key in load_options(RECIPES)
    if sign == "~" or not is_key:
        parsed.refusals.append(f"line {word.line}: {shown(word.text)} is no override of a recipe")
        return
    # Of several overrides of a key the last counts.
    overrides.pop(key, None)
    overrides[key] = Unknown(word.unknown) if word.unknown else _value(text)
    parsed.lines[key] = word.line


def _value(text: str) -> object:
    """Return a value as Hydra reads it: a text where it is nothing else."""
    listed = LIST.fullmatch(text)
    if listed:
        return [_value(each.strip()) for each in listed[1].split(",") if each.strip()]
    if text.lower() in PLAIN:
        return PLAIN[text.lower()]
    if WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        # Quotes are Hydra's, not part of the value.
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if is_quoted else text


def _recipe(parsed: Options) -> tuple[Recipe | None, int]:
    """Return the recipe that a command names, and its line."""
    # The runner's --model names a recipe without its ending.
    stem = parsed.keys.pop("model", None)
    line = parsed.lines.get("recipe") or parsed.lines.get("model", 0)
    name = parsed.keys.get("recipe") or (stem and f"{stem}_pretrain_config")
    if isinstance(stem, Unknown):
        name = stem
    if isinstance(name, str):
        parsed.keys["recipe"], parsed.lines["recipe"] = name, line
        try:
            return bridge_recipe(name), line
        except ProfileError:
            return None, line  # its entry tells
    why = name.why if isinstance(name, Unknown) else "names no recipe: --recipe is missing"
    parsed.refusals.append(f"line {line}: {why}" if line else why)
    parsed.keys.pop("recipe", None)
    return None, line


def _complete(recipe: Recipe, line: int, overrides: Keys, parsed: Options) -> None:
    """Add a recipe's keys below *overrides*, and the keys that Bridge derives of both."""
    for section in (COMM_OVERLAP, PRECISION):
        is_replaced = section in overrides
        if recipe.has_section(section) and not is_replaced:
            continue
        for key in [each for each in overrides if each.startswith(f"{section}.")]:
            del overrides[key]
            text = f"{key}: {section} is no section with keys here; allowed: leave it out"
            parsed.refusals.append(f"line {parsed.lines[key]}: {text}")
    below = {
        key: value
        for key, value in recipe.keys.items()
        if not (PRECISION in overrides and key.startswith(f"{PRECISION}."))
    }
    keys = {**below, **overrides}
    parsed.lines.update(dict.fromkeys((each for each in keys if each not in parsed.lines), line))
    _derive_precision(keys, parsed)
    # DistributedDataParallel and the optimizer have to agree on the distributed optimizer.
    if any(keys.get(each) is True for each in SHARDS):
        keys |= dict.fromkeys(SHARDS, True)
    if recipe.has_section(COMM_OVERLAP):
        _derive_overlap(keys, parsed)
    parsed.keys.update(keys)


def _derive_precision(keys: Keys, parsed: Options) -> None:
    """Set whether gradients are reduced in fp32: mixed_precision overwrites what ddp says."""
    key, name = f"ddp.{REDUCE}", str(keys.get(PRECISION))
    source = f"{PRECISION}.{REDUCE}"
    parsed.lines[key] = parsed.lines[source if source in keys else PRECISION]
    # Unless the recipe says otherwise fp16 alone reduces gradients in its own format.
    keys[key] = keys.pop(source, not name.startswith("fp16"))


def _derive_overlap(keys: Keys, parsed: Options) -> None:
    """Set what comm_overlap overwrites (CommOverlapConfig.setup of training/comm_overlap.py).

    What it decides by the number of data-parallel ranks is left out.
    """
    virtual = keys.get("model.virtual_pipeline_model_parallel_size") or 1
    # Interleaved stages overlap their p2p messages, others batch them.
    is_interleaved = virtual != 1 and keys.get("model.pipeline_model_parallel_size") != 1
    defaults: Keys = dict.fromkeys(OF_MODEL, False)
    defaults |= dict(zip(OF_PIPELINE, (is_interleaved, not is_interleaved), strict=True))
    for name, absent in defaults.items():
        _move(f"{COMM_OVERLAP}.{name}", f"model.{name}", absent, keys, parsed)
    # These overlap buckets of the distributed optimizer: without it they have no effect.
    if keys.get(SHARDS[0]) is True:
        for name in OF_REPLICAS:
            default_size = BUCKET if name == "bucket_size" else None
            _move(f"{COMM_OVERLAP}.{name}", f"ddp.{name}", default_size, keys, parsed)
    for name in OF_REPLICAS:
        keys.pop(f"{COMM_OVERLAP}.{name}", None)


def _move(source: str, target: str, absent: object, keys: Keys, parsed: Options) -> None:
    value = keys.pop(source, None)
    keys[target] = absent if value is None else value
    if keys[target] is None:
        del keys[target]
    parsed.lines[target] = parsed.lines.get(source, parsed.lines["recipe"])


def keys_by_section(recipe: Recipe, keys: Keys) -> Keys:
    """Return keys as a recipe takes them: in its section comm_overlap where it has one."""
    if not recipe.has_section(COMM_OVERLAP):
        return keys
    moved = {f"model.{name}": f"{COMM_OVERLAP}.{name}" for name in (*OF_MODEL, *OF_PIPELINE)}
    if keys.get(SHARDS[0]) is True:
        moved |= {f"ddp.{name}": f"{COMM_OVERLAP}.{name}" for name in OF_REPLICAS}
    return {moved.get(key, key): value for key, value in keys.items()}
