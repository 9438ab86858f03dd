"""What a command of Megatron Bridge's run_recipe.py makes of a recipe.

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
    said = read_options(words, load_options(RUNNER))
    found = Options({}, {}, [], said.refusals)
    own: Keys = {}
    for name, value in said.keys.items():
        if "." in name:
            text = f"--{name} is no option of run_recipe.py; allowed: {name}=... as an override"
            found.refusals.append(f"line {said.lines[name]}: {text}")
        key = OPTIONS.get(name, name)
        (own if name in OPTIONS else found.keys)[key] = value
        found.lines[key] = said.lines[name]
    for word in said.words:
        _add_override(word, own, found)
    recipe, line = _recipe(found)
    if recipe is not None:
        _complete(recipe, line, own, found)
    return found


def _add_override(word: OptionWord, own: Keys, found: Options) -> None:
    match = OVERRIDE.fullmatch(word.text)
    if match is None:
        found.words.append(word)
        return
    sign, key, text = match.groups()
    known = "." in key or key in load_options(RECIPES)
    if sign == "~" or not known:
        found.refusals.append(f"line {word.line}: {shown(word.text)} is no override of a recipe")
        return
    own.pop(key, None)
    own[key] = Unknown(word.unknown) if word.unknown else _value(text)
    found.lines[key] = word.line


def _value(text: str) -> object:
    """Return a value as Hydra reads it; what is no plain one is a word."""
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
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
        return text[1:-1] if is_quoted else text


def _recipe(found: Options) -> tuple[Recipe | None, int]:
    """Return the recipe that a command names, and its line."""
    stem = found.keys.pop("model", None)
    line = found.lines.get("recipe") or found.lines.get("model", 0)
    name = found.keys.get("recipe") or (stem and f"{stem}_pretrain_config")
    if isinstance(stem, Unknown):
        name = stem
    if isinstance(name, str):
        found.keys["recipe"], found.lines["recipe"] = name, line
        try:
            return bridge_recipe(name), line
        except ProfileError:
            return None, line  # its entry tells
    why = name.why if isinstance(name, Unknown) else "names no recipe: --recipe is missing"
    found.refusals.append(f"line {line}: {why}" if line else why)
    found.keys.pop("recipe", None)
    return None, line


def _complete(recipe: Recipe, line: int, own: Keys, found: Options) -> None:
    """Add a recipe's keys below *own*, and what Bridge makes of both."""
    for section in (COMM_OVERLAP, PRECISION):
        is_replaced = section in own
        if recipe.has_section(section) and not is_replaced:
            continue
        for key in [each for each in own if each.startswith(f"{section}.")]:
            del own[key]
            text = f"{key}: {section} is no section with keys here; allowed: leave it out"
            found.refusals.append(f"line {found.lines[key]}: {text}")
    below = {
        key: value
        for key, value in recipe.keys.items()
        if not (PRECISION in own and key.startswith(f"{PRECISION}."))
    }
    keys = {**below, **own}
    found.lines.update(dict.fromkeys((each for each in keys if each not in found.lines), line))
    _derive_precision(keys, found)
    if any(keys.get(each) is True for each in SHARDS):
        keys |= dict.fromkeys(SHARDS, True)
    if recipe.has_section(COMM_OVERLAP):
        _derive_overlap(keys, found)
    found.keys.update(keys)


def _derive_precision(keys: Keys, found: Options) -> None:
    """Set whether gradients are reduced in fp32: mixed_precision overwrites what ddp says."""
    key, name = f"ddp.{REDUCE}", str(keys.get(PRECISION))
    said = f"{PRECISION}.{REDUCE}"
    found.lines[key] = found.lines[said if said in keys else PRECISION]
    keys[key] = keys.pop(said, not name.startswith("fp16"))


def _derive_overlap(keys: Keys, found: Options) -> None:
    """Set what comm_overlap overwrites (CommOverlapConfig.setup of training/comm_overlap.py).

    What it decides by the number of data-parallel ranks is left out.
    """
    virtual = keys.get("model.virtual_pipeline_model_parallel_size") or 1
    is_interleaved = virtual != 1 and keys.get("model.pipeline_model_parallel_size") != 1
    usual: Keys = dict.fromkeys(OF_MODEL, False)
    usual |= dict(zip(OF_PIPELINE, (is_interleaved, not is_interleaved), strict=True))
    for name, absent in usual.items():
        _move(f"{COMM_OVERLAP}.{name}", f"model.{name}", absent, keys, found)
    if keys.get(SHARDS[0]) is True:
        for name in OF_REPLICAS:
            usual_size = BUCKET if name == "bucket_size" else None
            _move(f"{COMM_OVERLAP}.{name}", f"ddp.{name}", usual_size, keys, found)
    for name in OF_REPLICAS:
        keys.pop(f"{COMM_OVERLAP}.{name}", None)


def _move(source: str, target: str, absent: object, keys: Keys, found: Options) -> None:
    said = keys.pop(source, None)
    keys[target] = absent if said is None else said
    if keys[target] is None:
        del keys[target]
    found.lines[target] = found.lines.get(source, found.lines["recipe"])


def said_of_section(recipe: Recipe, keys: Keys) -> Keys:
    """Return keys as a recipe wants them said: in its section comm_overlap where it has one."""
    if not recipe.has_section(COMM_OVERLAP):
        return keys
    moved = {f"model.{name}": f"{COMM_OVERLAP}.{name}" for name in (*OF_MODEL, *OF_PIPELINE)}
    if keys.get(SHARDS[0]) is True:
        moved |= {f"ddp.{name}": f"{COMM_OVERLAP}.{name}" for name in OF_REPLICAS}
    return {moved.get(key, key): value for key, value in keys.items()}
