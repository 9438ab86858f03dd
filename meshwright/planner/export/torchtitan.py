"""torchtitan: TOML up to 0.2, options of its command from 0.3 on."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from meshwright.hwprofiles import Kernels, Precision, Recompute, RecomputeMethod, StageSplit
from meshwright.planner.configuration import (
    Options,
    OptionWord,
    load_options,
    read_options,
    toml_text,
)
from meshwright.planner.export.flavors import load_flavors, read_config, read_flavor
from meshwright.planner.tables import (
    Codec,
    Export,
    Facts,
    FileValues,
    Keys,
    MissingError,
    Program,
    Roles,
    remarks,
    spelled,
    tyro_options,
)
from meshwright.simulator import PlanError

TOML, COMMAND = "0.2", "0.3"
CHECKPOINT, COMPILED = "activation-checkpoint:", "compile.components"
COMMAND_OPTIONS = "torchtitan-0.3"
PARTS = "parallelism.module_fqns_per_model_part"
SELECTIVE, OPERATORS = "selective", "op"
FORMATS = {"bfloat16": Precision.BF16, "float32": Precision.FP32}
# The converter, and what it was called up to 0.1.
FLOAT8 = ("quantize.linear.float8",), ("float8",)
MODES: Mapping[str, Recompute] = {
    "none": Recompute.NONE,
    SELECTIVE: Recompute.SELECTIVE_OP,
    "full": Recompute.FULL,
}


def _write_replicas(roles: Roles, facts: Facts) -> Keys:
    """Return the data-parallel degrees: replicate groups, and the shards of each."""
    shards = facts.number("dp_shard")
    return {roles["replicate"]: facts.number("dp") // shards, roles["shard"]: shards}


def _read_replicas(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    shard = roles["shard"]
    replicas = words.whole(keys, roles["replicate"], 1)
    shards = words.whole(keys, shard, -1, least=-1)
    model_ranks = facts.number("tp") * facts.number("pp") * facts.number("cp")
    # -1 stands for all ranks that are left.
    if shards == -1:
        if facts.get("world_size") is None:
            raise MissingError("world_size", f"{shard} is what it leaves")
        shards = facts.world_size // (model_ranks * replicas)
    dp = replicas * shards
    return {"dp": dp, "dp_shard": shards, "world_size": dp * model_ranks}


def _write_batches(roles: Roles, facts: Facts) -> Keys:
    """Return the batch sizes: a pipeline takes all microbatches of a rank in one call."""
    batch, local, micro = (roles[name] for name in ("batch", "local", "own"))
    size = facts.number("microbatch_size")
    batches: Keys = {batch: facts.number("global_batch_size")}
    if facts.number("pp") == 1:
        return {**batches, local: size}
    return {**batches, local: size * facts.num_microbatches, micro: size}


def _read_batches(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    local = words.whole(keys, roles["local"], 8)
    pass_size = local * facts.number("dp")
    batch = words.whole(keys, roles["batch"], -1, least=-1)
    batch = pass_size if batch < 0 else batch
    if facts.number("pp") == 1:
        return {"global_batch_size": batch, "microbatch_size": local}
    # A pipeline takes the whole batch of a rank in one call: nothing accumulates.
    if batch != pass_size:
        raise words.unknown(roles["local"], local, (batch // facts.number("dp"),))
    return {"global_batch_size": batch, "microbatch_size": keys.get(roles["own"], 1)}


def _write_stages(head: str, roles: Roles, facts: Facts) -> Keys:
    """Return the modules of each stage by name, the last with the model's *head*."""
    if facts.number("pp") == 1:
        return {}
    layers = iter(range(sum(stages := cast("tuple[int, ...]", facts.get("stages")))))
    parts = [[f"layers.{next(layers)}" for _ in range(count)] for count in stages]
    parts[0][:0] = ["tok_embeddings"]
    parts[-1] += ["norm", head]
    return {roles["parts"]: parts}


def _read_stages(head: str, roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    key, pp = roles["parts"], facts.number("pp")
    if pp == 1:
        return {}
    if key not in keys:
        return _even_stages(roles["size"], keys, facts, words)
    parts = words.lists(keys, key)
    stages = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
    # Written again as a plan has them, so that any other order of modules is refused.
    rewritten = _write_stages(head, roles, Facts({"pp": pp, "stages": stages}))
    if rewritten != {key: parts} or len(parts) % pp:
        raise PlanError(
            f"{key} of torchtitan is in no plan; allowed: the modules in their order, "
            f"stages a multiple of {pp}"
        )
    return {"stages": stages, "num_virtual_stages": len(parts) // pp}


def _even_stages(key: str, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return stages as pipeline_llm makes them: two on a rank that interleaves, or by a size.

    Ends count as a layer each.
    """
    # Schedules of several stages a rank get two by default.
    interleaves, pp = facts.get("schedule") == "interleaved", facts.number("pp")
    virtual = 2 if interleaves else 1
    if keys.get(key) is not None:
        size = words.whole(keys, key, 1)
        if facts.model is None:
            raise MissingError("model", f"{key} is of its layers")
        parts = -(-(facts.model.num_layers + 2) // size)
        virtual = parts // pp
        if parts % pp or interleaves != (virtual > 1):
            allowed = f"stages a multiple of {pp}, {'several' if interleaves else 'one'} a rank"
            raise words.unknown(key, size, (allowed,))
    return {"stages": StageSplit.ENDS, "num_virtual_stages": virtual}


def _write_reshard(roles: Roles, facts: Facts) -> Keys:
    reshards = facts.get("reshard_after_forward")
    # By default FSDP reshards after forward, but not within a pipeline.
    if reshards == (facts.number("pp") == 1):
        return {}
    return {roles["policy"]: "always" if reshards else "never"}


def _read_reshard(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    choices = {"default": facts.number("pp") == 1, "always": True, "never": False}
    policy = str(keys.get(roles["policy"], "default"))
    if policy not in choices:
        raise words.unknown(roles["policy"], policy, choices)
    return {"reshard_after_forward": choices[policy]}


def _read_precision(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the format; a section of float8 counts where its converter is named."""
    param = str(keys.get(roles["param"], "bfloat16"))
    if param not in FORMATS:
        raise words.unknown(roles["param"], param, FORMATS)
    converters = words.names(keys, roles["converters"], ())
    if not converters:
        return {"precision": FORMATS[param]}
    # Other converters (MXFP8, expert quantization) change formats that no plan has.
    if converters not in FLOAT8:
        raise words.unknown(roles["converters"], list(converters), ([], list(FLOAT8[0])))
    allowed_values: Mapping[str, tuple[object, ...]] = {
        "param": ("bfloat16",),
        "filtered": (["output"],),
        "recipe": (None, "tensorwise"),
        "emulates": (False,),
    }
    defaults: Keys = {roles["param"]: "bfloat16", roles["filtered"]: []}
    for role, allowed in allowed_values.items():
        words.held({**defaults, **keys}, roles[role], allowed)
    return {"precision": Precision.FP8}


def _read_compiled(_: Roles, keys: Keys, _facts: Facts, words: FileValues) -> Keys:
    """Return the kernels of layers; a compiled loss is in no plan."""
    components = words.names(keys, COMPILED, ("model", "loss"))
    switch = keys.get("compile.enable", False)
    if type(switch) is not bool:
        raise words.unknown("compile.enable", switch, (True, False))
    if not switch:
        return {"stack.kernels": Kernels.EAGER}
    if "loss" in components:
        raise words.unknown(COMPILED, list(components), (["model"],))
    return {"stack.kernels": Kernels.COMPILED if "model" in components else Kernels.EAGER}


def _write_checkpoints(roles: Roles, facts: Facts) -> Keys:
    mode, option = roles["mode"], roles["option"]
    number = facts.get("recompute_layers")
    if number is not None:
        return {mode: SELECTIVE, option: str(number)}
    mode_name = next(each for each, ours in MODES.items() if ours is facts.get("recompute"))
    return {mode: mode_name, **({option: OPERATORS} if mode_name == SELECTIVE else {})}


def _read_checkpoints(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    mode, option = keys.get(roles["mode"], SELECTIVE), str(keys.get(roles["option"], "2"))
    if spelled(mode) not in MODES:
        raise words.unknown(roles["mode"], mode, MODES)
    if mode != SELECTIVE or option == OPERATORS:
        return {"recompute": MODES[spelled(mode)]}
    if not option.isdecimal():
        raise words.unknown(roles["option"], option, (OPERATORS, "a number of layers"))
    # Of 0, as of 1, all layers run again (`_apply_layer_sac`).
    return {
        "recompute": Recompute.FULL,
        "recompute_layers": max(1, int(option)),
        "recompute_method": RecomputeMethod.EVERY,
    }


def _files(export: Export) -> Mapping[str, str]:
    if export.version == COMMAND:
        return {}
    return {"train.toml": remarks(export.remarks) + toml_text(export.keys)}


def _command(export: Export) -> tuple[str, ...]:
    start = "-m torchtitan.train"
    if export.version == TOML:
        return (start, "--job.config_file train.toml")
    # The configuration is the command itself: there is no file.
    keys = dict(export.keys)
    checkpoint = keys.pop("activation-checkpoint")  # a subcommand, which has to be the last word
    return (start, *tyro_options(keys), f"activation-checkpoint:{checkpoint}")


def _read_words(words: Sequence[OptionWord]) -> Options:
    """Return the options of a command of 0.3, which tyro parses: ``--a.no-b`` is a false ``a.b``.

    What it leaves out is as in the configuration that it names.
    """
    checkpoint = [each for each in words if each.text.startswith(CHECKPOINT)]
    other_words = [each for each in words if each not in checkpoint]
    parsed = read_options(other_words, load_options(COMMAND_OPTIONS))
    for key in [each for each in parsed.keys if ".no-" in each or ".no_" in each]:
        value, line = parsed.keys.pop(key), parsed.lines.pop(key)
        # tyro turns the name of a flag around instead of giving it a value.
        positive = re.sub(r"\.no[-_]", ".", key).replace("-", "_")
        parsed.keys[positive], parsed.lines[positive] = value is not True, line
    for key, split in ((PARTS, _parts), (COMPILED, _names)):
        if key in parsed.keys:
            parsed.keys[key] = split(parsed.keys[key])
    key = CHECKPOINT.rstrip(":")
    for each in checkpoint:
        parsed.keys[key], parsed.lines[key] = each.text.removeprefix(CHECKPOINT), each.line
    config = load_flavors().configs.get(str(parsed.keys.get("config")))
    return parsed if config is None else parsed._replace(keys={**config.keys, **parsed.keys})


def _words_of(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else str(value).split()


def _parts(value: object) -> list[list[str]]:
    return [each.split(",") for each in _words_of(value)]


def _names(value: object) -> list[str]:
    return [name for each in _words_of(value) for name in each.split(",")]


PROGRAM = Program(
    files=_files,
    command=_command,
    is_script=lambda version: version == COMMAND,
    read_words=_read_words,
    codecs={
        "flavor of torchtitan": Codec(read=read_flavor),
        "configuration of torchtitan": Codec(read=read_config),
        "replicas of torchtitan": Codec(_write_replicas, _read_replicas),
        "batches of torchtitan": Codec(_write_batches, _read_batches),
        "modules of torchtitan 0.2": Codec(
            partial(_write_stages, "output"), partial(_read_stages, "output")
        ),
        "modules of torchtitan 0.3": Codec(
            partial(_write_stages, "lm_head"), partial(_read_stages, "lm_head")
        ),
        "precision of torchtitan": Codec(read=_read_precision),
        "reshard of torchtitan": Codec(_write_reshard, _read_reshard),
        "compiled of torchtitan": Codec(read=_read_compiled),
        "checkpoints of torchtitan": Codec(_write_checkpoints, _read_checkpoints),
    },
)
