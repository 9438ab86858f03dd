"""transformers' Trainer, LLaMA-Factory and axolotl: what their tables cannot say.

Rules are those of transformers 5.23 (training_args.py, trainer.py, integrations/deepspeed.py),
LLaMA-Factory 0.9.6.dev0 and axolotl 0.18.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import FileKind, Precision, shown
from meshwright.planner.export import (
    FRAMEWORKS,
    Codec,
    Codecs,
    Facts,
    FileWords,
    Keys,
    MissingError,
    Program,
    Roles,
)
from meshwright.planner.formats.included import CONFIG, MARK, with_included
from meshwright.simulator import PlanError, load_model

HUB_FILE = Path(__file__).resolve().parents[1] / "data" / "hub_models.csv"
HUB_TABLE = FileKind(title="table of models", most_bytes=1_000_000)
SWITCH = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
AUTO = "auto"
# Of AdamW on weights, gradients and moments of 16 bits: reads four of them and writes three.
IN_16_BITS: Mapping[str, object] = {
    "stack.parameter_bytes": 2,
    "stack.sharded_parameter_bytes": 2,
    "stack.gradient_bytes": 2,
    "stack.gradient_reduce_bytes": 2,
    "stack.gradient_precisions": '[["bf16", "bf16"]]',
    "stack.optimizer_bytes": 4,
    "stack.optimizer_traffic_bytes": 14,
}
# Without casts of DDP's autocast; a gradient is added to another: reads two, writes one.
DDP_IN_16_BITS = {"stack.autocast": False, "stack.accumulation_traffic_bytes": 6}


class Dialect(NamedTuple):
    """What a trainer does where its configuration says nothing.

    Args:
        microbatch_size: Sequences of a rank's pass.
        bf16: Its ``bf16``.
        fsdp_version: Of FSDP; None where nothing else is known.
        recomputes: Whether it recomputes layers.
        is_reentrant: Whether recomputation is PyTorch's older one, which runs a layer to its end.
    """

    microbatch_size: int
    bf16: bool | str
    fsdp_version: int
    recomputes: bool = False
    is_reentrant: bool = False


TRANSFORMERS = Dialect(microbatch_size=8, bf16=False, fsdp_version=2)
# transformers 5.8, the newest that it takes.
LLAMA_FACTORY = Dialect(
    microbatch_size=8, bf16=False, fsdp_version=1, recomputes=True, is_reentrant=True
)
AXOLOTL = Dialect(microbatch_size=1, bf16=AUTO, fsdp_version=1)


def switch(words: FileWords, keys: Keys, key: str, usual: bool) -> bool:
    """Return whether a switch is on; of a command its value may be a word.

    Raises:
        PlanError: If it is neither on nor off.
    """
    value = keys.get(key, usual) if key else usual
    if value is None:
        return False
    known = SWITCH.get(str(value).lower())
    if known is None:
        raise words.unknown(key, shown(value), (True, False))
    return known


def model_of(roles: Roles, keys: Keys, facts: Facts, _: FileWords) -> Keys:
    """Return the model that a path of a configuration, or a name on the hub, stands for."""
    paths = _listed(roles, "path")
    value = next((keys[key] for key in paths if keys.get(key) is not None), None)
    if isinstance(value, str) and Path(value).name == CONFIG:
        return {"model": load_model(value)}
    known = hub_models().get(str(value))
    if known is not None:
        return {"model": known}
    if facts.get("model") is not None or facts.model is not None:
        return {}
    said = f"{paths[-1]}={shown(value)}" if value else f"no {paths[-1]}"
    raise MissingError("model", f"{said} is no model that is known by its name")


def hub_models() -> Mapping[str, str]:
    """Return the built-in models that are those of the hub, by their names there."""
    _, lines = HUB_TABLE.parse_table(HUB_FILE.read_text("utf-8"), HUB_FILE.name)
    return {cells["id"]: cells["model"] for _, cells in lines}


def batches(dialect: Dialect) -> Codec:
    """Return the codec of a batch: microbatch, times accumulation steps, times replicas."""

    def read(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
        size = _count(roles, keys, words, "micro", dialect.microbatch_size)
        steps = _count(roles, keys, words, "steps", 1)
        total = roles.get("total", "")
        if keys.get(total) is not None and keys.get(roles["steps"]) is None:
            steps = words.whole(keys, total, size) // size
        dp = facts.world_size // facts.number("tp")
        found = {"micro": size, "steps": steps, "batch": size * steps * dp}
        for name, value in found.items():
            # transformers fills in what is auto, and refuses what is not the same.
            key = roles.get(f"deepspeed_{name}", "")
            if key in keys and keys[key] not in (AUTO, value):
                raise words.unknown(key, keys[key], (value, AUTO))
        return {"microbatch_size": size, "global_batch_size": found["batch"], "dp": dp}

    return Codec(read=read)


def _count(roles: Roles, keys: Keys, words: FileWords, role: str, usual: int) -> int:
    key = roles[role]
    return usual if keys.get(key) is None else words.whole(keys, key, usual)


def _mixed(dialect: Dialect, roles: Roles, keys: Keys, words: FileWords) -> Precision | None:
    """Return the format of mixed precision; None where there is none."""
    bf16, fp16 = roles["bf16"], roles["fp16"]
    is_auto = keys.get(bf16, dialect.bf16) == AUTO
    is_half = switch(words, keys, fp16, usual=False)
    is_bf16 = not is_half if is_auto else switch(words, keys, bf16, usual=False)
    if is_half and is_bf16:
        raise PlanError(f"{bf16} and {fp16} of {words.framework} are both on; allowed: one of them")
    return Precision.BF16 if is_bf16 else Precision.FP16 if is_half else None


def plain_precision(dialect: Dialect) -> Codec:
    """Return the codec of the format where the weights' own is what a script loads them in."""

    def read(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
        mixed = _mixed(dialect, roles, keys, words)
        said = next((keys[key] for key in _listed(roles, "dtype") if key in keys), AUTO)
        known = {"float32": Precision.FP32, "bfloat16": Precision.BF16, AUTO: None}
        if said not in known:
            raise words.unknown(_listed(roles, "dtype")[0], said, known)
        weights = known[str(said)]
        if mixed is None:
            return _unmixed(weights, facts, roles)
        if weights is None:
            given = facts.get("gradient_precision")
            if given is None:
                why = "that of the weights: fp32 where the script loads them with dtype float32"
                raise MissingError("gradient_precision", why)
            weights = Precision(str(given))
        return _ddp_formats(mixed, weights, words)

    return Codec(read=read)


def _unmixed(weights: Precision | None, facts: Facts, roles: Roles) -> Keys:
    given = weights or facts.get("precision")
    if given is None:
        why = f"neither {roles['bf16']} nor {roles['fp16']}: that in which the script loads weights"
        raise MissingError("precision", why)
    weights = Precision(str(given))
    low = {} if weights is Precision.FP32 else {**IN_16_BITS, **DDP_IN_16_BITS}
    return {"precision": weights, "gradient_precision": weights, **low}


def _ddp_formats(mixed: Precision, weights: Precision, words: FileWords) -> Keys:
    if weights is Precision.FP32:
        return {"precision": mixed, "gradient_precision": weights}
    if weights is not Precision.BF16 or mixed is not Precision.BF16:
        raise PlanError(f"weights in {weights} of {words.framework} do not train in {mixed}")
    low = {**IN_16_BITS, **DDP_IN_16_BITS}
    return {"precision": mixed, "gradient_precision": weights, **low}


def master_precision(dialect: Dialect) -> Codec:
    """Return the codec of the format where weights are kept in fp32."""

    def read(roles: Roles, keys: Keys, _: Facts, words: FileWords) -> Keys:
        mixed = _mixed(dialect, roles, keys, words) or Precision.FP32
        return {"precision": mixed, "gradient_precision": Precision.FP32}

    return Codec(read=read)


def _axolotl_ddp(roles: Roles, keys: Keys, _: Facts, words: FileWords) -> Keys:
    """Return the formats of axolotl's DDP: it loads weights in the format of the products.

    Norms and embeddings become fp32 ones unless FlashAttention is asked for (loaders/model.py).
    """
    mixed = _mixed(AXOLOTL, roles, keys, words)
    if mixed is None:
        return {"precision": Precision.FP32, "gradient_precision": Precision.FP32}
    asked = keys.get(roles["attention"]) == "flash_attention_2"
    if mixed is Precision.BF16 and (asked or keys.get(roles["flash"]) is True):
        return _ddp_formats(mixed, Precision.BF16, words)
    raise PlanError(
        f"{roles['bf16']} of {words.framework} without FSDP or DeepSpeed keeps part of the weights "
        f"in fp32 and part in {mixed}; allowed: bf16 with {roles['attention']}=flash_attention_2"
    )


def _axolotl_fsdp(roles: Roles, keys: Keys, _: Facts, words: FileWords) -> Keys:
    """Return the formats of axolotl's FSDP.

    Its own fsdp2_prepare_model (monkeypatch/accelerate/fsdp2.py) leaves weights in the format in
    which they are loaded, that of the products; with FSDP1 Accelerate makes fp32 ones of them.
    """
    mixed = _mixed(AXOLOTL, roles, keys, words)
    if mixed is None or _version(AXOLOTL, roles, keys, words) == 1:
        return {"precision": mixed or Precision.FP32, "gradient_precision": Precision.FP32}
    if mixed is Precision.FP16:
        raise words.unknown(roles["fp16"], value=True, allowed=("false with fsdp_version 2",))
    return {"precision": mixed, "gradient_precision": mixed, **IN_16_BITS}


def engine_precision(dialect: Dialect) -> Codec:
    """Return the codec of DeepSpeed's format; what its file leaves open is the trainer's."""

    def read(roles: Roles, keys: Keys, _: Facts, words: FileWords) -> Keys:
        mixed = _mixed(dialect, roles, keys, words)
        for name, own in (("bf16", Precision.BF16), ("fp16", Precision.FP16)):
            key = roles[f"deepspeed_{name}"]
            if key in keys and keys[key] not in (AUTO, mixed is own):
                raise words.unknown(key, keys[key], (mixed is own, AUTO))
        return {"precision": mixed or Precision.FP32}

    return Codec(read=read)


def _bucket(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    """Return the elements of DeepSpeed's buckets; auto is the square of the hidden size."""
    name, key = "stack.gradient_bucket_parameters", roles["size"]
    if keys.get(key) == AUTO:
        return {} if facts.model is None else {name: facts.model.hidden_size**2}
    value = keys.get(key, 500_000_000)
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return {name: words.whole({key: whole}, key, 1)}


def checkpoints(dialect: Dialect) -> Codec:
    """Return the codec of recomputation: all layers, one by one, or none."""

    def read(roles: Roles, keys: Keys, _: Facts, words: FileWords) -> Keys:
        said = [key for key in _listed(roles, "switch") if keys.get(key) is not None]
        is_on = any(switch(words, keys, key, usual=False) for key in said)
        off, fsdp = roles.get("off", ""), roles.get("fsdp", "")
        if off:
            is_on = is_on or not switch(words, keys, off, usual=not dialect.recomputes)
        by_fsdp = switch(words, keys, fsdp, usual=False)
        if is_on and by_fsdp:
            asked = off or ", ".join(said)
            raise PlanError(f"{fsdp} of {words.framework} does not go with {asked}")
        older = _listed(roles, "reentrant")
        is_older = any(
            switch(words, keys, key, usual=dialect.is_reentrant)
            for key in older
            if key in keys or dialect.is_reentrant
        )
        if is_on and is_older and "fsdp" in roles:
            raise words.unknown(older[0], value=True, allowed=("false with FSDP",))
        found: Keys = {"recompute": "full" if is_on or by_fsdp else "none"}
        return {**found, "stack.recompute_stops_early": not (is_on and is_older)}

    return Codec(read=read)


def _listed(roles: Roles, role: str) -> list[str]:
    """Return the keys of a role that has several, as ``switch`` and ``switch_new``."""
    return [key for name, key in roles.items() if name.split("_")[0] == role]


def _unused(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    """Return whether DDP searches unused weights: without recomputation it does."""
    usual = facts.get("recompute") != "full"
    key = roles["switch"]
    if keys.get(key) is None:
        return {"find_unused": usual}
    return {"find_unused": switch(words, keys, key, usual)}


def _version(dialect: Dialect, roles: Roles, keys: Keys, words: FileWords) -> int:
    said = [key for key in _listed(roles, "version") if keys.get(key) is not None]
    value = keys[said[0]] if said else dialect.fsdp_version
    if str(value) not in ("1", "2"):
        raise words.unknown(said[0], value, (1, 2))
    return int(str(value))


SHARDING = {"full_shard": True, "shard_grad_op": False}


def shards(dialect: Dialect) -> Codec:
    """Return the codec of FSDP: what is gathered again, and what the host keeps."""

    def read(roles: Roles, keys: Keys, _: Facts, words: FileWords) -> Keys:
        version = _version(dialect, roles, keys, words)
        options = _fsdp_options(roles["fsdp"], keys, words)
        known = {*SHARDING, "auto_wrap", "offload"}
        for each in options:
            if each not in known:
                raise words.unknown(roles["fsdp"], each, sorted(known))
        if "wraps" in roles and "auto_wrap" not in options:
            raise words.unknown(roles["fsdp"], " ".join(options), ("full_shard auto_wrap",))
        named = [SHARDING[each] for each in options if each in SHARDING]
        gathers = _gathers(version, roles["reshard"], keys, words)
        if gathers is None:
            gathers = named[0] if named else _usual_gathers(dialect, version)
        offloads = "offload" in options or switch(words, keys, roles["offload"], usual=False)
        return {
            "zero_stage": 3,
            "reshard_after_forward": gathers,
            "offload": "parameters" if offloads else "none",
        }

    return Codec(read=read)


def _usual_gathers(dialect: Dialect, version: int) -> bool:
    # setup_fsdp_envs of axolotl sets nothing, and Accelerate's plugin then shards all.
    return True


def _fsdp_options(key: str, keys: Keys, words: FileWords) -> list[str]:
    said = keys.get(key)
    if said is None or said is True or said == MARK or str(said).lower() == "true":
        return []
    if isinstance(said, list):
        return [str(each) for each in said]
    if not isinstance(said, str):
        raise words.unknown(key, shown(said), ("full_shard auto_wrap",))
    return said.replace(",", " ").split()


def _gathers(version: int, key: str, keys: Keys, words: FileWords) -> bool | None:
    said = keys.get(key)
    if said is None:
        return None
    word = str(said).lower()
    known = SHARDING if version == 1 else {"true": True, "false": False}
    if version == 1 and word in ("true", "false"):
        known = {"true": True, "false": False}
    if word not in known:
        raise words.unknown(key, said, known)
    return known[word]


def attention(names: Mapping[str, str], *, on_deepspeed: bool) -> Codec:
    """Return the codec of the attention kernel; without a word PyTorch's, which is flash.

    Args:
        names: Kernels by the trainer's words.
        on_deepspeed: Whether the plan's stack has to be told of the kernel.
    """

    def read(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
        key = roles["word"]
        said = keys.get(key)
        found = "flash"
        if facts.model is not None and facts.model.attention_sinks:
            found = "unfused"  # modeling_gpt_oss.py: none of PyTorch's has them
        if said is not None:
            if str(said) not in names:
                raise words.unknown(key, said, names)
            found = names[str(said)] or found
        for old, kernel in OLD_ATTENTION.items():
            if old in roles and switch(words, keys, roles[old], usual=False):
                found = kernel
        if not on_deepspeed or found != "flash":
            return {"attention": found}
        offered = {"stack.attention_kernels": '["unfused", "flash"]'}
        return {"attention": found, **offered, "stack.flash_kernel": "sdpa-fa2"}

    return Codec(read=read)


OLD_ATTENTION = {"flash": "flash", "sdpa": "flash", "eager": "unfused"}
ATTENTION = {
    "eager": "unfused",
    "sdpa": "flash",
    "flash_attention_2": "flash",
}
LLAMA_FACTORY_ATTENTION = {"auto": "", "disabled": "unfused", "sdpa": "flash", "fa2": "flash"}


def _mesh(roles: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    """Return the ranks that share shards (_get_parallel_config_kwargs, utils/distributed.py)."""
    dp = facts.world_size
    replicas = _count(roles, keys, words, "replicas", 1)
    size = _count(roles, keys, words, "shards", dp // replicas if replicas > 1 else dp)
    if keys.get(roles["replicas"]) is None and size > 1:
        replicas = dp // size
    if size * replicas != dp:
        raise words.unknown(roles["shards"], size, (dp // replicas,))
    return {"dp": dp, "dp_shard": size}


def _codecs(dialect: Dialect, names: Mapping[str, str], own: Codecs) -> Codecs:
    return {
        **FRAMEWORKS["deepspeed"].program.codecs,
        "model of the hub": Codec(read=model_of),
        "batches of a trainer": batches(dialect),
        "formats beside DDP": plain_precision(dialect),
        "formats of fp32 weights": master_precision(dialect),
        "formats on DeepSpeed": engine_precision(dialect),
        "bucket on DeepSpeed": Codec(read=_bucket),
        "checkpoints of a trainer": checkpoints(dialect),
        "unused weights": Codec(read=_unused),
        "FSDP of a trainer": shards(dialect),
        "attention of transformers": attention(names, on_deepspeed=False),
        "attention on DeepSpeed": attention(names, on_deepspeed=True),
        **own,
    }


def _program(dialect: Dialect, names: Mapping[str, str], own: Codecs | None = None) -> Program:
    codecs = _codecs(dialect, names, own or {})
    return Program(command=lambda _: (), included=with_included, codecs=codecs)


PROGRAMS: Mapping[str, Program] = {
    "transformers": _program(TRANSFORMERS, ATTENTION),
    "llama-factory": _program(LLAMA_FACTORY, LLAMA_FACTORY_ATTENTION),
    "axolotl": _program(
        AXOLOTL,
        ATTENTION,
        {
            "formats of axolotl's DDP": Codec(read=_axolotl_ddp),
            "formats of axolotl's FSDP": Codec(read=_axolotl_fsdp),
            "mesh of axolotl": Codec(read=_mesh),
        },
    ),
}
