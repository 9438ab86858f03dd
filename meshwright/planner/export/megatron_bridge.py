"""Megatron Bridge: a recipe with overrides of its ConfigContainer.

Overrides are those of scripts/training/run_recipe.py in v0.6.0
(https://github.com/NVIDIA-NeMo/Megatron-Bridge, commit 51885cf1); recipes and options are data.
"""

from collections.abc import Mapping
from typing import cast

from meshwright.hwprofiles import Precision, ProfileError
from meshwright.planner.export import megatron_core
from meshwright.planner.export.bridge_overrides import (
    bridge_recipe,
    keys_by_section,
    read_overrides,
)
from meshwright.planner.export.megatron_core import CODECS
from meshwright.planner.export.recipes import Recipe
from meshwright.planner.tables import (
    Codec,
    Export,
    Facts,
    FileValues,
    Keys,
    MissingError,
    Program,
    Roles,
    single_quoted,
    theirs,
)
from meshwright.simulator import ModelSpec, PlanError, load_model

NULL_TOKENIZER = "NullTokenizer"
BUCKET, PER_REPLICA = "gradient_bucket_parameters", "gradient_bucket_parameters_per_replica"
USUAL_BUCKET, USUAL_PER_REPLICA = 40_000_000, 1_000_000
# What the dtypes of moments are called here; the first is that of any other optimizer.
MOMENTS = {
    "float32": Precision.FP32,
    "float16": Precision.FP16,
    "bfloat16": Precision.BF16,
    "uint8": Precision.FP8,
}


def _command(export: Export) -> tuple[str, ...]:
    keys = dict(export.keys)
    recipe = str(keys.pop("recipe"))
    start = f"scripts/training/run_recipe.py --recipe {recipe} --mode pretrain --dataset mock"
    overrides = keys_by_section(bridge_recipe(recipe), keys)
    return (start, *(single_quoted(f"{key}={_hydra(value)}") for key, value in overrides.items()))


def _hydra(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    return "null" if value is None else theirs(value)


def _read_model(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the model of a recipe, with the vocabulary that its tokenizer has.

    Raises:
        MissingError: If the tokenizer is one of which only ``--model`` says how many words it has.
    """
    if "recipe" not in keys:
        return {}
    try:
        recipe = bridge_recipe(words.word(keys, "recipe", ""))
    except ProfileError as error:
        raise PlanError(str(error)) from None
    if not recipe.model:
        _check_sizes(recipe, facts.model)
        return {}
    model = load_model(recipe.model)
    assert isinstance(model, ModelSpec)  # recipes of others are in no plan
    model = _resized(model, recipe.sizes, recipe.release)
    tokenizer = keys.get(roles["file"])
    # With another tokenizer than the recipe's the vocabulary is another.
    if keys.get(roles["flag"]) and tokenizer != (recipe.release or None):
        if keys.get(roles["kind"]) == NULL_TOKENIZER:
            vocab_size = words.whole(keys, roles["size"], model.vocab_size)
        elif facts.model is None:
            raise MissingError("model", f"{roles['file']}={tokenizer} decides its vocabulary")
        else:
            vocab_size = facts.model.vocab_size
        name = f"{model.name}-vocab-{vocab_size}"
        model = _resized(model, {"vocab_size": vocab_size}, name)
    return {"model": model}


def _resized(model: ModelSpec, sizes: Mapping[str, int], name: str) -> ModelSpec:
    """Return a model with other sizes, and another name if any of them differs."""
    if all(getattr(model, key) == value for key, value in sizes.items()):
        return model
    name = name.rpartition("/")[2].lower()
    labels = {"name": name, "title": name, "source": "Megatron Bridge v0.6.0"}
    return model.model_copy(update={**sizes, **labels})


def _check_sizes(recipe: Recipe, model: ModelSpec | None) -> None:
    """Raise PlanError where a model given beside a recipe has other sizes than are known of it."""
    for key, value in recipe.sizes.items():
        if model is not None and key != "vocab_size" and getattr(model, key) != value:
            difference = f"{key} {theirs(getattr(model, key))}, not {theirs(value)}"
            raise PlanError(f"{model.name} is not the model of this recipe: {difference}")


def _write_stages(roles: Roles, facts: Facts) -> Keys:
    layout = dict(CODECS["layout of Megatron"].write(roles, facts))  # type: ignore[misc]
    return layout | {roles["embedding"]: False, roles["loss"]: False}


def _read_stages(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return stages; embedding and loss may each count as a layer of the even split."""
    layout = dict(CODECS["layout of Megatron"].read(roles, keys, facts, words))  # type: ignore[misc]
    first, last = (keys.get(roles[each]) is True for each in ("embedding", "loss"))
    if not (first or last):
        return layout
    if keys.get(roles["layout"]) is not None:
        raise words.unknown(roles["layout"], keys[roles["layout"]], ("leave it out",))
    if facts.model is None:
        raise MissingError("model", "its layers and ends are shared out evenly")
    # Layers are shared out over all virtual stages.
    count = facts.number("pp") * cast("int", layout["num_virtual_stages"])
    each, rest = divmod(facts.model.num_layers + first + last, count)
    if rest:
        raise words.unknown(roles["embedding"], first, (f"layers and ends in {count} alike",))
    stages = [each] * count
    # Both ends take the place of a layer.
    stages[0] -= first
    stages[-1] -= last
    return layout | {"stages": tuple(stages)}


def _read_gradients(roles: Roles, keys: Keys, facts: Facts, _: FileValues) -> Keys:
    stored = cast("Precision | None", facts.get("storage"))
    # Gradients of fp16 are kept in fp16 unless told, those of bf16 in fp32.
    is_half = keys.get(roles["fp32"], stored is not Precision.FP16) is False
    return {"gradient_precision": stored if is_half and stored is not None else Precision.FP32}


def _overlap(fact: str) -> Codec:
    """Return the codec of overlapping data-parallel collectives with computation.

    Where comm_overlap decides it they do with several data-parallel ranks, of which those of
    context parallelism are none (_get_optimizer_overlap_cfgs of comm_overlap.py).
    """

    def read(roles: Roles, keys: Keys, facts: Facts, _: FileValues) -> Keys:
        switch = keys.get(roles["switch"])
        if switch is None:
            model_ranks = facts.number("tp") * facts.number("pp") * facts.number("cp")
            return {fact: facts.world_size > model_ranks}
        return {fact: switch is True}

    return Codec(lambda roles, facts: {roles["switch"]: facts.get(fact)}, read)


def _write_bucket(roles: Roles, facts: Facts) -> Keys:
    per_replica = cast("int", facts.get(f"stack.{PER_REPLICA}"))
    # Gradients are reduced over data-parallel and context-parallel ranks.
    ranks = facts.number("dp") * facts.number("cp")
    return {roles["size"]: max(cast("int", facts.get(f"stack.{BUCKET}")), per_replica * ranks)}


def _read_bucket(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the bucket size in parameters, unless it is the default.

    That is distributed_data_parallel.py of megatron/core/distributed.
    """
    if keys.get(roles["size"]) is None:
        return {}
    ranks = facts.world_size // (facts.number("tp") * facts.number("pp"))
    size = words.whole(keys, roles["size"], 1)
    default_size = max(USUAL_BUCKET, USUAL_PER_REPLICA * ranks)
    return {} if size == default_size else {f"stack.{BUCKET}": size, f"stack.{PER_REPLICA}": 0}


def _write_moments(roles: Roles, facts: Facts) -> Keys:
    moments = facts.get("moment_precision")
    if moments is None:
        return {roles["switch"]: False}
    name = next(name for name, each in MOMENTS.items() if each is moments)
    return {roles["switch"]: True} | {roles[each]: f"torch.{name}" for each in ("first", "second")}


def _read_moments(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    if keys.get(roles["switch"]) is not True:
        return {}
    formats = {
        role: words.word(keys, roles[role], "float32").removeprefix("torch.")
        for role in ("first", "second", "gradients")
    }
    if formats["first"] not in MOMENTS:
        raise words.unknown(roles["first"], formats["first"], MOMENTS)
    for role, allowed in (("second", (formats["first"],)), ("gradients", ("float32", "bfloat16"))):
        if formats[role] not in allowed:
            raise words.unknown(roles[role], formats[role], allowed)
    return {"moment_precision": MOMENTS[formats["first"]]}


PROGRAM = Program(
    command=_command,
    is_script=lambda _: True,
    read_words=read_overrides,
    codecs={
        **megatron_core.CODECS,
        "recipe of Bridge": Codec(read=_read_model),
        "layout of Bridge": Codec(_write_stages, _read_stages),
        "gradients of Bridge": Codec(lambda *_: {}, _read_gradients),
        "overlap of gradients": _overlap("stack.overlap_gradient_reduce"),
        "overlap of weights": _overlap("stack.overlap_parameter_gather"),
        "bucket of Bridge": Codec(_write_bucket, _read_bucket),
        "moments of Bridge": Codec(_write_moments, _read_moments),
    },
)
